"""Films in prompts"""

import numpy as np
from vllm import LLM, SamplingParams

llm = LLM("tiny/idefics3", max_model_len=64)
prompt = {"prompt": "What is this?", "multi_modal_data": {"video": np.zeros((2, 8, 8, 3), np.uint8)}}
llm.generate(prompt, SamplingParams(max_tokens=4))
