"""Checkpoints: named tensors under their Hugging Face names, whatever they are stored in, read row by row.

A checkpoint yields chunks of rows, so that a weight goes from the file to its place on the device by a small buffer; no tensor
is held whole on the way.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.blocks import BlockFormat
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CorruptWeights, ModelError, ModelNotFound, UnsupportedArchitecture
from hardpoint.weights.gguf_file import GGUFFile
from hardpoint.weights.open_file import CHUNK_BYTES, OpenFile

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS_SINGLE = "model.safetensors"


SAFETENSORS_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Of safetensors' floating types: torch's names."""
_WHOLE_DTYPES = {"I8": "int8", "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64"}
"""Of its whole numbers."""
_GGUF_DTYPES = {0: DType.FLOAT32, 1: DType.FLOAT16, 30: DType.BFLOAT16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file as it is in memory: contiguous, in torch's order; sizes in bytes."""

    path: Path
    offset: int
    size: int
    dtype: DType


class Checkpoint(ABC):
    """Named tensors of a model."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor by name, in torch's order."""

    @abstractmethod
    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor's rows from `begin` to `end`, or a vector's elements, in order, as (index of the first, rows).

        Values are on the host, of whatever floating dtype is stored. Raises CorruptWeights.
        """

    def expert_rows(self, name: str, expert: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yield rows of one expert of a stacked tensor [experts, rows, ...], as `rows` yields a tensor's."""
        for _, values in self.rows(name, expert, expert + 1):
            yield begin, values[0, begin:end]

    def reads_parts(self, name: str) -> bool:
        """Whether some rows of a tensor take no longer to read than their share of it."""
        return False

    def fill(self, name: str, begin: int, end: int, out: Tensor) -> None:
        """Write the tensor's rows from `begin` to `end` into `out`, which has as many, converted to its dtype; see `rows`."""
        for first, values in self.rows(name, begin, end):
            out[first - begin : first - begin + len(values)].copy_(values)

    def dtype(self) -> DType | None:
        """Return the dtype that the weights are stored in, None where there is none to speak of."""
        return None

    def stored(self, name: str) -> StoredTensor | None:
        """Return where a tensor's values lie in a file, None where they are not stored as `rows` gives them."""
        return None

    def block_format(self, name: str) -> BlockFormat | None:
        """Return the format of blocks that a tensor is stored in, None where it is stored otherwise."""
        return None

    def block_rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield rows of a tensor that is stored in blocks as they are stored, uint8[rows, bytes of a row]; see `rows`.

        Raises CorruptWeights for scales that are not finite.
        """
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        import torch

        chunks = [chunk for _, chunk in self.rows(name)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


@dataclass(frozen=True)
class _Entry:
    """A tensor of a safetensors file; offset and size in bytes."""

    file: OpenFile
    offset: int
    size: int
    shape: tuple[int, ...]
    kind: str


class SafetensorsCheckpoint(Checkpoint):
    """A single safetensors file, or several with an index; read on demand."""

    def __init__(self, files: Sequence[Path], weight_map: Mapping[str, str] | None = None) -> None:
        """Open the files; raises ModelNotFound, ModelError where one cannot be read, CorruptWeights."""
        from safetensors import SafetensorError, safe_open

        self._entries: dict[str, _Entry] = {}
        for file in files:
            try:
                if not file.is_file():
                    raise ModelNotFound(
                        f"there is no file {file}",
                        found="a folder, a pipe or a device" if file.exists() else None,
                        hint="Give the path of a safetensors file",
                    )
                with safe_open(str(file), framework="np"):
                    pass  # it checks the header
                for name, entry in _safetensors_entries(file).items():
                    if name in self._entries:
                        raise CorruptWeights(f"two files of {file.parent} have the tensor {name}", found=file.name)
                    self._entries[name] = entry
            except ModelNotFound:  # an OSError itself
                raise
            except OSError as error:
                raise ModelError(f"{file} cannot be read", found=error.strerror or str(error)) from error
            except (SafetensorError, struct.error, json.JSONDecodeError) as error:
                raise CorruptWeights(
                    f"{file} is damaged or truncated", found=str(error), hint="Download the file again"
                ) from error
        absent = sorted(set(weight_map or ()) - set(self._entries))
        if absent:
            raise CorruptWeights(
                f"the index of {files[0].parent} names tensors that no file has",
                found=listed(absent),
                hint="Download the missing files again",
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        entry = self._entries[name]
        wanted = range(entry.shape[0] if entry.shape else 1)[begin:end]
        for first, values in self._chunks(name, (0, entry.shape[1:]), wanted.start, wanted.stop):
            yield first, values if entry.shape else values[0]

    def reads_parts(self, name: str) -> bool:
        return True

    def fill(self, name: str, begin: int, end: int, out: Tensor) -> None:
        import torch

        entry = self._entries[name]
        is_stored_so = bool(entry.shape) and getattr(torch, _TORCH_DTYPES.get(entry.kind, ""), None) is out.dtype
        if not is_stored_so or out.device.type != "cpu" or not out.is_contiguous():
            super().fill(name, begin, end, out)
            return
        first = entry.offset + begin * prod(entry.shape[1:]) * out.itemsize
        try:
            entry.file.read_into(out.detach().view(-1).view(torch.uint8), first)
        except OSError as error:
            raise CorruptWeights(f"tensor {name} cannot be read", found=str(error)) from error

    def expert_rows(self, name: str, expert: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        rows, *row = self._entries[name].shape[1:]
        return self._chunks(name, (expert * rows, tuple(row)), begin, end)

    def kind(self, name: str) -> str:
        """Return a tensor's dtype, as safetensors names it."""
        return self._entries[name].kind

    def stored_values(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows of a tensor, in whatever dtype is stored, whole numbers included; raises CorruptWeights, UnsupportedArchitecture."""
        import torch

        shape = self._entries[name].shape
        wanted = range(shape[0])[begin:end]
        chunks = self._chunks(name, (0, shape[1:]), wanted.start, wanted.stop, _TORCH_DTYPES | _WHOLE_DTYPES)
        parts = [values for _, values in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(
        self,
        name: str,
        rows: tuple[int, tuple[int, ...]],
        begin: int,
        end: int,
        dtypes: Mapping[str, str] = _TORCH_DTYPES,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor cut into rows; `rows` says which of them counts as 0, and their shape. No rows are one empty chunk.

        Args:
            dtypes: torch's names of those that are read.
        """
        import torch

        entry, (base, shape) = self._entries[name], rows
        dtype = getattr(torch, dtypes.get(entry.kind, ""), None)
        if dtype is None:
            raise UnsupportedArchitecture(
                "the checkpoint is quantised in a format that Hardpoint does not read",
                found=f"tensor {name} has dtype {entry.kind}",
                hint="Use the unquantised checkpoint, or a GGUF file",
            )
        row_bytes = prod(shape) * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for first in range(begin, max(end, begin + 1), step):
            count = max(0, min(end - first, step))
            try:
                data = entry.file.read(entry.offset + (base + first) * row_bytes, count * row_bytes)
            except OSError as error:
                raise CorruptWeights(f"tensor {name} cannot be read", found=str(error)) from error
            yield first, data.view(dtype).view(count, *shape)

    def dtype(self) -> DType | None:
        kinds = (entry.kind for entry in self._entries.values())
        return next((SAFETENSORS_DTYPES[kind] for kind in kinds if kind in SAFETENSORS_DTYPES), None)

    def stored(self, name: str) -> StoredTensor | None:
        entry = self._entries[name]
        dtype = SAFETENSORS_DTYPES.get(entry.kind)
        return None if dtype is None else StoredTensor(entry.file.path, entry.offset, entry.size, dtype)


def _safetensors_entries(path: Path) -> dict[str, _Entry]:
    """Return the tensors that a file's header lists, whose offsets count from its end (the format's specification)."""
    file = OpenFile(path)
    (length,) = struct.unpack("<Q", file.start(8))
    table: dict[str, Any] = json.loads(file.start(8 + length)[8:])
    table.pop("__metadata__", None)
    return {
        name: _Entry(file, 8 + length + begin, end - begin, tuple(entry["shape"]), entry["dtype"])
        for name, entry in table.items()
        for begin, end in [entry["data_offsets"]]
    }


def open_safetensors(folder: Path) -> SafetensorsCheckpoint:
    """Open the safetensors weights of a model folder; raises ModelNotFound, CorruptWeights."""
    return SafetensorsCheckpoint(*safetensors_files(folder))


def safetensors_files(folder: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """Return a model folder's safetensors files and the index's map from tensors to them, None where there is no index.

    Raises ModelNotFound, CorruptWeights.
    """
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in dict.fromkeys(weight_map.values())]
            if any(file.parent != folder for file in files):
                raise ValueError("a file that is not in the folder")
            missing = [file.name for file in files if not file.is_file()]
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise CorruptWeights(f"{index} is not an index of safetensors files", found=repr(error)) from error
        if missing:
            raise CorruptWeights(
                f"{folder} lacks files that its index names",
                found=listed(missing),
                hint="Download the missing files again",
            )
        return files, weight_map
    single = folder / SAFETENSORS_SINGLE
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        present = sorted(entry.name for entry in folder.iterdir())
        raise ModelNotFound(
            f"{folder} has no weights that Hardpoint reads",
            found=listed(present) or "an empty folder",
            hint="Safetensors files and GGUF files are read; load_format='dummy' runs with random weights",
        )
    return files, None


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file under Hugging Face names, with the changes of llama.cpp's converter undone.

    Architecture `llama` stores the rows of q and k in the order of interleaved rotary embedding, and Gemma's norms are stored
    as `weight + 1` (llama.cpp, convert_hf_to_gguf.py).
    """

    def __init__(self, file: GGUFFile, num_heads: int, num_kv_heads: int) -> None:
        self._file = file
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        self._permuted = file.architecture == "llama"
        self._norm_offset = file.architecture.startswith("gemma")
        self._names: dict[str, str] = {}
        for name in file.tensors:
            if name != "rope_freqs.weight":
                self._names[huggingface_name(name, file.architecture)] = name

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        stored = self._names[name]
        for first, values in self._file.rows(stored, self._order(stored), begin, end):
            yield first, values - 1 if self._is_offset(stored) else values

    def reads_parts(self, name: str) -> bool:
        return len(self._file.tensors[self._names[name]].shape) == 2

    def fill(self, name: str, begin: int, end: int, out: Tensor) -> None:
        stored = self._names[name]
        if self._is_offset(stored) or not self._file.fill(stored, self._order(stored), begin, end, out):
            super().fill(name, begin, end, out)

    def block_format(self, name: str) -> BlockFormat | None:
        tensor = self._file.tensors[self._names[name]]
        return BlockFormat.of_type_id(tensor.type_id) if len(tensor.shape) == 2 else None

    def block_rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        stored = self._names[name]
        return self._file.block_rows(stored, self._order(stored), begin, end)

    def dtype(self) -> DType | None:
        """Return F16 or BF16 where matrices are stored so, float32 where all is; block formats are bfloat16 here."""
        kinds = {tensor.type_id for tensor in self._file.tensors.values() if len(tensor.shape) > 1}
        if not kinds <= set(_GGUF_DTYPES):
            return DType.BFLOAT16
        return next((_GGUF_DTYPES[kind] for kind in (30, 1, 0) if kind in kinds), None)

    def stored(self, name: str) -> StoredTensor | None:
        stored = self._names[name]
        tensor = self._file.tensors[stored]
        dtype = _GGUF_DTYPES.get(tensor.type_id)
        if dtype is None or self._order(stored) is not None or self._is_offset(stored):
            return None
        return StoredTensor(self._file.path, tensor.offset, tensor.nbytes, dtype)

    def _is_offset(self, stored: str) -> bool:
        return self._norm_offset and stored.endswith("norm.weight")

    def _order(self, stored: str) -> Callable[[int], Any] | None:
        part = re.search(r"\.(attn_[qk])\.weight$", stored)
        if not self._permuted or part is None:
            return None
        heads = self._heads[part.group(1)]

        def halves(num_rows: int) -> Any:
            import numpy as np

            # The file interleaves a head's two halves (0, n/2, 1, n/2 + 1, ...).
            return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

        return halves


_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def huggingface_name(name: str, architecture: str) -> str:
    """Return the Hugging Face name of a GGUF tensor, or the name itself where it is not known."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None:
        return name
    index, part = block.groups()
    if part == "ffn_norm":
        sandwich = architecture in ("gemma2", "gemma3")
        return f"model.layers.{index}.{'pre_feedforward' if sandwich else 'post_attention'}_layernorm.{kind}"
    return f"model.layers.{index}.{_GGUF_PARTS[part]}.{kind}" if part in _GGUF_PARTS else name


class DummyCheckpoint(Checkpoint):
    """Seeded random weights: normal with standard deviation 0.02 (around 1 for norms), zero biases.

    A tensor depends on the seed, its name and its shape, on nothing else, so that every way of running a model gets the same.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, norm_mean: float = 1.0) -> None:
        self._shapes = dict(shapes)
        self._seed = seed
        self._norm_mean = norm_mean

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        import torch

        shape = self._shapes[name]
        if name.endswith("bias"):
            yield begin, torch.zeros(shape)[begin:end]
            return
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B1 + zlib.crc32(name.encode())) % (1 << 63))
        values = torch.randn(shape, generator=generator).mul_(0.02)[begin:end]
        yield begin, values + self._norm_mean if len(shape) == 1 else values


class ComposedCheckpoint(Checkpoint):
    """Tensors of other checkpoints, under names of its own: whatever is asked of one is asked of the checkpoint that has it.

    Args:
        places: (checkpoint that has it, its name there) of each tensor, by its name here.
        dtype: see `Checkpoint.dtype`.
    """

    def __init__(self, places: Mapping[str, tuple[Checkpoint, str]], dtype: DType | None) -> None:
        self._places, self._dtype = places, dtype
        found = {part: part.shapes() for part in {part for part, _ in places.values()}}
        self._shapes = {name: found[part][inner] for name, (part, inner) in places.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        part, inner = self._places[name]
        return part.rows(inner, begin, end)

    def expert_rows(self, name: str, expert: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        part, inner = self._places[name]
        return part.expert_rows(inner, expert, begin, end)

    def reads_parts(self, name: str) -> bool:
        part, inner = self._places[name]
        return part.reads_parts(inner)

    def fill(self, name: str, begin: int, end: int, out: Tensor) -> None:
        part, inner = self._places[name]
        part.fill(inner, begin, end, out)

    def dtype(self) -> DType | None:
        return self._dtype

    def stored(self, name: str) -> StoredTensor | None:
        part, inner = self._places[name]
        return part.stored(inner)

    def block_format(self, name: str) -> BlockFormat | None:
        part, inner = self._places[name]
        return part.block_format(inner)

    def block_rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        part, inner = self._places[name]
        return part.block_rows(inner, begin, end)

    def read(self, name: str) -> Tensor:
        part, inner = self._places[name]
        return part.read(inner)


def renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the tensors of a checkpoint whose names there are the values of `names`, under its keys."""
    return ComposedCheckpoint({name: (checkpoint, inner) for name, inner in names.items()}, checkpoint.dtype())


def joined(main: Checkpoint, parts: Mapping[str, Checkpoint]) -> Checkpoint:
    """Return a checkpoint, and others in folders of it, whose tensors have the folder's name and a dot before theirs."""
    places = {f"{folder}.{name}": (part, name) for folder, part in parts.items() for name in part.shapes()}
    return ComposedCheckpoint(places | {name: (main, name) for name in main.shapes()}, main.dtype())


def with_made(checkpoint: Checkpoint, made: Checkpoint, sources: Collection[str], dtype: DType | None) -> Checkpoint:
    """Return a checkpoint with the tensors of `made` instead of those that they are made from."""
    kept = {name: (checkpoint, name) for name in checkpoint.shapes() if name not in sources}
    return ComposedCheckpoint(kept | {name: (made, name) for name in made.shapes()}, dtype)


def listed(found: Sequence[str], separator: str = ", ") -> str:
    """Return the first of what was found for an error's text, and how many more there are."""
    most = 8
    return separator.join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
