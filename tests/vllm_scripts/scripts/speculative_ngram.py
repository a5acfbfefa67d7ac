"""Speculative decoding by prompt lookup"""

from vllm import LLM

LLM("tiny/llama", speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4})
