"""The operators of torch_npu that the backend calls, in plain torch on the CPU: simulated, for tests of the calls.

They compute what the vendor's descriptions say (torch_npu 2.13's `_op_plugin_docs.py`, CANN's public sources of the tiling), and reject
what these reject, in the vendor's terms: Q_N and KV_N are numbers of heads, D is a head's dimension, T the number of query tokens, B of
sequences. What the backend has no use for is rejected too. This shows that calls are right, not that the vendor's operators are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import Device
from hardpoint_ascend.operators import ATTEND, OPERATORS, RMS_NORM, ROTATE, SWIGLU, WRITE_KV

DEVICE = Device("ascend_reference", 0, "Ascend910B of reference operators on the host", "cpu", simulated=True)
MASK_SIZE = 2048
DTYPES = (torch.float16, torch.bfloat16)
_library: torch.library.Library | None = None


class Rejected(RuntimeError):
    """A call that the real operator would reject."""


def register() -> None:
    """Register the operators under their names, with the schemas that the backend expects; once in a process without torch_npu."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("npu", "DEF")
    for operator in OPERATORS:
        _library.define(operator.name.partition("::")[2] + operator.signature)
    functions = {ATTEND: attend, WRITE_KV: write_kv, RMS_NORM: rms_norm, ROTATE: rotary_mul, SWIGLU: swiglu}
    for operator, function in functions.items():
        _library.impl(operator.name.partition("::")[2], function, "CPU")


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise Rejected(f"(reference operator) {rule}")


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """`npu_scatter_pa_kv_cache` with the plain cache (its second case).

    Rows with negative slots are passed over, as by CANN's kernels and in the vendor's tests of them; the description has none.
    """
    require(cache_mode in (None, "Norm"), "a cache in the plain format needs cache_mode 'Norm'")
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    require(all(tensor.is_contiguous() for tensor in tensors), "tensors that are not contiguous are not supported")
    require(key.dtype in DTYPES, "key is float16 or bfloat16")
    require(all(t.dtype is key.dtype for t in (value, key_cache, value_cache)), "all dtypes are the same")
    require(key.dim() == value.dim() == 3 and key.shape[:2] == value.shape[:2], "key and value are [T, N, D]")
    require(key_cache.dim() == value_cache.dim() == 4, "caches have four dimensions")
    for rows, blocks in ((key, key_cache), (value, value_cache)):
        require(rows.shape[1:] == blocks.shape[2:], "a cache is [blocks, block_size, N, D]")
        require(rows.shape[2] * rows.element_size() % 32 == 0, "a head's row is a multiple of 32 bytes")
    require(slot_mapping.dtype in (torch.int32, torch.int64), "slot_mapping is int32 or int64")
    require(slot_mapping.shape == key.shape[:1], "slot_mapping has one slot for each token")
    slots = slot_mapping.long()
    key, value, slots = key[slots >= 0], value[slots >= 0], slots[slots >= 0]
    size = key_cache.shape[0] * key_cache.shape[1]
    require(bool((slots < size).all()), "slots are below num_blocks * block_size")
    require(len(slots.unique()) == len(slots), "no slot is given twice")
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """`npu_fused_infer_attention_score_v2` over a paged cache in the layout TND.

    All arithmetic is in float32.
    """
    require(input_layout == "TND", "the layout is TND")
    require(query.dtype in DTYPES, "query is float16 or bfloat16")
    require(key.dtype is query.dtype and value.dtype is query.dtype, "key and value have the query's dtype")
    require(query.dim() == 3, "query is [T, Q_N, D]")
    require(key.dim() == 3 and key.shape == value.shape, "a paged cache is [blocks, block_size, KV_N * D]")
    require(block_table is not None, "a paged cache needs a block table")
    assert block_table is not None
    tensors = (query, key, value, block_table)
    require(all(tensor.is_contiguous() for tensor in tensors), "tensors that are not contiguous are not supported")
    tokens, heads, dim = query.shape
    require(tokens <= 1 << 20, "T is at most 1M")
    require(num_query_heads == heads <= 256, "num_query_heads is that of the query, at most 256")
    require(num_key_value_heads > 0 and heads % num_key_value_heads == 0, "KV_N divides Q_N")
    require(2 <= heads // num_key_value_heads <= 64, "Q_N / KV_N is 2 to 64 with a paged cache in the layout TND")
    require(dim in (64, 128), "D is 64 or 128 with a paged cache")
    require(key.shape[2] == num_key_value_heads * dim <= 65535, "the cache's rows are KV_N * D, at most 65535")
    require(key.numel() <= 2**31 - 1, "a cache has at most 2^31 - 1 elements")
    require(block_size == key.shape[1], "block_size is that of the cache")
    require(block_size in (128, 256, 384, 512), "block_size is a multiple of 128, at most 512")
    require(block_table.dtype is torch.int32 and block_table.dim() == 2, "block_table is int32[B, blocks]")
    ends, contexts = list(actual_seq_qlen or ()), list(actual_seq_kvlen or ())
    require(0 < len(ends) <= 4096 and len(ends) == len(contexts), "both lists of lengths have B numbers, 1 to 4096")
    require(len(block_table) == len(ends), "block_table has B rows")
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    require(min(lengths) >= 0, "actual_seq_qlen is cumulative")
    require(ends[-1] == tokens, f"T ({tokens}) is the last number of actual_seq_qlen ({ends[-1]})")
    require(min(contexts) >= 0, "lengths are not negative")
    blocks = [-(-context // block_size) for context in contexts]
    require(max(blocks) <= block_table.shape[1], "block_table has a column for each block of the longest sequence")
    require(sum(blocks) <= len(key), "the cache has no fewer blocks than all sequences together")
    require(all(q <= kv for q, kv in zip(lengths, contexts, strict=True)), "queries are not more than keys")
    _check_mask(atten_mask, sparse_mode, pre_tokens, next_tokens)

    out = torch.empty_like(query)
    for row, (end, length, context) in enumerate(zip(ends, lengths, contexts, strict=True)):
        owned = block_table[row, : blocks[row]].long()
        require(bool(((owned >= 0) & (owned < len(key))).all()), "blocks are in the cache")
        k, v = (half[owned].flatten(0, 1)[:context].view(context, -1, dim) for half in (key, value))
        q = query[end - length : end]
        distance = torch.arange(context)[None, :] - torch.arange(context - length, context)[:, None]
        before, after = (pre_tokens, next_tokens) if sparse_mode == 4 else (2**31 - 1, 0)
        hidden = (distance > after) | (distance < -before)
        out[end - length : end] = _attention(q, k, v, softmax_scale, hidden if sparse_mode else None)
    return out, torch.zeros(1)


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`npu_rms_norm`."""
    require(input.dtype in (*DTYPES, torch.float32) and gamma.dtype is input.dtype, "gamma has the input's dtype")
    require(2 <= input.dim() <= 8 and input.shape[-gamma.dim() :] == gamma.shape, "gamma has the input's last axes")
    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(input.dtype), scale


def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """`npu_rotary_mul` of [B, S, N, D], compiled beforehand (jit_compile=False)."""
    require(rotary_mode == "half", "halves are rotated")
    require(input.dim() == r1.dim() == r2.dim() == 4, "all have four axes")
    batch, tokens, heads, dim = input.shape
    require(batch < 1000 and heads < 1000, "B and N are below 1000")
    require(dim < 896 and dim % 2 == 0, "D is even and below 896")
    require(r1.shape == r2.shape == (1, tokens, 1, dim), "r1 and r2 are 1S1D")
    require(r1.dtype is r2.dtype is input.dtype, "all have one dtype")
    first, second = input.chunk(2, -1)
    return r1 * input + r2 * torch.cat((-second, first), -1)


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """`npu_swiglu`."""
    require(input.dtype in (*DTYPES, torch.float32), "dtypes are float16, bfloat16 and float32")
    first, second = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(first) * second).to(input.dtype)


def _check_mask(mask: Tensor | None, sparse_mode: int, pre_tokens: int, next_tokens: int) -> None:
    if sparse_mode == 0:
        require(mask is None, "sparse_mode 0 takes no mask in the layout TND")
        return
    require(sparse_mode in (3, 4), "sparse_mode is 0, 3 or 4 in the layout TND")
    require(mask is not None, "sparse_mode 3 and 4 need a mask")
    assert mask is not None
    require(
        mask.dtype in (torch.bool, torch.int8, torch.uint8) and mask.is_contiguous(), "the mask is bool, int8 or uint8"
    )
    sizes = (*[1] * (mask.dim() - 2), MASK_SIZE, MASK_SIZE)
    require(2 <= mask.dim() <= 4 and tuple(mask.shape) == sizes, "the mask is 2048 x 2048")
    # Eight numbers at once, by numpy: torch takes more than twice as long, and one by one longer than all else that a call does.
    numbers = mask.reshape(MASK_SIZE, MASK_SIZE).view(torch.int64).numpy()
    require(np.array_equal(numbers, _triangle()), "the mask is 1 above the diagonal, and 0 elsewhere")
    if sparse_mode == 4:
        require(pre_tokens + next_tokens >= 0, "the band is not empty")


@cache
def _triangle() -> np.ndarray[Any, Any]:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu_(1).view(torch.int64).numpy()


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1).T[..., None]
    return (torch.einsum("hqk,khd->qhd", weights, v) / total).to(q.dtype)
