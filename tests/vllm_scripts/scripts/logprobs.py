"""Log probabilities of sampled tokens"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
completion = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=4, logprobs=3))[0].outputs[0]
total = 0.0
for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
    assert len(position) == 3
    assert position[token_id].rank == 1
    assert position[token_id].decoded_token is not None
    total += position[token_id].logprob
assert abs(total - completion.cumulative_logprob) < 1e-5
