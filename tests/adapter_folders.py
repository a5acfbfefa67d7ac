"""LoRA adapters of the tiny models in `quantised_checkpoints`, in folders as PEFT writes them, and the same merged by its formula."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    weights: Mapping[str, Tensor], seed: int, rank: int = 8, targets: Sequence[str] = LINEAR
) -> dict[str, Tensor]:
    """Return seeded matrices A and B, by PEFT's names, for all layers of these kinds."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            found[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.1
            found[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    """Write an adapter's folder, whose configuration fits tensors of `adapter_tensors` but for the changes."""
    ranks = {len(tensor) for name, tensor in tensors.items() if ".lora_A." in name}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": max(ranks, default=8),
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "target_modules": sorted(layers),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def merged(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], scale: float = 2.0) -> dict[str, Tensor]:
    """Return weights with `scale * B @ A` added to each, as PEFT's merge_and_unload() does."""
    found = dict(weights)
    for name, down in tensors.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            found[weight] = found[weight] + scale * tensors[name.replace(".lora_A.", ".lora_B.")] @ down
    return found
