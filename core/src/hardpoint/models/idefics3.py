"""Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): Llama, and a vision transformer (SigLIP, arXiv:2303.15343) for pictures.

A picture comes as tiles. Each is divided into patches, which attend to one another; then the hidden states of neighbouring patches are put
side by side and projected to embeddings of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hardpoint.interfaces.batch import EmbeddingKind
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.errors import WorkerError
from hardpoint.layers import Layer, LayerNorm, Linear, QKVLinear, SmallEmbedding, WeightShard
from hardpoint.layers.activations import ACTIVATIONS
from hardpoint.layers.parallel import ALONE, NO_OTHERS
from hardpoint.models.llama import Llama

if TYPE_CHECKING:
    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig

_TILES = 4
"""Tiles that are encoded together: a large picture has more, and their activations would take more memory than a step's."""
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""What transformers takes where a configuration leaves it out."""


class PatchEmbeddings(nn.Module):
    """A patch's pixels, projected, and the embedding of its place in the tile, which is a fraction of the tile's sides."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.side = config.integer("image_size") // config.integer("patch_size")
        self.patch_embedding = PatchProjection(config, context)
        self.position_embedding = SmallEmbedding(self.side**2, config.hidden_size, context)

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """Return [tiles, patches, hidden_size].

        Args:
            pixels: [tiles, channels, height, width].
            mask: bool[tiles, rows, columns], which patches have pixels of the picture.
        """
        down = self._places(mask[:, :, 0].sum(1), mask.shape[1])
        across = self._places(mask[:, 0, :].sum(1), mask.shape[2])
        places = (down[:, :, None] * self.side + across[:, None, :]).masked_fill(~mask, 0)
        return self.patch_embedding(pixels) + self.position_embedding(places.flatten(1))  # type: ignore[no-any-return]

    def _places(self, counts: Tensor, most: int) -> Tensor:
        """Return int64[tiles, most]: in which of `side` equal parts each of `counts` patches in a row is, by the place of its beginning."""
        borders = torch.arange(1 / self.side, 1.0, 1 / self.side, device=counts.device)
        index = torch.arange(most, device=counts.device, dtype=torch.float32)
        fractions = (index[None] * (1.0 / counts)[:, None]).clamp(max=1.0 - 1e-6)
        return torch.bucketize(fractions, borders, right=True)


class PatchProjection(Layer):
    """The projection of a patch's pixels."""

    weight: Tensor
    bias: Tensor

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size = self.patch_size = config.integer("patch_size")
        shape = (config.hidden_size, config.integer("num_channels"), size, size)
        self.add_weight("weight", [WeightShard("weight", shape)], dtype=context.dtype)
        self.add_weight("bias", [WeightShard("bias", shape[:1])], dtype=context.dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [tiles, patches, hidden_size] of pixels [tiles, channels, height, width]."""
        found = functional.conv2d(pixels, self.weight, self.bias, stride=self.patch_size)
        # Operators take rows that are contiguous, and all that is added to these has their layout.
        return found.flatten(2).transpose(1, 2).contiguous()


class VisionAttention(nn.Module):
    """Attention of all patches of a tile to one another."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.num_heads, self.head_dim, size = config.num_heads, config.head_dim, config.hidden_size
        layer = AttentionLayer(self.num_heads, self.num_heads, self.head_dim, self.head_dim**-0.5, causal=False)
        self.qkv_proj = QKVLinear(size, layer, context, bias=True)
        self.out_proj = Linear([("out_proj", size)], size, context, bias=True)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """Return [tiles, patches, hidden_size]; `visible` is bool[tiles, 1, 1, patches], None where all are."""
        tiles, patches, _ = x.shape
        qkv = self.qkv_proj(x).view(tiles, patches, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out_proj(out.transpose(1, 2).reshape(tiles, patches, -1))  # type: ignore[no-any-return]


class VisionMLP(nn.Module):
    """`fc2(act(fc1(x)))`."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        activation = str(config.values["hidden_act"])
        self.fc1 = Linear([("fc1", inner)], size, context, bias=True, activation=activation)
        self.fc2 = Linear([("fc2", size)], inner, context, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))  # type: ignore[no-any-return]


class VisionLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.number("layer_norm_eps")
        self.layer_norm1 = LayerNorm("layer_norm1", size, eps, context)
        self.self_attn = VisionAttention(config, context)
        self.layer_norm2 = LayerNorm("layer_norm2", size, eps, context)
        self.mlp = VisionMLP(config, context)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), visible)
        return x + self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class VisionLayers(nn.Module):
    """The layers, by the name that checkpoints give them."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config, context) for _ in range(config.num_layers))


class VisionTransformer(nn.Module):
    """From pixels to hidden states of patches."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(config, context)
        self.encoder = VisionLayers(config, context)
        size, eps = config.hidden_size, config.number("layer_norm_eps")
        self.post_layernorm = LayerNorm("post_layernorm", size, eps, context)

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """Return [tiles, patches, hidden_size]; arguments as of `PatchEmbeddings`."""
        x = self.embeddings(pixels, mask)
        visible = None if bool(mask.all()) else mask.flatten(1)[:, None, None, :]
        for layer in self.encoder.layers:
            x = layer(x, visible)
        return self.post_layernorm(x)  # type: ignore[no-any-return]


class Connector(nn.Module):
    """Squares of patches, their hidden states side by side, projected to embeddings of the language model."""

    def __init__(self, config: ModelConfig, width: int, context: ModelContext) -> None:
        super().__init__()
        self.factor = config.integer("scale_factor")
        inputs = width * self.factor**2
        self.projection = Linear([("modality_projection.proj", config.hidden_size)], inputs, context)

    def forward(self, x: Tensor, side: int) -> Tensor:
        """Return [tiles, rows, hidden_size] of the hidden states [tiles, side * side, width] of patches."""
        tiles, _, width = x.shape
        squares = side // self.factor
        x = x.view(tiles, squares, self.factor, squares, self.factor, width).transpose(2, 3)
        return self.projection(x.reshape(tiles, squares**2, -1))  # type: ignore[no-any-return]


class Idefics3(Llama):
    """Idefics3. The vision transformer is on the ranks that embed tokens, whole on each of them."""

    embedding_kinds = frozenset({EmbeddingKind.ROWS, EmbeddingKind.IMAGE})
    embeds_both_sides = False
    published = {"model.": "model.text_model.", "vision.": "model.vision_model.", "connector.": "model.connector."}  # noqa: RUF012

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.vision: VisionTransformer | None = None
        if context.rank.is_first:
            vision, alone = config.part("vision_config", _VISION), replace(context, rank=ALONE, ranks=NO_OTHERS)
            self.vision = VisionTransformer(vision, alone)
            self.connector = Connector(config, vision.hidden_size, alone)
            self.tile_size, self.patch_size = vision.integer("image_size"), vision.integer("patch_size")

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"scale_factor": 2, "image_token_id": 128257, **values}

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = super().refusals(config)
        vision = config.part("vision_config", _VISION)
        kind = config.values.get("model_type", "llama")
        if kind != "llama":
            reasons.append(f"its language model is of the type {kind}")
        activation = str(vision.values["hidden_act"])
        if activation not in ACTIVATIONS:
            reasons.append(f"the activation of its vision transformer is {activation}")
        side = vision.integer("image_size") // vision.integer("patch_size")
        if side % config.integer("scale_factor"):
            reasons.append(f"the {side} patches of a tile's side are no multiple of scale_factor")
        if vision.hidden_size % vision.num_heads:
            reasons.append("the width of its vision transformer is no multiple of its heads")
        return reasons

    def encoded(self, kind: EmbeddingKind, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of a picture, one tile after the other.

        Args:
            arrays: "pixel_values" float32[tiles, channels, height, width] and "pixel_attention_mask" bool[tiles, height, width].
        """
        assert self.vision is not None, "the first stage embeds"
        pixels, mask = arrays["pixel_values"], arrays["pixel_attention_mask"].bool()
        height, width = pixels.shape[2:]
        side = height // self.patch_size
        if height != width or side % self.connector.factor:
            raise WorkerError("tiles of pictures are square", found=f"{height} x {width} pixels")
        patches = mask.view(len(mask), side, self.patch_size, side, self.patch_size).any(4).any(2)
        parts = [
            self.connector(self.vision(some.to(self._dtype), seen), side).flatten(0, 1)
            for some, seen in zip(torch.split(pixels, _TILES), torch.split(patches, _TILES), strict=True)
        ]
        return torch.cat(parts)

    def largest_source(self) -> dict[str, Tensor]:
        if self.vision is None:
            return {}
        channels, side = self.vision.embeddings.patch_embedding.weight.shape[1], self.tile_size
        return {
            "pixel_values": torch.zeros(_TILES, channels, side, side),
            "pixel_attention_mask": torch.ones(_TILES, side, side, dtype=torch.bool),
        }


class SmolVLM(Idefics3):
    """SmolVLM: Idefics3 with a smaller language model."""
