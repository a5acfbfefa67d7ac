"""Several engines behind one LLM"""

from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
prompts = [{"prompt_token_ids": [3, 5, 7, number]} for number in range(6)]

llm = LLM("tiny/llama", data_parallel_size=2, skip_tokenizer_init=True)
outputs = llm.generate(prompts, params)
assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 6
again = llm.generate(prompts, params)
assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
