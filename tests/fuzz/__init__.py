"""Hostile models, configurations and requests, made from seeds: each is a right answer or one typed error, soon and in little memory.

`python -m tests.fuzz KIND SEED` repeats one case, `python -m tests.fuzz KIND SEED COUNT` runs that many from a seed on. Several kinds
(`models,requests`) run one after the other. A corpus is its generator; no files are kept.
"""
