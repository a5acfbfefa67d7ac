"""Embeddings cut to their first elements (Matryoshka)"""

from vllm import LLM, PoolingParams

llm = LLM("tiny/llama", runner="pooling", hf_overrides={"matryoshka_dimensions": [8, 32]}, max_model_len=128)
outputs = llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=32))
assert outputs[0].outputs.hidden_size == 32
assert abs(sum(float(x) ** 2 for x in outputs[0].outputs.embedding) - 1) < 1e-4
try:
    llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=16))
except ValueError as error:
    print(error)
else:
    raise AssertionError("16 dimensions")
