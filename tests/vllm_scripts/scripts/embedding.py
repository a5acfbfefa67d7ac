"""Embeddings of texts"""

from vllm import LLM

llm = LLM(model="tiny/llama", runner="pooling", enforce_eager=True, max_model_len=128)
outputs = llm.embed(["Hello", "The capital of France"])
for output in outputs:
    embedding = output.outputs.embedding
    assert len(embedding) == 64
    assert abs(sum(float(x) ** 2 for x in embedding) - 1) < 1e-4
