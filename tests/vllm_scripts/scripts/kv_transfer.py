"""Prefill and decode in engines of their own"""

from vllm import LLM

LLM("tiny/llama", kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
