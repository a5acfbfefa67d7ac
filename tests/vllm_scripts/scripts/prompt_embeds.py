"""Prompts as embeddings"""

import torch
from vllm import LLM

llm = LLM("tiny/llama", max_model_len=64)
llm.generate({"prompt_embeds": torch.zeros(4, 64)})
