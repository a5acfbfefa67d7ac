"""Prompts cut to their last tokens"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64)
output = llm.generate("word " * 100, SamplingParams(max_tokens=2, truncate_prompt_tokens=20))[0]
assert len(output.prompt_token_ids) == 20
