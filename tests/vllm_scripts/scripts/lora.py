"""Adapters (LoRA)"""

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM("tiny/llama", enable_lora=True, max_loras=2, max_lora_rank=8)
llm.generate("Hello", SamplingParams(max_tokens=4), lora_request=LoRARequest("sql-lora", 1, "adapters/sql"))
