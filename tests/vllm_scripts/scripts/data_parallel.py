"""Several engines behind one LLM"""

from vllm import LLM

LLM("tiny/llama", data_parallel_size=2)
