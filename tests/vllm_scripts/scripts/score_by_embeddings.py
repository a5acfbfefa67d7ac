"""Scores of two texts by their embeddings"""

from vllm import LLM

llm = LLM(model="tiny/llama", runner="pooling", convert="embed", max_model_len=128)
(output,) = llm.score("The same text", "The same text")
assert abs(output.outputs.score - 1) < 1e-3
