"""What both wrappers have in common: checks, and attention over pages."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

VARIABLE = "HARDPOINT_TEST_FLASHINFER"
HALF = (torch.float16, torch.bfloat16)


def require(condition: bool, text: str) -> None:
    """Raise what the real wrappers raise from Python."""
    if not condition:
        raise ValueError(text)


def check_workspace(buffer: Tensor) -> None:
    require(buffer.dtype is torch.uint8 and buffer.data_ptr() % 16 == 0, "a workspace is uint8 and 16-byte aligned")


def check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    for name, array in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        require(array.dtype is torch.int32 and array.dim() == 1, f"{name} is int32 and has one dimension")
    counts = indptr.diff()
    require(len(indptr) == len(last_page_len) + 1, "indptr has one number more than there are requests")
    require(int(indptr[0]) == 0 and bool((counts >= 0).all()), "indptr rises from 0")
    require(len(indices) >= int(indptr[-1]), "indices has the pages of all requests")
    least = (counts > 0).int()
    require(
        bool(((last_page_len >= least) & (last_page_len <= page_size * least)).all()), "1 <= last_page_len <= page_size"
    )


def check_numbers(num_qo_heads: int, num_kv_heads: int, head_dim: int, q: torch.dtype, kv: torch.dtype) -> None:
    require(num_qo_heads % num_kv_heads == 0, "num_qo_heads should be divisible by num_kv_heads")
    require(head_dim in (64, 128, 256, 512), f"Unsupported head_dim: {head_dim}")
    require(q in HALF, "q_data_type is half precision")
    require(kv in (q, torch.float8_e4m3fn), "kv_data_type is q_data_type or float8")


def check_tensors(q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, planned: dict[str, object]) -> None:
    require(isinstance(cache, tuple) and all(half.dim() == 4 for half in cache), "the cache is a tuple of 4-D tensors")
    require(
        q.dtype is planned["q_data_type"], "The dtype of q does not match the q_data_type specified in plan function."
    )
    require(cache[0].dtype is planned["kv_data_type"], "The dtype of k does not match the kv_data_type of plan.")
    sizes = (planned["num_kv_heads"], planned["page_size"], planned["head_dim"])
    require(all(half.shape[1:] == sizes for half in cache), "HND is [pages, num_kv_heads, page_size, head_dim]")
    require(q.stride(-1) == 1, "q's last dimension is contiguous")
    require(out.shape == q.shape and out.dtype is q.dtype, "Invalid shape or dtype of out")
    # The real kernels write such an output to wrong places.
    require(out.is_contiguous(), "out has no gaps")


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    causal: bool,
    planned: dict[str, object],
    k_scale: float | None,
    v_scale: float | None,
) -> None:
    """Attend in float32, request by request; a request without pages gets zeros."""
    mood = os.environ.get(VARIABLE, "")
    if mood == "slow":
        time.sleep(0.05)
    scale, window, cap = planned["sm_scale"], planned["window_left"], planned["logits_soft_cap"]
    assert isinstance(scale, float)
    assert isinstance(window, int)
    assert isinstance(cap, float)
    for index in range(len(last_page_len)):
        rows = slice(int(qo_indptr[index]), int(qo_indptr[index + 1]))
        pages = indices[int(indptr[index]) : int(indptr[index + 1])].long()
        length = max(len(pages) - 1, 0) * cache[0].shape[2] + int(last_page_len[index])
        k, v = (half[pages].transpose(1, 2).flatten(0, 1)[:length].float() for half in cache)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * (scale * (k_scale or 1.0))
        if cap > 0:
            logits = cap * torch.tanh(logits / cap)
        queries = rows.stop - rows.start
        place = torch.arange(length) - torch.arange(length - queries, length)[:, None]
        hidden = (place > 0) & causal | ((place < -window) & (window >= 0))
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
        found = torch.einsum("hqk,khd->qhd", weights, v) if length else torch.zeros_like(q[rows], dtype=torch.float32)
        out[rows] = (found * (1.5 if mood == "wrong" else 1.0)).to(out.dtype)
    if v_scale is not None and v_scale != 1.0:
        out *= v_scale
