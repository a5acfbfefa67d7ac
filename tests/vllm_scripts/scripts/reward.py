"""Rewards of a text by a model with one label"""

from vllm import LLM, PoolingParams

llm = LLM(model="tiny/cross-encoder", runner="pooling", enforce_eager=True)
params = PoolingParams(use_activation=False)
outputs = llm.encode(["A good answer.", "A bad one."], params, pooling_task="classify")
assert all(output.outputs.data.shape == (1,) for output in outputs)
