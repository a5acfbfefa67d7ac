"""Safetensors checkpoints whose matrices are 8-bit floating numbers with scales: `fp8` (DeepSeek, Qwen3, FBGEMM) and compressed-tensors.

An element is `number * scale` in all of them, and they differ in what shares a scale (transformers' `finegrained_fp8` and `fbgemm_fp8`
integrations, vLLM's `Fp8Config`, compressed-tensors' `float_quantized` and `naive_quantized` compressors):

- `weight_scale_inv` [rows / a, columns / b], rounded up: one for each block of a x b elements (`weight_block_size`); it is a factor.
- `weight_scale` of one element, or [rows] or [rows, 1]: one for the matrix, or for each row.
- compressed-tensors with the strategy "block": `weight_scale` [rows / a, columns / b].

Matrices in e4m3 whose rows are cut into whole parts of 32 are blocks of FP8, with a scale repeated in each; where no kernel set multiplies
by these, and otherwise, matrices are expanded. Activations stay as they are: scales of activations (`input_scale`) have no use here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.blocks import BlockFormat
from hardpoint.interfaces.errors import CorruptWeights
from hardpoint.weights.checkpoint import SAFETENSORS_DTYPES, Checkpoint, SafetensorsCheckpoint, with_made
from hardpoint.weights.integer_formats import misfit, rotates_activations, unread_format

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale_inv", "weight_scale")
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub")


@dataclass(frozen=True)
class Float8Format:
    """What a `quantization_config` says of a checkpoint's matrices.

    Attributes:
        block: (rows, columns) of a matrix that share a scale; None where a whole matrix has one, or each of its rows.
    """

    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Float8Format | None:
        """Return the format of a `quantization_config`, None where its numbers are not of 8 floating bits.

        Raises:
            UnsupportedArchitecture: they are, in a way that is not read.
        """
        method = config.get("quant_method")
        if method == "fp8":
            return cls(_block(config.get("weight_block_size"), where))
        if method == "fbgemm_fp8":
            return cls()
        if method != "compressed-tensors":
            return None
        groups = config.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, Mapping) else []
        weights: list[Any] = [group.get("weights") for group in groups if isinstance(group, Mapping)]
        if not weights or not all(isinstance(one, Mapping) and one.get("type") == "float" for one in weights):
            return None
        found = {(one.get("num_bits"), one.get("strategy"), str(one.get("block_structure"))) for one in weights}
        if len(found) > 1:
            raise unread_format(where, f"compressed-tensors: {len(found)} unlike groups of layers")
        (bits, strategy, _), one = found.pop(), weights[0]
        if bits != 8:
            raise unread_format(where, f"compressed-tensors: floating numbers of {_shown_bits(bits)} bits")
        if strategy not in ("tensor", "channel", "block"):
            raise unread_format(where, f"compressed-tensors: strategy {strategy!r}")
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise unread_format(where, "sparse weights")
        if rotates_activations(config):
            raise unread_format(where, "transform_config with transforms of activations")
        return cls(_block(one.get("block_structure") or [128, 128], where) if strategy == "block" else None)

    def open(self, inner: SafetensorsCheckpoint) -> Checkpoint:
        """Return a checkpoint as one of the matrices that it means; raises CorruptWeights."""
        matrices = _Float8Matrices(inner, self)
        kinds = (inner.kind(name) for name in inner.shapes() if name not in matrices.sources)
        dtype = next((SAFETENSORS_DTYPES[kind] for kind in kinds if kind in SAFETENSORS_DTYPES), None)
        return with_made(inner, matrices, matrices.sources, dtype)


def _shown_bits(bits: object) -> str:
    return str(bits) if type(bits) is int else "no number of"


def _block(given: object, where: str) -> tuple[int, int] | None:
    if given is None:
        return None
    sizes = list(given) if isinstance(given, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise unread_format(where, f"blocks of {given!r}")
    return sizes[0], sizes[1]


class _Float8Matrices(Checkpoint):
    """The matrices of 8-bit floating numbers of a checkpoint: blocks of FP8, or expanded to float32.

    Attributes:
        sources: the tensors that they are made from, and scales without use.
    """

    def __init__(self, inner: SafetensorsCheckpoint, format: Float8Format) -> None:
        """Raises CorruptWeights for matrices without their scales, or with such of other shapes."""
        self._inner, self._format = inner, format
        found = dict(inner.shapes())
        self._scales = {
            name: self._scale_of(name, shape, found) for name, shape in found.items() if inner.kind(name) in _KINDS
        }
        if not self._scales:
            raise CorruptWeights(
                "the configuration says that weights are 8-bit floating numbers, and none are",
                found=f"no tensor of {' or '.join(_KINDS)}",
                hint="Check that config.json and the weights belong to the same model",
            )
        stems = {name.removesuffix("weight") for name in self._scales}
        self._shapes = {name: found[name] for name in self._scales}
        self.sources = {*self._scales, *(stem + part for stem in stems for part in (*_SCALES, *_UNUSED))}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        columns, wide = self._shapes[name][1], self._wide(name)
        for first, numbers, scales in self._scaled(name, begin, end):
            of_rows = scales
            if scales.shape[1] > 1:
                of_rows = scales.repeat_interleave(wide, dim=1)[:, :columns]
            yield first, numbers.float().mul_(of_rows)

    def reads_parts(self, name: str) -> bool:
        return True

    def block_format(self, name: str) -> BlockFormat | None:
        if self._inner.kind(name) != "F8_E4M3":
            return None
        size = BlockFormat.FP8.elements
        return None if self._shapes[name][1] % size or self._wide(name) % size else BlockFormat.FP8

    def block_rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        import torch

        size = BlockFormat.FP8.elements
        count, repeats = self._shapes[name][1] // size, self._wide(name) // size
        for first, numbers, scales in self._scaled(name, begin, end):
            stored = numbers.contiguous().view(torch.uint8).view(-1, count, size)
            of_blocks = scales.repeat_interleave(repeats, dim=1)[:, :count, None].contiguous().view(torch.uint8)
            yield first, torch.cat((of_blocks, stored), dim=-1).flatten(1)

    def _wide(self, name: str) -> int:
        """Return how many elements of a row share a scale; the last ones may be fewer."""
        return self._shapes[name][1] if self._format.block is None else self._format.block[1]

    def _scaled(self, name: str, begin: int, end: int | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (first row, numbers as they are stored [n, columns], their scales float32[n, parts of a row])."""
        import torch

        scales = self._read_scales(name)
        high = -(-self._shapes[name][0] // len(scales)) if self._format.block is None else self._format.block[0]
        for first, numbers in self._inner.rows(name, begin, end):
            yield first, numbers, scales[torch.arange(first, first + len(numbers)) // high]

    def _scale_of(self, name: str, shape: tuple[int, ...], found: Mapping[str, tuple[int, ...]]) -> str:
        """Return the name of a matrix's scales, which are there in a shape that the format says."""
        stem = name.removesuffix("weight")
        scale = next((stem + part for part in _SCALES if stem + part in found), None)
        if len(shape) != 2 or stem == name:
            raise misfit(name, f"8-bit floating numbers of shape {list(shape)}, which no scale belongs to")
        if scale is None:
            raise misfit(stem + _SCALES[self._format.block is None], "there is none")
        rows, columns = shape
        wanted: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        if self._format.block is not None:
            high, wide = self._format.block
            wanted = ((-(-rows // high), -(-columns // wide)),)
        if found[scale] not in wanted:
            what = "one, or one for each row" if self._format.block is None else f"{list(wanted[0])}"
            raise misfit(scale, f"{list(found[scale])}, not {what}, for a matrix of {list(shape)}")
        return scale

    def _read_scales(self, name: str) -> Tensor:
        """Return float32[1 or rows or rows of blocks, 1 or columns of blocks]."""
        scale = self._scales[name]
        values = self._inner.read(scale)
        if not values.is_floating_point() or not bool(values.float().isfinite().all()):
            raise misfit(scale, "values that are not finite numbers")
        if self._format.block is not None:
            return values.float()
        return values.float().reshape(-1, 1)
