"""Probabilities of a text's labels"""

from vllm import LLM

llm = LLM(model="tiny/classifier", runner="pooling", enforce_eager=True)
outputs = llm.classify(["Hello, my name is", "The capital of France is"])
for output in outputs:
    probs = output.outputs.probs
    assert len(probs) == output.outputs.num_classes == 3
    assert abs(sum(probs) - 1) < 1e-4
