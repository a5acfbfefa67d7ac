"""Checkpoints with scales of an fp8 KV cache, made from one without so that both compute the same.

Keys are multiplied by a power of two, queries divided by it; values likewise, and the rows that read them. A cache that holds keys and
values divided by these powers then holds what that of the plain checkpoint does, bit by bit; one that does not, saturates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SCALES = ((64.0, 1024.0), (256.0, 512.0), (0.5, 2048.0))
"""(k_scale, v_scale) of the layers."""

ATTENTION = ("self_attn.k_scale", "self_attn.v_scale")
"""Where compressed-tensors has them."""


def scale_checkpoint(
    plain: Path,
    folder: Path,
    names: Sequence[str] = ATTENTION,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
    shape: tuple[int, ...] = (1,),
    quantization: Mapping[str, object] | None = None,
    scales: Sequence[tuple[float, float]] = SCALES,
) -> Path:
    """Write the checkpoint with scales that belongs to a plain one, and return its folder.

    Args:
        names: of a layer's scales; one name for a scale of both keys and values.
        change: applied to all tensors before they are written.
        shape: of a scale.
        quantization: what config.json says of it.
    """
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    layers = sum(name.endswith("k_proj.weight") for name in tensors)
    for layer, (k_scale, v_scale) in enumerate(scales[:layers]):
        prefix = f"model.layers.{layer}."
        if len(names) == 1:
            k_scale = v_scale
        for part, factor in (("q", 1 / k_scale), ("k", k_scale), ("v", v_scale), ("o", 1 / v_scale)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] *= factor
        for name, scale in zip(names, (k_scale, v_scale), strict=False):
            tensors[prefix + name] = torch.full(shape, scale)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder
