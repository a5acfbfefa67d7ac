"""An adapter asked for by a request"""

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM("tiny/llama", max_model_len=64, enable_lora=False)
assert len(llm.generate("Hello", SamplingParams(max_tokens=4), lora_request=None)) == 1
llm.generate("Hello", SamplingParams(max_tokens=4), lora_request=LoRARequest("sql-lora", 1, "adapters/sql"))
