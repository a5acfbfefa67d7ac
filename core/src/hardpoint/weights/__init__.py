"""Weights: what checkpoints hold (safetensors, GGUF, random ones), and how it gets into a model's parameters, once or again.

Nothing here knows a family: a model says which shards of which tensors its parameters are (`layers.weights`), by the names of the published
checkpoints.
"""
