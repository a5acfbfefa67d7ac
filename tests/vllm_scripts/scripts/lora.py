"""Adapters (LoRA)"""

import json
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

folder, layer = Path(mkdtemp()), "base_model.model.model.layers.0.self_attn.q_proj"
config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"], "layers_to_transform": [0]}
(folder / "adapter_config.json").write_text(json.dumps(config))
matrices = {f"{layer}.lora_A.weight": torch.randn(8, 64), f"{layer}.lora_B.weight": torch.randn(64, 8)}
save_file(matrices, folder / "adapter_model.safetensors")

llm = LLM("tiny/llama", enable_lora=True, max_loras=2, max_lora_rank=8)
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
adapted = LoRARequest("sql-lora", 1, str(folder))
plain, with_adapter = llm.generate(["Hello", "Hello"], params, lora_request=[None, adapted])
assert plain.outputs[0].token_ids != with_adapter.outputs[0].token_ids
assert llm.generate("Hello", params, lora_request=adapted)[0].outputs[0].token_ids == with_adapter.outputs[0].token_ids
