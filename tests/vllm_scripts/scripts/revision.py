"""A revision of a model on a hub"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", revision="main", trust_remote_code=False, max_model_len=64)
assert len(llm.generate("Hello", SamplingParams(max_tokens=2))) == 1
