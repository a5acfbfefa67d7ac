"""Prompts as embeddings"""

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ids = [3, 5, 7, 11]
with torch.no_grad():
    table = AutoModelForCausalLM.from_pretrained("tiny/llama").get_input_embeddings()
    embeds = table(torch.tensor(ids))

llm = LLM("tiny/llama", max_model_len=64, enable_prompt_embeds=True)
by_embeds, by_ids = llm.generate([{"prompt_embeds": embeds}, {"prompt_token_ids": ids}], params)
assert by_embeds.outputs[0].token_ids == by_ids.outputs[0].token_ids
