"""Prefix caching: equal beginnings of prompts are computed once"""

from vllm import LLM, SamplingParams

TABLE = "| name | age |\n" + "".join(f"| person {n} | {20 + n} |\n" for n in range(12))
params = SamplingParams(temperature=0, max_tokens=4)


def get_generation(llm, question):
    return llm.generate(TABLE + question, sampling_params=params)[0]


llm = LLM(model="tiny/llama", enable_prefix_caching=True, max_model_len=512)
assert get_generation(llm, "Question: how old is person 1?").num_cached_tokens == 0
second = get_generation(llm, "Question: how old is person 2?")
assert second.num_cached_tokens > 200
llm.reset_prefix_cache()
cold = get_generation(llm, "Question: how old is person 2?")
assert cold.num_cached_tokens == 0
assert cold.outputs[0].token_ids == second.outputs[0].token_ids
