"""A configuration overridden while loading"""

from vllm import LLM

LLM("tiny/llama", hf_overrides={"num_hidden_layers": 1})
