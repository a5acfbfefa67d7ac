"""Experts divided among ranks"""

from vllm import LLM

LLM("tiny/mixtral", enable_expert_parallel=True)
