"""The demo model with its first layers and tokens alone: the same shapes and quantised weights, but a tenth of these."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from hardpoint.weights.gguf_file import read_gguf
from hardpoint_conformance.tiny_model import demo_file

_OF_TOKENS = ("token_embd.weight", "output.weight")
"""Tensors with a row for each token."""


def write_shallow_demo(file: Path, layers: int = 2, tokens: int = 8192) -> str:
    """Write a GGUF file of the demo model's first layers and tokens, and return its path. What it generates makes no sense.

    The tokens are the special ones, those of bytes, and what the first of the tokenizer's merges make of these.
    """
    demo = demo_file()
    assert demo is not None
    content = np.memmap(demo, mode="r")
    known = read_gguf(demo)
    metadata = dict(known.metadata)
    vocabulary, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    unmerged = len(vocabulary) - len(merges)
    kept = merges[: tokens - unmerged]
    assert [merge.replace(" ", "") for merge in kept] == vocabulary[unmerged:tokens]
    metadata |= {
        "llama.block_count": layers,
        "llama.vocab_size": tokens,
        "tokenizer.ggml.tokens": vocabulary[:tokens],
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"][:tokens],
        "tokenizer.ggml.merges": kept,
    }
    writer = gguf.GGUFWriter(file, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in known.tensors.values():
        if _layer(tensor.name) < layers:
            stored = content[tensor.offset : tensor.offset + tensor.nbytes]
            # Norms are float32, and matrices rows of stored blocks, which the writer takes as bytes.
            values = stored.view(np.float32) if len(tensor.shape) == 1 else stored.reshape(tensor.shape[0], -1)
            if tensor.name in _OF_TOKENS:
                values = values[:tokens]
            writer.add_tensor(tensor.name, values, raw_dtype=gguf.GGMLQuantizationType(tensor.type_id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def _layer(name: str) -> int:
    """Return the layer that a tensor is of, -1 for those of none."""
    part, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if part == "blk" else -1
