"""A KV cache of fp8"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", kv_cache_dtype="fp8", max_model_len=64)
assert len(llm.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids) == 6
