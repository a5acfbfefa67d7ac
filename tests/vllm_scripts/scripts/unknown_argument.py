"""Arguments that nobody knows"""

from vllm import LLM

LLM("tiny/llama", max_modle_len=64)
