"""Plain attention on the host in the place of Triton's kernels, which the development environment cannot run: same cache, same claims.

A step of decodes that was prepared for a capture is one object, which is filled anew: recorded calls follow the batch of now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionPlan,
    AttentionRequest,
    DType,
    KVCacheSpec,
    Refusal,
    StepBatch,
)
from hardpoint.interfaces.errors import InvalidBatch
from hardpoint.worker import copy_blocks
from hardpoint_conformance.oracle import Numbers, attend


@dataclass
class PlainStep:
    """A plan and a batch."""

    plan: AttentionPlan
    batch: StepBatch


class PlainBase(AttentionBackend):
    """Attention by the conformance suite's definition, in float32."""

    def __init__(self, claims: AttentionCapabilities) -> None:
        self._claims = claims
        self._static: dict[int, PlainStep] | None = None

    def capabilities(self) -> AttentionCapabilities:
        return self._claims

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        if reasons := self._claims.explain(request):
            return Refusal(reasons)
        layer, size = request.layers[0], request.block_size or self._claims.default_block_size
        spec = KVCacheSpec(len(request.layers), size, layer.num_kv_heads, layer.head_dim, request.kv_dtype)
        return AttentionPlan(request, spec, graph_level=self._claims.graph_level, notes=("plain",))

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> PlainStep:
        seqs, tokens = batch.num_seqs, batch.num_tokens
        expected = {"query_start": seqs + 1, "context_lens": seqs, "slot_mapping": tokens}
        if any(getattr(batch, name).shape != (length,) for name, length in expected.items()):
            raise InvalidBatch("the batch's arrays do not fit together")
        if self._static is None or seqs != tokens or np.diff(batch.query_start)[batch.num_decodes :].any():
            return PlainStep(plan, batch)
        step = self._static.setdefault(seqs, PlainStep(plan, batch))
        step.batch = batch
        return step

    def begin_capture(self, plan: AttentionPlan, max_num_seqs: int) -> None:
        self._static = {}

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: PlainStep) -> None:
        spec, numbers = metadata.plan.kv_cache, metadata.plan.request.layers[layer]
        if (
            kv_cache.shape[2:] != (spec.num_kv_heads, spec.block_size, spec.head_dim)
            or len(k) != metadata.batch.num_tokens
        ):
            raise InvalidBatch("the cache or the keys are not the plan's")
        slots = torch.from_numpy(metadata.batch.slot_mapping.astype(np.int64))
        block, offset = slots[slots >= 0] // spec.block_size, slots[slots >= 0] % spec.block_size
        for half, given, scale in ((0, k, numbers.k_scale), (1, v, numbers.v_scale)):
            if len(block):
                kv_cache[half].view(_bits(spec.dtype))[block, :, offset] = (
                    (given[slots >= 0] / scale).to(kv_cache.dtype).view(_bits(spec.dtype))
                )

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: PlainStep,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        batch, numbers = metadata.batch, metadata.plan.request.layers[layer]
        for index, length in enumerate(batch.context_lens.tolist()):
            rows = slice(int(batch.query_start[index]), int(batch.query_start[index + 1]))
            if rows.stop > rows.start:
                blocks = batch.block_table[batch.rows[index], : -(-length // metadata.plan.block_size)]
                keys, values = (
                    half[torch.from_numpy(blocks.astype(np.int64))].transpose(1, 2).flatten(0, 1)[:length].float()
                    * scale
                    for half, scale in zip(kv_cache, (numbers.k_scale, numbers.v_scale), strict=True)
                )
                found = attend(Numbers(numbers, q[rows], keys, values, sinks, alibi_slopes), torch.float32)
                out[rows] = found.out.to(out.dtype)

    def copy_blocks(self, kv_cache: Tensor, pairs: Any) -> None:
        copy_blocks(kv_cache, kv_cache, pairs, 2)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Any) -> None:
        copy_blocks(source, destination, pairs, 2)


def _bits(dtype: DType) -> torch.dtype:
    """Return the integers that a dtype is written as: torch puts no float8 at indices."""
    return torch.uint8 if dtype.itemsize == 1 else torch.int16 if dtype.itemsize == 2 else torch.int32
