"""Pictures in prompts"""

from vllm import LLM, SamplingParams

llm = LLM("tiny/llama", max_model_len=64, limit_mm_per_prompt={"image": 1})
llm.generate({"prompt": "What is this?", "multi_modal_data": {"image": object()}}, SamplingParams(max_tokens=4))
