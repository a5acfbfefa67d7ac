"""Qwen2.5-VL (arXiv:2502.13923): Qwen 2's language model with positions of three axes, and a vision transformer over windows of patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hardpoint.interfaces.batch import EmbeddingKind
from hardpoint.interfaces.errors import WorkerError
from hardpoint.layers import Layer, Linear, RMSNorm, RotaryEmbedding, WeightShard
from hardpoint.layers.parallel import ALONE, NO_OTHERS
from hardpoint.models.config import with_kv_heads
from hardpoint.models.qwen2 import Qwen2

if TYPE_CHECKING:
    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig

_VISION = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_act": "silu",
}
"""What transformers takes where a configuration leaves it out."""
_THETA = 10000.0
_EPS = 1e-6
_LARGEST_SIDE = 64
"""Patches of the side of the picture whose encoding is measured: 896 pixels of 14. Larger ones take more than the profile says."""


class PatchProjection(Layer):
    """The projection of a patch's pixels, of which there are those of two moments, alike in a picture."""

    weight: Tensor

    def __init__(self, vision: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size = vision.integer("patch_size")
        shape = (
            vision.hidden_size,
            vision.integer("in_channels"),
            vision.integer("temporal_patch_size"),
            size,
            size,
        )
        self.add_weight("weight", [WeightShard("weight", shape)], dtype=context.dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [patches, hidden_size] of pixels [patches, channels * moments * height * width]."""
        return functional.linear(pixels, self.weight.flatten(1))


class VisionAttention(nn.Module):
    """Attention of patches to those of their window, or to all, rotated by row and column."""

    def __init__(self, vision: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size = vision.hidden_size
        self.num_heads = vision.integer("num_heads")
        self.qkv = Linear([("qkv", 3 * size)], size, context, bias=True)
        self.proj = Linear([("proj", size)], size, context, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int]) -> Tensor:
        """Return [patches, hidden_size]; `lengths` are the patches of each window, in order."""
        patches = len(x)
        q, k, v = self.qkv(x).view(patches, 3, self.num_heads, -1).unbind(1)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        # Windows of one length at a time would be fewer calls; there are at most four lengths, and few windows.
        parts = zip(*(torch.split(one.transpose(0, 1)[None], lengths, dim=2) for one in (q, k, v)), strict=True)
        out = torch.cat([functional.scaled_dot_product_attention(*part) for part in parts], dim=2)
        return self.proj(out[0].transpose(0, 1).reshape(patches, -1))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [patches, heads, dim] with its halves rotated by angles whose cosines and sines are float32[patches, dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class VisionMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with biases."""

    def __init__(self, vision: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, inner = vision.hidden_size, vision.intermediate_size
        self.gate_up = Linear([("gate_proj", inner), ("up_proj", inner)], size, context, bias=True)
        self.down = Linear([("down_proj", size)], inner, context, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, vision: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.norm1 = RMSNorm(vision.hidden_size, _EPS, context)
        self.attn = VisionAttention(vision, context)
        self.norm2 = RMSNorm(vision.hidden_size, _EPS, context)
        self.mlp = VisionMLP(vision, context)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, lengths)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PatchMerger(nn.Module):
    """Squares of patches, their hidden states side by side, made into embeddings of the language model."""

    def __init__(self, vision: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.width = vision.hidden_size * vision.integer("spatial_merge_size") ** 2
        self.ln_q = RMSNorm(vision.hidden_size, _EPS, context)
        self.up = Linear([("mlp.0", self.width)], self.width, context, bias=True)
        self.down = Linear([("mlp.2", vision.integer("out_hidden_size"))], self.width, context, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(self.ln_q(x).view(-1, self.width))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """From the pixels of a picture's patches to embeddings of the language model."""

    def __init__(self, vision: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.merge_size = vision.integer("spatial_merge_size")
        self.window = _window(vision)
        self.head_dim = vision.hidden_size // vision.integer("num_heads")
        self.whole_blocks = vision.integers("fullatt_block_indexes")
        self.patch_embed = nn.ModuleDict({"proj": PatchProjection(vision, context)})
        self.blocks = nn.ModuleList(VisionBlock(vision, context) for _ in range(vision.integer("depth")))
        self.merger = PatchMerger(vision, context)

    def forward(self, pixels: Tensor, height: int, width: int) -> Tensor:
        """Return [rows, hidden size of the language model].

        Args:
            pixels: [height * width, pixels of a patch]; the patches of a square that is merged follow one another.
            height, width: of the picture in patches.
        """
        order, lengths = self._windows(height // self.merge_size, width // self.merge_size)
        order = order.to(pixels.device)
        cos, sin = self._rotation(height, width, pixels.device)
        x, cos, sin = (self._in_order(one, order) for one in (self.patch_embed["proj"](pixels), cos, sin))
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, [len(x)] if number in self.whole_blocks else lengths)
        return self.merger(x)[torch.argsort(order)]  # type: ignore[no-any-return]

    def _in_order(self, x: Tensor, order: Tensor) -> Tensor:
        squares = x.view(len(order), -1, x.shape[-1])
        return squares[order].flatten(0, 1)

    def _windows(self, height: int, width: int) -> tuple[Tensor, list[int]]:
        """Return the squares of patches, int64[height * width], window after window, and the patches of each window."""
        numbers = torch.arange(height * width).view(height, width)
        windows = [
            window.flatten()
            for rows in torch.split(numbers, self.window)
            for window in torch.split(rows, self.window, dim=1)
        ]
        return torch.cat(windows), [len(window) * self.merge_size**2 for window in windows]

    def _rotation(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32[patches, head_dim / 2], of each patch's row and column, in the order of the pixels."""
        size, quarter = self.merge_size, self.head_dim // 2
        rows = torch.arange(height, device=device)[:, None].expand(height, width)
        columns = torch.arange(width, device=device)[None].expand(height, width)
        places = [
            one.reshape(height // size, size, width // size, size).transpose(1, 2).flatten() for one in (rows, columns)
        ]
        frequencies = 1.0 / (_THETA ** (torch.arange(0, quarter, 2, dtype=torch.float32, device=device) / quarter))
        angles = torch.cat([place[:, None].float() * frequencies for place in places], dim=-1)
        return angles.cos(), angles.sin()


class Qwen2_5_VL(Qwen2):  # noqa: N801
    """Qwen2.5-VL. The vision transformer is on the ranks that embed tokens, whole on each of them."""

    embedding_kinds = frozenset({EmbeddingKind.ROWS, EmbeddingKind.IMAGE})
    embeds_both_sides = False

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.visual: VisionTransformer | None = None
        if context.rank.is_first:
            vision, alone = config.part("vision_config", _VISION), replace(context, rank=ALONE, ranks=NO_OTHERS)
            self.visual = VisionTransformer(vision, alone)
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.sections = _sections(config)

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
        completed = super().complete({**defaults, **with_kv_heads(values, 8)})
        of_text = completed.get("text_config", {}).get("tie_word_embeddings")
        if of_text:
            # Configurations of before transformers 5 say it there of the whole model.
            completed["tie_word_embeddings"] = of_text
        rope = completed.pop("rope_parameters", None) or completed.pop("rope_scaling", None)
        if isinstance(rope, Mapping):
            # Three axes of positions are no kind of frequencies, as which older configurations name them.
            kind = rope.get("rope_type") or rope.get("type")
            completed["rope_parameters"] = {**rope, "rope_type": "default" if kind in (None, "mrope") else kind}
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        vision = config.part("vision_config", _VISION)
        if vision.integer("out_hidden_size") != config.hidden_size:
            reasons.append("its vision transformer makes embeddings of another width than the language model's")
        if vision.values["hidden_act"] != "silu":
            reasons.append(f"the activation of its vision transformer is {vision.values['hidden_act']}")
        if not _window(vision):
            reasons.append("the windows of its vision transformer are smaller than what becomes one embedding")
        if sum(_sections(config)) != config.head_dim // 2 or len(_sections(config)) != 3:
            reasons.append(f"mrope_section {_sections(config)} does not divide half a head into three")
        return reasons

    def encoded(self, kind: EmbeddingKind, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of a picture.

        Args:
            arrays: "pixel_values" float32[patches, pixels of a patch] and "image_grid_thw" int64[3], patches by time (1), rows and columns.
        """
        assert self.visual is not None, "the first stage embeds"
        moments, height, width = arrays["image_grid_thw"].tolist()
        pixels = arrays["pixel_values"]
        if moments != 1 or height * width != len(pixels):
            raise WorkerError(
                "a picture is of one moment", found=f"{len(pixels)} patches of {moments} x {height} x {width}"
            )
        return self.visual(pixels.to(self._dtype), height, width)  # type: ignore[no-any-return]

    def largest_source(self) -> dict[str, Tensor]:
        if self.visual is None:
            return {}
        width = self.visual.patch_embed["proj"].get_parameter("weight")[0].numel()
        return {
            "pixel_values": torch.zeros(_LARGEST_SIDE**2, width),
            "image_grid_thw": torch.tensor([1, _LARGEST_SIDE, _LARGEST_SIDE]),
        }


def _window(vision: ModelConfig) -> int:
    """Return the side of a window, in squares of patches that are merged."""
    return vision.integer("window_size") // vision.integer("spatial_merge_size") // vision.integer("patch_size")


def _sections(config: ModelConfig) -> tuple[int, ...]:
    """Return how many of a head's angles turn with time, with rows and with columns."""
    return config.positions.integers("mrope_section") or (16, 24, 24)
