"""The demo model with its first layers alone: the same tokenizer, shapes and quantised weights, at a quarter of the processor time."""

from __future__ import annotations

import struct
from pathlib import Path

from hardpoint.weights.gguf_file import GGUFTensor, read_gguf
from hardpoint_conformance.tiny_model import demo_file

_ALIGNMENT = 32
_COUNT_AT = 8
"""Where a GGUF file has the number of its tensors."""


def write_shallow_demo(file: Path, layers: int = 2) -> str:
    """Write a GGUF file of the demo model's first layers, and return its path. What it generates makes no sense."""
    demo = demo_file()
    assert demo is not None
    content = demo.read_bytes()
    known = read_gguf(demo)
    assert known.metadata.get("general.alignment", _ALIGNMENT) == _ALIGNMENT
    tensors = list(known.tensors.values())
    kept = [one for one in tensors if _layer(one.name) < layers]
    header = bytearray(content[: content.index(_string(tensors[0].name))])
    struct.pack_into("<Q", header, _COUNT_AT, len(kept))
    key = _string("llama.block_count")
    struct.pack_into("<I", header, header.index(key) + len(key) + 4, layers)
    data = bytearray()
    for one in kept:
        header += _entry(one, len(data))
        data += content[one.offset : one.offset + one.nbytes]
        data += bytes(-len(data) % _ALIGNMENT)
    header += bytes(-len(header) % _ALIGNMENT)
    file.write_bytes(header + data)
    return str(file)


def _layer(name: str) -> int:
    """Return the layer that a tensor is of, -1 for those of none."""
    part, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if part == "blk" else -1


def _entry(tensor: GGUFTensor, offset: int) -> bytes:
    dims = tensor.shape[::-1]
    return _string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type_id, offset)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
