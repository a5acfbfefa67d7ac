"""Weights partly in the host's memory"""

from vllm import LLM

LLM("tiny/llama", cpu_offload_gb=4)
