"""Prefix caches kept apart by a salt"""

from vllm import LLM, SamplingParams, TextPrompt

llm = LLM(model="tiny/llama", max_model_len=512)
params = SamplingParams(max_tokens=1)


def cached(salt):
    return llm.generate(TextPrompt(prompt="secret " * 20, cache_salt=salt), params)[0].num_cached_tokens


assert cached("a") == 0
assert cached("b") == 0
assert cached("a") > 100
