"""Ranks that torchrun started"""

from vllm import LLM

LLM("tiny/llama", tensor_parallel_size=2, distributed_executor_backend="external_launcher", seed=1)
