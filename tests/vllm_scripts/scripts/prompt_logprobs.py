"""Log probabilities of the prompt"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
output = llm.generate("Hello", SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
assert output.prompt_logprobs[0] is None
for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
    assert token_id in position
    assert len(position) in (2, 3)
