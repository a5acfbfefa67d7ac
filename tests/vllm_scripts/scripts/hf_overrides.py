"""A configuration overridden while loading"""

from vllm import LLM

llm = LLM("tiny/llama", hf_overrides={"max_position_embeddings": 2048})
assert llm.llm_engine.model_config.max_model_len == 2048
