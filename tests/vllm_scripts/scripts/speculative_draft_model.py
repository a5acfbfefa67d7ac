"""Speculative decoding by a draft model"""

from vllm import LLM, SamplingParams

llm = LLM(
    "tiny/llama",
    speculative_config={"method": "draft_model", "model": "tiny/llama", "num_speculative_tokens": 3},
    max_model_len=128,
)
output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=12))[0]
assert len(output.outputs[0].token_ids) == 12
