"""Decodes: one query for each request."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from flashinfer.pages import (
    VARIABLE,
    attend,
    check_numbers,
    check_pages,
    check_tensors,
    check_workspace,
    require,
)


class BatchDecodeWithPagedKVCacheWrapper:
    """Takes the way over tensor cores alone; what it plans for a graph keeps to the buffers that it was made with."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if os.environ.get(VARIABLE) == "broken":
            raise RuntimeError("Could not find nvcc\nand more that nobody reads")
        check_workspace(float_workspace_buffer)
        require(kv_layout == "HND" and use_tensor_cores and backend in ("auto", "fa2"), "not simulated")
        self._floats, self._ints = float_workspace_buffer, torch.empty(8 << 20, dtype=torch.uint8)
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            require(all(torch.is_tensor(buffer) for buffer in given), "buffers should be tensors in cudagraph mode")
            self._buffers = given  # type: ignore[assignment]
            require(len(given[0]) == len(given[2]) + 1, "The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._pages: tuple[Tensor, Tensor, Tensor] | None = None
        self._planned: dict[str, Any] = {}

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        check_workspace(float_workspace_buffer)
        check_workspace(int_workspace_buffer)
        self._floats, self._ints = float_workspace_buffer, int_workspace_buffer

    def workspace_size(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> tuple[int, int]:
        require(
            self._buffers is not None and len(last_page_len) == len(self._buffers[2]), "The batch size should be fixed"
        )
        return _workspaces(len(last_page_len), num_kv_heads, head_dim)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        check_pages(indptr, indices, last_page_len, page_size)
        check_numbers(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type or q_data_type)
        planned = {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "sm_scale": head_dim**-0.5 if sm_scale is None else sm_scale,
        }
        if self._buffers is None:
            self._pages = (indptr.clone(), indices.clone(), last_page_len.clone())
        else:
            require(len(last_page_len) == len(self._buffers[2]), "The batch size should be fixed in cudagraph mode")
            require(len(indices) <= len(self._buffers[1]), "The size of indices exceeds the allocated buffer")
            needed = _workspaces(len(last_page_len), num_kv_heads, head_dim)
            if any(len(buffer) < size for buffer, size in zip((self._floats, self._ints), needed, strict=True)):
                raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
            require(not self._planned or planned == self._planned, "a graph's numbers are frozen")
            for buffer, array in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(array)].copy_(array)
            self._pages = self._buffers
        self._planned = planned

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor,
    ) -> Tensor:
        assert self._pages is not None, "plan info is not initialized"
        indptr, indices, last = self._pages
        check_tensors(q, paged_kv_cache, out, self._planned)
        require(len(q) == len(last), "q.shape[0] does not match batch_size * q_len_per_req")
        attend(
            q,
            paged_kv_cache,
            out,
            qo_indptr=torch.arange(len(q) + 1),
            indptr=indptr,
            indices=indices,
            last_page_len=last,
            causal=False,
            planned=self._planned,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return out


def _workspaces(batch: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return bytes for the partial results, and for the numbers, of a graph's steps on a device with 132 multiprocessors."""
    tiles = max(264 // num_kv_heads, batch)
    return tiles * 16 * num_kv_heads * head_dim * 4, 64 * tiles
