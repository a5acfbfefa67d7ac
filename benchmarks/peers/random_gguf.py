"""GGUF files of Qwen3-0.6B's shape with random numbers in one format of blocks, which llama.cpp and Hardpoint both load.

They have no vocabulary: prompts are token ids. All blocks of a matrix have the same scale, so that activations stay of an ordinary size.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

VOCAB = 151936
_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD = 28, 1024, 3072, 16, 8, 128
# A block's scale and minimum, which give numbers between -0.06 and 0.06.
_HALVES = {"Q4_1": (0.008, -0.06), "Q8_0": (0.00047,)}


def written(path: Path, format: str) -> Path:
    """Return the file with matrices in "Q4_1" or "Q8_0"; write it, whole or not at all, where there is none."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    writer.add_context_length(4096)
    writer.add_block_count(_LAYERS)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, kind: str = format) -> None:
        stored = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[stored]
        raw = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
        halves = np.array(_HALVES[kind], dtype=np.float16).view(np.uint8)
        raw[..., : len(halves)] = halves
        writer.add_tensor(f"{name}.weight", raw.reshape(rows, -1), raw_dtype=stored)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    matrix("token_embd", VOCAB, _HIDDEN, "Q8_0")
    norm("output_norm", _HIDDEN)
    for layer in range(_LAYERS):
        at = f"blk.{layer}."
        norm(f"{at}attn_norm", _HIDDEN)
        norm(f"{at}attn_q_norm", _HEAD)
        norm(f"{at}attn_k_norm", _HEAD)
        norm(f"{at}ffn_norm", _HIDDEN)
        matrix(f"{at}attn_q", _HEADS * _HEAD, _HIDDEN)
        matrix(f"{at}attn_k", _KV_HEADS * _HEAD, _HIDDEN)
        matrix(f"{at}attn_v", _KV_HEADS * _HEAD, _HIDDEN)
        matrix(f"{at}attn_output", _HIDDEN, _HEADS * _HEAD)
        matrix(f"{at}ffn_gate", _INNER, _HIDDEN)
        matrix(f"{at}ffn_up", _INNER, _HIDDEN)
        matrix(f"{at}ffn_down", _HIDDEN, _INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path
