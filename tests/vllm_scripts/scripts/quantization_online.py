"""Quantisation while loading"""

from vllm import LLM

LLM("tiny/llama", quantization="bitsandbytes")
