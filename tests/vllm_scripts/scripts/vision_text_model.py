"""Pictures for a model of text"""

from PIL import Image
from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64, limit_mm_per_prompt={"image": 1})
prompt = {"prompt": "What is this?", "multi_modal_data": {"image": Image.new("RGB", (8, 8))}}
llm.generate(prompt, SamplingParams(max_tokens=4))
