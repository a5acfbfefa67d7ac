"""Safetensors checkpoints whose matrices are whole numbers with scales and zero points: GPTQ, AWQ and compressed-tensors.

An element is `scale * (number - zero point)` in all of them, with one scale and zero point for a group of a row's elements. They differ in
where the numbers stand (the formats' own sources: AutoGPTQ's and GPTQModel's `qlinear`, AutoAWQ's `WQLinear_GEMM`, compressed-tensors'
`pack_quantized` and `int_quantized` compressors):

- GPTQ: `qweight` int32[columns / n, rows], n numbers of consecutive columns in each word, from the lowest bits up; `qzeros`
  int32[groups, rows / n], from which the older files subtract 1; `scales` [groups, rows]; `g_idx` int32[columns], the group of each column.
- AWQ: `qweight` int32[columns, rows / 8] and `qzeros` int32[groups, rows / 8], words of 8 rows in the order 0 2 4 6 1 3 5 7; `scales`.
- pack-quantized: `weight_packed` int32[rows, columns / n] with half of the numbers' range added, `weight_scale` [rows, groups],
  `weight_zero_point` int32[rows / n, groups], `weight_shape`.
- int-quantized: `weight` int8[rows, columns], also of 4 bits, `weight_scale` [rows, groups], and activations that are rounded to 8 bits as
  they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.blocks import BlockFormat
from hardpoint.interfaces.errors import CorruptWeights, UnsupportedArchitecture
from hardpoint.weights.checkpoint import Checkpoint, SafetensorsCheckpoint, with_made

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20


class Packing(StrEnum):
    """Where a format has its numbers."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACK_QUANTIZED = "pack-quantized"
    INT_QUANTIZED = "int-quantized"


_PARTS = {
    Packing.GPTQ: ("qweight", "scales", "qzeros", "g_idx"),
    Packing.AWQ: ("qweight", "scales", "qzeros"),
    Packing.PACK_QUANTIZED: ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    Packing.INT_QUANTIZED: ("weight", "weight_scale", "weight_zero_point"),
}
"""The tensors of a matrix: its numbers, its scales, and others."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has each of 8 rows."""


@dataclass(frozen=True)
class IntegerFormat:
    """What a `quantization_config` says of a checkpoint's matrices.

    Attributes:
        bits: of a number, 4 or 8.
        group_size: elements of a row with one scale; None for all of a row.
        has_zeros: zero points are stored; otherwise each is half of the numbers' range.
        zero_offset: to be added to stored zero points.
    """

    packing: Packing
    bits: int
    group_size: int | None
    has_zeros: bool = True
    zero_offset: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> IntegerFormat:
        """Return the format of a `quantization_config`; raises UnsupportedArchitecture for others, with what was found."""
        method = config.get("quant_method", "modelopt")
        reader = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(str(method))
        if reader is None:
            raise unread_format(where, f"quant_method {method!r}")
        found, format = reader(config)
        if format is None or found:
            raise unread_format(where, f"{method}: {found}")
        if format.bits not in (4, 8) or (format.packing is Packing.AWQ and format.bits != 4):
            raise unread_format(where, f"{method}: numbers of {format.bits} bits")
        if format.group_size is not None and (format.group_size < 32 or format.group_size % 32):
            raise unread_format(where, f"{method}: groups of {format.group_size}")
        return format

    def open(self, inner: SafetensorsCheckpoint) -> Checkpoint:
        """Return a checkpoint as one of the matrices that it means; raises CorruptWeights."""
        matrices = _IntegerMatrices(inner, self)
        return with_made(inner, matrices, matrices.sources, inner.dtype())

    def blocks(self, group_size: int) -> BlockFormat:
        """Return the smallest format of blocks that has the same numbers, scales and zero points, of groups of that size."""
        wide, narrow = (
            (BlockFormat.INT4_128, BlockFormat.INT4) if self.bits == 4 else (BlockFormat.INT8_128, BlockFormat.INT8)
        )
        return narrow if group_size % wide.elements else wide


def unread_format(where: str, found: str) -> UnsupportedArchitecture:
    """Return the refusal of a checkpoint with quantised matrices."""
    return UnsupportedArchitecture(
        f"{where} is quantised in a format that Hardpoint does not read",
        found=found,
        hint="GPTQ, AWQ, and compressed-tensors' pack-quantized and int-quantized are read, of 4 or 8 bits, in groups of a multiple of 32 "
        "or whole rows; of 8-bit floating numbers fp8 with a scale for a matrix, a row or a block, and compressed-tensors' "
        "float-quantized. Use such a checkpoint, the unquantised one, or a GGUF file",
    )


Read = tuple[str, "IntegerFormat | None"]
"""(what cannot be read, empty for nothing; the format)."""


def _size(given: object) -> int | None:
    """Return a group's size, None for a whole row; 0 for what is no size."""
    if given in (-1, None):
        return None
    return given if type(given) is int else 0


def _bits(given: object) -> int:
    return given if type(given) is int else 0


def _gptq(config: Mapping[str, Any]) -> Read:
    size, version = _size(config.get("group_size", 128)), config.get("checkpoint_format", "gptq")
    found = ""
    if config.get("desc_act") and size is not None:
        found = "desc_act=true, columns in the order of their activations"
    elif config.get("dynamic"):
        found = "'dynamic', rules for single layers"
    elif version not in ("gptq", "gptq_v2"):
        found = f"checkpoint_format {version!r}"
    offset = 1 if version == "gptq" else 0
    return found, IntegerFormat(Packing.GPTQ, _bits(config.get("bits")), size, zero_offset=offset)


def _awq(config: Mapping[str, Any]) -> Read:
    size = _size(config.get("group_size", config.get("q_group_size", 128)))
    version = str(config.get("version", "gemm")).lower()
    found = (
        f"version {version!r}" if version != "gemm" else "" if config.get("zero_point", True) else "zero_point=false"
    )
    return found, IntegerFormat(Packing.AWQ, _bits(config.get("bits", config.get("w_bit"))), size)


def _compressed(config: Mapping[str, Any]) -> Read:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return f"{len(groups) if isinstance(groups, Mapping) else 'no'} groups of layers instead of one", None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return "a group of layers without 'weights'", None
    packing = group.get("format") or config.get("format")
    if packing not in (Packing.PACK_QUANTIZED, Packing.INT_QUANTIZED):
        return f"format {packing!r}", None
    if weights.get("type", "int") != "int":
        return f"numbers of type {weights.get('type')!r}", None
    strategy, size = weights.get("strategy"), _size(weights.get("group_size"))
    if strategy not in ("group", "channel", "tensor") or (strategy == "group") != (size is not None):
        return f"strategy {strategy!r} with group_size={weights.get('group_size')!r}", None
    if str(weights.get("actorder") or "weight").lower() not in ("weight", "static"):
        return f"actorder {weights.get('actorder')!r}, columns in the order of their activations", None
    inputs, sparsity = group.get("input_activations"), config.get("sparsity_config") or {}
    if inputs and not (inputs.get("dynamic") and (inputs.get("type"), inputs.get("num_bits")) == ("int", 8)):
        kind = f"{inputs.get('type')!r} of {inputs.get('num_bits')} bits, dynamic={inputs.get('dynamic')}"
        return f"activations in {kind} (8-bit integers, dynamic, are read)", None
    if group.get("output_activations") or sparsity.get("format", "dense") != "dense":
        return "quantised outputs or sparse weights", None
    if rotates_activations(config):
        return "transform_config with transforms of activations", None
    zeros = weights.get("symmetric") is False
    return "", IntegerFormat(Packing(packing), _bits(weights.get("num_bits")), size, zeros)


def rotates_activations(config: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors' `transform_config` changes what layers are given or give; what it did to weights is in them already."""
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    places = [place for group in groups.values() for place in group.get("apply") or ()]
    return any(place.get("location") not in ("weight_input", "weight_output") for place in places)


@dataclass(frozen=True)
class _Matrix:
    """A quantised matrix [rows, columns], whose tensors have `stem` before their names."""

    stem: str
    rows: int
    columns: int
    groups: int


class _IntegerMatrices(Checkpoint):
    """The matrices of whole numbers of a checkpoint: `blocks` of the format, or expanded to float32.

    Attributes:
        sources: the tensors that they are made from.
    """

    def __init__(self, inner: SafetensorsCheckpoint, format: IntegerFormat) -> None:
        """Raises CorruptWeights for matrices without all their tensors, or with such of other shapes."""
        self._inner, self._format = inner, format
        parts = _PARTS[format.packing]
        self._found = dict(inner.shapes())
        self._matrices: dict[str, _Matrix] = {}
        for name in inner.shapes():
            stem, _, leaf = name.rpartition(".")
            if leaf == parts[0] and (leaf != "weight" or inner.kind(name) == self._kind):
                self._matrices[f"{stem}.weight"] = self._matrix(stem)
        if not self._matrices:
            raise CorruptWeights(
                f"the configuration says that weights are quantised by {format.packing}, and none are",
                found=f"no tensor {parts[0]!r} of whole numbers",
                hint="Check that config.json and the weights belong to the same model",
            )
        self.sources = {f"{matrix.stem}.{part}" for matrix in self._matrices.values() for part in parts}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: (matrix.rows, matrix.columns) for name, matrix in self._matrices.items()}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        matrix = self._matrices[name]
        size = self._group_size(matrix)
        for first, numbers, scales, zeros in self._chunks(matrix, begin, end):
            values = numbers.float() - zeros.float().repeat_interleave(size, dim=1)
            yield first, values.mul_(scales.repeat_interleave(size, dim=1))

    def block_format(self, name: str) -> BlockFormat | None:
        matrix = self._matrices[name]
        return None if matrix.columns % 32 else self._format.blocks(self._group_size(matrix))

    def block_rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        import torch

        matrix = self._matrices[name]
        size = self._format.blocks(self._group_size(matrix)).elements
        count, repeats = matrix.columns // size, self._group_size(matrix) // size
        for first, numbers, scales, zeros in self._chunks(matrix, begin, end):
            stored = numbers.view(-1, count, size)
            if self._format.bits == 4:
                stored = stored.view(len(stored), count, -1, 2, 16)
                stored = (stored[..., 0, :] | stored[..., 1, :] << 4).flatten(-2)
            parts = (
                each.repeat_interleave(repeats, dim=1)[..., None].contiguous().view(torch.uint8)
                for each in (scales, zeros)
            )
            yield first, torch.cat((*parts, stored), dim=-1).flatten(1)

    @property
    def _kind(self) -> str:
        """The type of the tensors that have numbers and zero points."""
        return "I8" if self._format.packing is Packing.INT_QUANTIZED else "I32"

    def _group_size(self, matrix: _Matrix) -> int:
        return matrix.columns // matrix.groups

    def _matrix(self, stem: str) -> _Matrix:
        """Return a matrix whose tensors are all there, in the shapes that the format says."""
        format, per_word = self._format, 32 // self._format.bits
        numbers, scales, zeros = _PARTS[format.packing][:3]
        shape = self._numbers_shape(stem, numbers)
        if format.packing is Packing.GPTQ:
            columns, rows = shape[0] * per_word, shape[1]
        elif format.packing is Packing.AWQ:
            columns, rows = shape[0], shape[1] * per_word
        elif format.packing is Packing.INT_QUANTIZED:
            rows, columns = shape
        else:
            rows, columns = self._whole_shape(stem)
            self._expect(stem, numbers, shape, (rows, -(-columns // per_word)))
        size = format.group_size or columns
        if columns % size:
            raise misfit(f"{stem}.{numbers}", f"rows of {columns} elements, no whole groups of {size}")
        groups = columns // size
        found = self._shape(stem, scales, None)
        if format.packing in (Packing.GPTQ, Packing.AWQ):
            self._expect(stem, scales, found, (groups, rows))
            self._expect(stem, zeros, self._numbers_shape(stem, zeros), (groups, -(-rows // per_word)))
        else:
            if found not in ((1,), (rows,)) or groups != 1:
                self._expect(stem, scales, found, (rows, groups))
            if format.has_zeros:
                packed = format.packing is Packing.PACK_QUANTIZED
                wanted = (-(-rows // per_word) if packed else rows, groups)
                self._expect(stem, zeros, self._numbers_shape(stem, zeros), wanted)
        return _Matrix(stem, rows, columns, groups)

    def _numbers_shape(self, stem: str, part: str) -> tuple[int, ...]:
        shape = self._shape(stem, part, 2)
        kind = self._inner.kind(f"{stem}.{part}")
        if kind != self._kind:
            raise misfit(f"{stem}.{part}", f"elements of {kind}, not {self._kind}")
        return shape

    def _shape(self, stem: str, part: str, dimensions: int | None) -> tuple[int, ...]:
        shape = self._found.get(f"{stem}.{part}")
        if shape is None or dimensions not in (None, len(shape)):
            what = "there is none" if shape is None else f"{list(shape)}, not a matrix"
            raise misfit(f"{stem}.{part}", what)
        return shape

    def _expect(self, stem: str, part: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            size = self._format.group_size
            groups = "whole rows" if size is None else f"groups of {size}"
            raise misfit(
                f"{stem}.{part}", f"{list(found)}, not {list(wanted)} for {self._format.bits} bits in {groups}"
            )

    def _whole_shape(self, stem: str) -> tuple[int, int]:
        self._shape(stem, "weight_shape", 1)
        found = self._inner.stored_values(f"{stem}.weight_shape").tolist()
        if len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
            raise misfit(f"{stem}.weight_shape", f"{found}, not two sizes")
        return found[0], found[1]

    def _chunks(self, matrix: _Matrix, begin: int, end: int | None) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield (first row, numbers uint8[n, columns], scales float32[n, groups], zero points int16[n, groups])."""
        wanted = range(matrix.rows)[begin:end]
        scales, zeros = self._scales(matrix), self._zeros(matrix)
        numbers = self._numbers(matrix)
        step = max(8, _CHUNK_ELEMENTS // matrix.columns // 8 * 8)
        for first in range(wanted.start, wanted.stop, step):
            last = min(first + step, wanted.stop)
            yield first, numbers(first, last), scales[first:last], zeros[first:last]

    def _scales(self, matrix: _Matrix) -> Tensor:
        name = f"{matrix.stem}.{_PARTS[self._format.packing][1]}"
        found = self._inner.stored_values(name)
        if not found.is_floating_point() or not bool(found.float().isfinite().all()):
            kind = "values that are not finite" if found.is_floating_point() else f"numbers of {found.dtype}"
            raise misfit(name, kind)
        by_columns = self._format.packing in (Packing.GPTQ, Packing.AWQ)
        found = found.float().T if by_columns else found.float().reshape(-1, matrix.groups)
        return found.expand(matrix.rows, matrix.groups).contiguous()

    def _zeros(self, matrix: _Matrix) -> Tensor:
        import torch

        format, half = self._format, 1 << (self._format.bits - 1)
        if not format.has_zeros:
            return torch.full((matrix.rows, matrix.groups), half, dtype=torch.int16)
        stored = self._inner.stored_values(f"{matrix.stem}.{_PARTS[format.packing][2]}")
        if format.packing is Packing.INT_QUANTIZED:
            return stored.to(torch.int16) + half
        if format.packing is Packing.PACK_QUANTIZED:
            stored = stored.T
        zeros = _unpacked(stored, format.bits, _AWQ_PLACES if format.packing is Packing.AWQ else None)
        return (zeros[:, : matrix.rows].T.to(torch.int16) + format.zero_offset).contiguous()

    def _numbers(self, matrix: _Matrix) -> Callable[[int, int], Tensor]:
        """Return what gives the numbers of rows, uint8[n, columns]."""
        import torch

        format, name = self._format, f"{matrix.stem}.{_PARTS[self._format.packing][0]}"
        bits = format.bits
        if format.packing is Packing.INT_QUANTIZED:
            half = 1 << (bits - 1)
            return lambda first, last: self._inner.stored_values(name, first, last).view(torch.uint8) + half
        if format.packing is Packing.PACK_QUANTIZED:
            self._check_order(matrix, "weight_g_idx")
            width = matrix.columns
            return lambda first, last: _unpacked(self._inner.stored_values(name, first, last), bits)[
                :, :width
            ].contiguous()
        words = self._inner.stored_values(name)
        if format.packing is Packing.AWQ:

            def by_eights(first: int, last: int) -> Tensor:
                low = first // 8
                rows = _unpacked(words[:, low : -(-last // 8)], bits, _AWQ_PLACES)
                return rows[:, first - 8 * low : last - 8 * low].T.contiguous()

            return by_eights
        self._check_order(matrix, "g_idx")
        return lambda first, last: _unpacked(words[:, first:last].T, bits).contiguous()

    def _check_order(self, matrix: _Matrix, part: str) -> None:
        """Raise UnsupportedArchitecture where columns are not in the order of their groups."""
        import torch

        name = f"{matrix.stem}.{part}"
        if name not in self._found:
            return
        order = self._inner.stored_values(name)
        if not torch.equal(order.long(), torch.arange(matrix.columns) // self._group_size(matrix)):
            raise unread_format("the checkpoint", f"{name} has columns in another order than their groups' (desc_act)")


def divided(rows: Tensor, format: BlockFormat, form: BlockFormat) -> Tensor:
    """Return rows in blocks of a format in one of its `forms`: smaller blocks with the scale and zero point of theirs."""
    import torch

    if form is format:
        return rows
    numbers = form.nbytes - 6
    blocks = rows.view(len(rows), -1, format.nbytes)
    parts = blocks[..., 6:].reshape(*blocks.shape[:2], -1, numbers)
    heads = blocks[..., None, :6].expand(*parts.shape[:-1], 6)
    return torch.cat((heads, parts), dim=-1).flatten(1)


def _unpacked(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return uint8[n, words * (32 / bits)] of int32[n, words]; number i of a word is at `places[i]`, counted from its lowest bits."""
    import torch

    shifts = torch.tensor(places or range(32 // bits), dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def misfit(name: str, found: str) -> CorruptWeights:
    """Return the error for a tensor of a quantised matrix."""
    return CorruptWeights(
        f"tensor {name} is not what the quantised matrix needs",
        found=found,
        hint="Check that config.json and the weights belong to the same model",
    )
