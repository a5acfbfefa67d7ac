"""GGUF files: metadata, tensor table, dequantised rows.

The layout is that of the GGUF specification, versions 2 and 3, little-endian (ggml, docs/gguf.md). The tables of 50 to 250
thousand tokens and merges are most of the metadata, so they are read in one pass; block formats are
expanded by native code (core/native/gguf_expand.cpp), rarer ones by the `gguf` library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hardpoint.interfaces.errors import CorruptWeights, ModelError, UnsupportedArchitecture
from hardpoint.weights.open_file import OpenFile

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _BF16 = 0, 1, 30
_PLAIN = {_F32: (1, 4), _F16: (1, 2), _BF16: (1, 2)}
"""Formats that are not of blocks: elements and bytes of one."""
_CHUNK_ELEMENTS = 1 << 17
_BLOCK_CHUNK_ELEMENTS = 1 << 20
"""Of rows that stay in blocks, which take a fraction of the bytes."""
_MAX_DIMS = 4
"""ggml's GGML_MAX_DIMS."""
_MAX_NESTING = 8
"""Of arrays in arrays; no known key has any."""
_UINT64 = struct.Struct("<Q")
_FIRST_READ, _LONGEST_HEADER = 4 << 20, 1 << 30
"""Bytes: what holds the header of small models, and more than any header has."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: in torch's order, the slowest axis first.
        type_id: ggml's number of the element type.
        offset: of the first byte in the file.
        nbytes: of its data.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int


@dataclass(eq=False)
class GGUFFile:
    """An open GGUF file.

    Attributes:
        metadata: values by key, arrays as lists.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    _file: OpenFile = field(repr=False)

    @property
    def architecture(self) -> str:
        """The architecture as GGUF names it ("llama", "qwen2", ...)."""
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """Return the metadata value `<architecture>.<key>`; raises CorruptWeights where it is absent."""
        name = f"{self.architecture}.{key}"
        if name not in self.metadata:
            raise CorruptWeights(
                f"{self.path} lacks a hyperparameter of its architecture",
                found=f"no metadata key {name!r}",
                hint="Convert the model again with a current converter",
            )
        return self.metadata[name]

    def rows(
        self, name: str, order: Callable[[int], Any] | None = None, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a tensor from `begin` to `end`, or of a vector its elements, in chunks: (first row, dequantised rows).

        Raises CorruptWeights where the file has become shorter, UnsupportedArchitecture for a format that the `gguf` library does not read.

        Chunks are small against the caches of a processor, where a conversion to another dtype finds them.
        Block formats give float32, F16 and BF16 their own type.

        Args:
            order: called with the number of rows; returns the row of the file for each row wanted (an index array).
        """
        import torch

        tensor = self.tensors[name]
        is_vector = len(tensor.shape) == 1
        for first, raw in self._raw_rows(name, None if is_vector else order, begin, end):
            try:
                values = torch.from_numpy(_dequantize(raw, tensor.type_id))
            except NotImplementedError as error:
                raise UnsupportedArchitecture(
                    f"{self.path} is quantised in a format that Hardpoint does not read",
                    found=f"tensor {name}: {error}",
                    hint="Use a file quantised otherwise, or the safetensors checkpoint",
                ) from error
            if tensor.type_id == _BF16:
                values = values.view(torch.bfloat16)
            yield first, values[0][begin:end] if is_vector else values

    def fill(self, name: str, order: Callable[[int], Any] | None, begin: int, end: int, out: Tensor) -> bool:
        """Write the rows of a matrix from `begin` to `end` as native code can: those of `rows`, converted; False where it cannot.

        Raises CorruptWeights where the file has become shorter, OSError.

        Args:
            order: see `rows`.
            out: [end - begin, columns].
        """
        import torch

        from hardpoint import _native

        tensor = self.tensors[name]
        can = out.device.type == "cpu" and out.is_contiguous() and out.dtype in (torch.float32, torch.bfloat16)
        if not can or len(tensor.shape) != 2 or _native.gguf_block(tensor.type_id) is None:
            return False
        places = None if order is None else order(tensor.shape[0])
        array = out.detach().view(torch.int16 if out.dtype is torch.bfloat16 else out.dtype).numpy()
        row_bytes = tensor.nbytes // tensor.shape[0]
        file, kind = self._file, tensor.type_id
        error = _native.read_gguf(file.number, tensor.offset, row_bytes, kind, places, begin, array)
        file.check(error, tensor.offset + begin * row_bytes, (end - begin) * row_bytes)
        return True

    def block_rows(
        self, name: str, order: Callable[[int], Any] | None = None, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a matrix in blocks as they are stored, uint8; see `rows`.

        Raises CorruptWeights for scales that are not finite.
        """
        import torch

        from hardpoint import _native

        for first, raw in self._raw_rows(name, order, begin, end, _BLOCK_CHUNK_ELEMENTS):
            if not _native.gguf_is_finite(self.tensors[name].type_id, raw):
                raise CorruptWeights(
                    f"{self.path} has scales that are not finite",
                    found=f"NaN or infinity in tensor {name}",
                    hint="Download or convert the file again",
                )
            yield first, torch.from_numpy(raw)

    def _raw_rows(
        self,
        name: str,
        order: Callable[[int], Any] | None,
        begin: int,
        end: int | None,
        elements: int = _CHUNK_ELEMENTS,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the bytes of rows as arrays uint8[rows, bytes of a row], contiguous; of a vector all of it as one row."""
        import numpy as np

        tensor = self.tensors[name]
        is_vector = len(tensor.shape) == 1
        num_rows = 1 if is_vector else prod(tensor.shape[:-1])
        row_bytes = tensor.nbytes // max(1, num_rows)
        wanted = range(tensor.shape[0])[begin:end]
        places = None if order is None else order(num_rows)
        rows = range(1) if is_vector else wanted
        step = max(1, elements // max(1, tensor.shape[-1]))
        for first in range(rows.start, rows.stop, step):
            low, high = first, min(first + step, rows.stop)
            if places is not None:
                chunk = places[low:high]
                low, high = int(chunk.min()), int(chunk.max()) + 1  # rows change places only with near ones
            raw = (
                self._file.read(tensor.offset + low * row_bytes, (high - low) * row_bytes)
                .numpy()
                .reshape(-1, row_bytes)
            )
            yield (
                (wanted.start if is_vector else first),
                raw if places is None else np.ascontiguousarray(raw[chunk - low]),
            )


def _dequantize(raw: Any, type_id: int) -> Any:
    import numpy as np

    if type_id in (_F32, _F16, _BF16):
        dtype = {_F32: np.float32, _F16: np.float16, _BF16: np.int16}[type_id]
        return raw.view(dtype)
    from hardpoint import _native

    block = _native.gguf_block(type_id)
    if block is not None:
        elements, size = block
        out = np.empty((len(raw), raw.shape[1] // size * elements), dtype=np.float32)
        _native.expand_gguf(type_id, np.ascontiguousarray(raw), out)
        return out
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(type_id))


_open_files: WeakValueDictionary[tuple[Path, int, int], GGUFFile] = WeakValueDictionary()


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file and read its metadata and tensor table; raises CorruptWeights, ModelError.

    A file that is open already, by its path, size and time of change, is not read again: an engine and its worker share it.
    """
    status = path.stat()
    key = path.absolute(), status.st_size, status.st_mtime_ns
    found = _open_files.get(key)
    if found is None:
        found = _open_files[key] = _read_gguf(path)
    return found


def _read_gguf(path: Path) -> GGUFFile:
    file = OpenFile(path)
    metadata, tensors = _read_header(file, file.size())
    if "general.architecture" not in metadata:
        raise CorruptWeights(f"{path} does not say which architecture it has", found="no key 'general.architecture'")
    parts = _number(path, metadata, "split.count", 0)
    if parts > 1:
        raise ModelError(
            f"{path} is one of {parts} parts of a model",
            hint="Merge the parts into one file (llama.cpp: llama-gguf-split --merge)",
        )
    return GGUFFile(path, metadata, tensors, file)


def _read_header(file: OpenFile, size: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read as much of the file as its header takes."""
    length = _FIRST_READ
    while True:
        start = file.start(min(size, length))
        if start[:4] != b"GGUF":
            found = f"first bytes {start[:4]!r} instead of b'GGUF'" if start else "an empty file"
            raise CorruptWeights(f"{file.path} is not a GGUF file", found=found)
        try:
            return _Reader(start, size, file.path).read()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, IndexError) as error:
            if len(start) < min(size, _LONGEST_HEADER):
                length *= 4
                continue
            raise CorruptWeights(
                f"{file.path} has a damaged or truncated header",
                found=str(error),
                hint="Download or convert the file again",
            ) from error


def _number(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    """Return a positive whole number, or the default where there is none."""
    value = metadata.get(key, default)
    if type(value) is not int or value < min(default, 1):
        raise CorruptWeights(
            f"{path} has an impossible value", found=f"{key} is {value!r:.80}, not a number of at least 1"
        )
    return value


class _Reader:
    """One pass over the header; every length is checked against the file before it is believed."""

    def __init__(self, start: bytes, size: int, path: Path) -> None:
        """`start`: first bytes of a file of `size` bytes."""
        self._start = start
        self._path = path
        self._size = size
        self._position = 4

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise CorruptWeights(
                f"{self._path} has an unknown GGUF version",
                found=str(version),
                hint="Versions 2 and 3, little-endian, can be read",
            )
        num_tensors, num_keys = self._unpack("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = _number(self._path, metadata, "general.alignment", 32)
        start = -(-self._position // alignment) * alignment
        return metadata, {name: self._placed(name, dims, kind, start + at) for name, dims, kind, at in entries}

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._start, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        end = self._position + length
        if end > len(self._start):
            raise struct.error(f"a string of {length} bytes at byte {self._position} runs past the end of the file")
        text = self._start[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._unpack("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise struct.error(f"unknown value type {kind} before byte {self._position}")
        if depth == _MAX_NESTING:
            raise struct.error(f"arrays nested more than {_MAX_NESTING} deep at byte {self._position}")
        element, count = self._unpack("<IQ")
        if count > self._size:
            raise struct.error(f"an array of {count} elements at byte {self._position} runs past the end of the file")
        if element in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[element]}"))
        if element == _STRING:
            return self._strings(count)
        return [self._value(element, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        start, position, size, length_at = self._start, self._position, len(self._start), _UINT64.unpack_from
        texts: list[str] = []
        append = texts.append
        for _ in range(count):
            first = position + 8
            position = first + length_at(start, position)[0]
            if position > size:
                raise struct.error(f"a string at byte {first} runs past the end of the file")
            append(start[first:position].decode("utf-8"))
        self._position = position
        return texts

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if num_dims > _MAX_DIMS:
            raise struct.error(f"tensor {name} has {num_dims} dimensions, more than {_MAX_DIMS}")
        dims = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        """Return the elements and bytes of one block; the `gguf` library, slow to import, is asked only for rare formats."""
        from hardpoint import _native

        known = _PLAIN.get(kind) or (_native.gguf_block(kind) if kind < 1 << 31 else None)
        if known is not None:
            return known
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in GGMLQuantizationType._value2member_map_:
            raise CorruptWeights(
                f"{self._path} has a tensor of an unknown type", found=f"{name} has ggml type number {kind}"
            )
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return elements, size

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        block, block_bytes = self._block(name, kind)
        if not shape or shape[-1] % block:
            raise CorruptWeights(
                f"{self._path} has a tensor of an impossible shape",
                found=f"{name} has shape {list(shape)} in blocks of {block} elements",
            )
        nbytes = prod(shape) // block * block_bytes
        if offset + nbytes > self._size:
            raise CorruptWeights(
                f"{self._path} is truncated",
                found=f"tensor {name} ends at byte {offset + nbytes}, the file at byte {self._size}",
                hint="Download or convert the file again",
            )
        return GGUFTensor(name, shape, kind, offset, nbytes)
