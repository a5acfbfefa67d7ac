"""Prompts that are too long are a ValueError"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=32)
try:
    llm.generate(["short", "long " * 40], SamplingParams(max_tokens=4))
except ValueError as error:
    print("Refused:", error)
else:
    raise AssertionError("a prompt of 200 tokens was taken")
