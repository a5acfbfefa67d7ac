"""Scores of two texts by a cross-encoder"""

from vllm import LLM

llm = LLM(model="tiny/cross-encoder", runner="pooling", enforce_eager=True)
query = "What is the capital of France?"
documents = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
outputs = llm.score(query, documents)
assert len(outputs) == 2
assert all(0 < output.outputs.score < 1 for output in outputs)
assert len(llm.score([query, query], documents)) == 2
