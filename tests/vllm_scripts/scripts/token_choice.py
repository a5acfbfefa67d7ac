"""Tokens that are favoured, and tokens that alone are allowed"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
favoured = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=3, logit_bias={65: 100.0}))[0].outputs[0]
assert list(favoured.token_ids) == [65, 65, 65]
allowed = llm.generate("Hi", SamplingParams(temperature=1, max_tokens=20, allowed_token_ids=[70, 71]))[0].outputs[0]
assert set(allowed.token_ids) <= {70, 71}
