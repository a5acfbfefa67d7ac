"""Prompts and chunks of prompts, and anything else with several queries for a request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashinfer.pages import attend, check_numbers, check_pages, check_tensors, check_workspace, require


class BatchPrefillWithPagedKVCacheWrapper:
    """Outside of graphs alone."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        check_workspace(float_workspace_buffer)
        require(kv_layout == "HND" and backend in ("auto", "fa2"), "not simulated")
        self._arrays: dict[str, Tensor] | None = None
        self._planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        check_numbers(num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type or q_data_type)
        require(qo_indptr.dtype is torch.int32 and qo_indptr.shape == paged_kv_indptr.shape, "qo_indptr is int32")
        require(int(qo_indptr[0]) == 0 and bool((qo_indptr.diff() >= 0).all()), "qo_indptr should be non-decreasing")
        self._planned = {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim_qk,
            "page_size": page_size,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "sm_scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
        }
        self._causal = causal
        self._arrays = {
            "qo_indptr": qo_indptr.clone(),
            "indptr": paged_kv_indptr.clone(),
            "indices": paged_kv_indices.clone(),
            "last_page_len": paged_kv_last_page_len.clone(),
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor,
    ) -> Tensor:
        assert self._arrays is not None, "plan info is not initialized"
        require(len(q) == int(self._arrays["qo_indptr"][-1]), "q.shape[0] does not match qo_indptr[-1]")
        check_tensors(q, paged_kv_cache, out, self._planned)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        attend(q, paged_kv_cache, out, **self._arrays, causal=self._causal, planned=self._planned, **scales)
        return out
