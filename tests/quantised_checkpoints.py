"""Tiny seeded models in folders, dense, for tests of quantised weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 128, 256, 4, 2, 256, 2

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "dtype": "float32",
}


def dense_weights(seed: int = 0, inner: int = INNER) -> dict[str, Tensor]:
    """Return the weights of a seeded llama with a tied head, float32, by their names in checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), generator=generator) * 0.15

    kv = HIDDEN // HEADS * KV_HEADS
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        matrices = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (inner, HIDDEN),
            "mlp.up_proj": (inner, HIDDEN),
            "mlp.down_proj": (HIDDEN, inner),
        }
        for name, shape in matrices.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
    return weights


def write_folder(folder: Path, weights: Mapping[str, Tensor], **changes: Any) -> Path:
    """Write a folder with a checkpoint of these tensors, and a configuration with these changes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG | changes))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder
