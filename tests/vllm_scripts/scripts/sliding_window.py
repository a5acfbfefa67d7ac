"""Models with a sliding window"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/mistral", max_model_len=256)
assert len(llm.generate("Hello " * 20, SamplingParams(max_tokens=30, ignore_eos=True))[0].outputs[0].token_ids) == 30
