"""Scores of two texts by their tokens' embeddings, in the worker (late interaction)"""

from vllm import LLM, PoolingParams

llm = LLM(model="tiny/llama", runner="pooling", max_model_len=128)
llm.encode("A text", PoolingParams(late_interaction_params={"mode": "cache_query"}), pooling_task="token_embed")
