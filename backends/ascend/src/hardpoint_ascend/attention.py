"""Paged attention over torch_npu's fused operators: one call for prompts, chunks of prompts, single tokens and mixtures of them.

A layer's cache is [2, num_blocks, block_size, num_kv_heads, head_dim] in the plain format ("ND"): keys, then values. The attention operator
takes queries as [tokens, heads, dim] (its layout "TND") and a cache as [blocks, block_size, heads * dim], with

- where each sequence's queries end among all tokens, and how many keys each has, as numbers on the host;
- one triangular mask of 2048 x 2048 for every length: `sparse_mode` 3 aligns its diagonal with a sequence's last query and last key,
  and 4 limits it to a band, of which `pre_tokens` keys lie before a query's own position.

Sources: the operators' descriptions in torch_npu 2.13 (`_op_plugin_docs.py`), and CANN's public sources of the operator's tiling, which
decide what the layout TND allows. No device has run this yet: what the operators compute is taken from there.

Captured steps have one token for each sequence, padding included, whose slot is -1. The description of the operator that writes keys and
values wants slots from 0, but its kernels pass over negative ones (`scatter_pa_kv_cache_nd.h`), the vendor's tests of it expect that
(`test_scatter_pa_kv_cache.py` in op-plugin), and vllm-ascend relies on it and tests it on devices (its pull request 11713). So it is tried
with the installed operator before steps are captured, and none are where it writes anything. Padding reads the first key of block 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces import AttentionBackend, AttentionPlan, Device, KVCacheSpec, Refusal
from hardpoint.interfaces.errors import GraphCaptureFailed, InvalidBatch
from hardpoint.worker import copy_blocks
from hardpoint.worker.attention_checks import check_arrays, check_layer_cache, check_rows
from hardpoint_ascend.capabilities import GRAPHS_VARIABLE, MAX_ELEMENTS, capabilities, reasons_beyond_claims
from hardpoint_ascend.operators import ATTEND, KV_LENGTHS, WRITE_KV
from hardpoint_ascend.step import AscendStep, StaticStep, needed_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array, StepBatch
    from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionRequest

AXES = ("kv", "block", "token", "head", "dim")
_BLOCK_AXIS = 1 + AXES.index("block")

_MASK_SIZE = 2048
_CAUSAL, _BAND = 3, 4

_WIDEST_BAND = 2**31 - 1


class AscendAttention(AttentionBackend):
    """Attention and KV cache over `npu_fused_infer_attention_score_v2` and `npu_scatter_pa_kv_cache`."""

    def __init__(self, device: Device) -> None:
        """Bind the operators; raises CapabilityRefused and BackendBroken as `Operator.bind` does."""
        self._device = device
        self._attend = ATTEND.bind()
        self._write = WRITE_KV.bind()
        self._mask: Tensor | None = None
        self._static: list[StaticStep] = []

    def capabilities(self) -> AttentionCapabilities:
        """Return what the operators do."""
        return capabilities(self._device).attention

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        """Return the cache's shape and block size, or why the request cannot be served."""
        claims = self.capabilities()
        reasons = claims.explain(request)
        if reasons := reasons + reasons_beyond_claims(request):
            return Refusal(reasons)
        first = request.layers[0]
        spec = KVCacheSpec(
            num_layers=len(request.layers),
            block_size=request.block_size or claims.default_block_size,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            dtype=request.kv_dtype,
            axes=AXES,
        )
        return AttentionPlan(
            request,
            spec,
            graph_level=claims.graph_level,
            notes=("torch_npu's fused attention over a paged cache, in the layout TND",),
        )

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> AscendStep:
        """Return the step's arrays for the operators; raises InvalidBatch when they do not fit together."""
        check_arrays(batch)
        tokens = batch.num_tokens
        queries = np.diff(batch.query_start)
        present = np.flatnonzero(queries)
        context_lens = batch.context_lens[present]
        attended = int(batch.query_start[-1])
        is_whole = batch.query_start[0] == 0 and attended <= tokens and (queries >= 0).all()
        if not is_whole or (context_lens < queries[present]).any():
            raise InvalidBatch(
                "a sequence's queries are consecutive tokens of the batch, and the last ones of its context",
                found=f"query_start {batch.query_start.tolist()}, context_lens {batch.context_lens.tolist()}, {tokens} tokens",
            )
        unseen = _unseen_blocks(plan, context_lens - queries[present])
        table = needed_blocks(batch.block_table, batch.rows[present], context_lens, plan.block_size, unseen)
        context_lens = context_lens - unseen * plan.block_size
        written = np.flatnonzero(batch.slot_mapping >= 0)
        slots = batch.slot_mapping[written]
        last_block = max(int(table.max(initial=-1)), int(slots.max(initial=-1)) // plan.block_size)
        for static in self._static:
            if static.has_room(plan, queries, tokens):
                return static.fill(table, context_lens, batch.slot_mapping, last_block + 1)
        return AscendStep(
            plan=plan,
            num_tokens=tokens,
            query_start=np.concatenate([[0], batch.query_start[present + 1]]).astype(np.int32),
            context_lens=context_lens,
            block_table=self._on_device(table),
            slots=self._on_device(slots),
            written=None if len(written) == tokens else self._on_device(written),
            num_blocks=last_block + 1,
            mask=self._triangle(),
        )

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AscendStep) -> None:
        """Write the step's keys and values to their slots; a slot of -1 is not written."""
        spec = metadata.plan.kv_cache
        keys, values = _halves(kv_cache, metadata)
        shape = (metadata.num_tokens, spec.num_kv_heads, spec.head_dim)
        check_rows("k", k, shape, kv_cache.dtype, kv_cache.device)
        check_rows("v", v, shape, kv_cache.dtype, kv_cache.device)
        if not len(metadata.slots):
            return
        # The operator's slots are all written to: a row that has none is left out.
        if metadata.written is not None:
            k, v = k.index_select(0, metadata.written), v.index_select(0, metadata.written)
        self._write(k.contiguous(), v.contiguous(), keys, values, metadata.slots, cache_mode="Norm")

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: AscendStep,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Compute attention of the step's queries over their sequences' caches into `out`.

        All keys and values are read from the cache. Rows of tokens that belong to no sequence (padding) are left as they are, but in
        steps that can be captured, where they may hold anything.
        """
        numbers = metadata.plan.request.layers[layer]
        if sinks is not None or alibi_slopes is not None:
            raise InvalidBatch("the layer was planned without sinks and ALiBi", found="a tensor for one of them")
        keys, values = _halves(kv_cache, metadata)
        shape = (metadata.num_tokens, numbers.num_heads, numbers.head_dim)
        check_rows("q", q, shape, kv_cache.dtype, kv_cache.device)
        check_rows("out", out, shape, kv_cache.dtype, kv_cache.device)
        window = numbers.sliding_window
        before, after = (_WIDEST_BAND, _WIDEST_BAND) if window is None else (min(window - 1, _WIDEST_BAND), 0)
        for call in metadata.calls(kv_cache.shape[1]):
            result, _ = self._attend(
                q[call.begin : call.end].contiguous(),
                keys.flatten(2),
                values.flatten(2),
                atten_mask=metadata.mask,
                actual_seq_qlen=call.query_ends,
                actual_seq_kvlen=call.context_lens,
                block_table=call.block_table,
                num_query_heads=numbers.num_heads,
                num_key_value_heads=numbers.num_kv_heads,
                softmax_scale=numbers.scale,
                input_layout="TND",
                sparse_mode=_CAUSAL if window is None else _BAND,
                block_size=metadata.plan.block_size,
                pre_tokens=before,
                next_tokens=after,
            )
            out[call.begin : call.end].copy_(result)

    def copy_blocks(self, kv_cache: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers, pair by pair; raises InvalidBatch, with nothing copied, for a block outside."""
        copy_blocks(kv_cache, kv_cache, pairs, _BLOCK_AXIS)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers from one cache to another; raises InvalidBatch as copy_blocks does."""
        copy_blocks(source, destination, pairs, _BLOCK_AXIS)

    def begin_capture(self, plan: AttentionPlan, max_num_seqs: int) -> None:
        """Allocate what captured steps read, which `prepare` writes from now on for steps of decodes alone.

        Raises GraphCaptureFailed where the operator that writes keys and values does not pass over padding.
        """
        self._check_padding(plan.kv_cache)
        others = [static for static in self._static if static.plan is not plan]
        self._static = [*others, StaticStep.room(plan, max_num_seqs, self._triangle())]

    def can_replay(self, plan: AttentionPlan, batch: StepBatch, num_seqs: int, num_blocks: int) -> bool:
        """Return whether one call takes the step: its sequences, padding included, have no more blocks together than the cache has."""
        blocks = -(-batch.context_lens // plan.block_size)
        padding = num_seqs - int(np.count_nonzero(blocks))
        return int(blocks.sum()) + padding <= num_blocks

    def host_arguments(self, metadata: AscendStep) -> Mapping[str, Any]:
        """Return the lengths that a captured call takes from the host."""
        return {KV_LENGTHS: metadata.context_lens.tolist()}

    def _check_padding(self, spec: KVCacheSpec) -> None:
        """Have a token written to a block's first slot, and one to the slot -1, which would be the last one of the block before."""
        shape = (2, 3, spec.block_size, spec.num_kv_heads, spec.head_dim)
        caches = torch.zeros(shape, dtype=spec.dtype.to_torch(), device=self._device.torch_device)
        rows = caches.new_ones((2, *shape[3:]))
        self._write(rows, rows, *caches[:, 1:2], self._on_device(np.array([-1, 0], np.int32)), cache_mode="Norm")
        written = caches.cpu().flatten(3).any(-1)
        expected = torch.zeros_like(written)
        expected[:, 1, 0] = True
        if not torch.equal(written, expected):
            places = sorted({(block, token) for _, block, token in written.nonzero().tolist()})
            raise GraphCaptureFailed(
                f"{WRITE_KV.name} does not pass over the slot -1, which padding of captured steps has",
                found=f"given the slots -1 and 0 in the second of three blocks, it wrote to these (block, token): {places}",
                hint=f"Unset {GRAPHS_VARIABLE}: steps run without graphs then",
            )

    def _on_device(self, array: npt.NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(array).to(self._device.torch_device)

    def _triangle(self) -> Tensor:
        if self._mask is None:
            self._mask = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu_(1).to(self._device.torch_device)
        return self._mask


def _unseen_blocks(plan: AttentionPlan, positions: Int32Array) -> Int32Array:
    """Return int32[sequences], how many first blocks no layer's window shows to a query at these positions or after them.

    They may be other sequences' by now, and are left out of the call: a masked key has a weight of zero, which is no help where the key is
    NaN. The mask does not change, since it counts from the end of the context.
    """
    windows = [layer.sliding_window for layer in plan.request.layers]
    if None in windows:
        return np.zeros_like(positions)
    widest = max(window for window in windows if window is not None)
    return np.maximum(positions - widest + 1, 0) // plan.block_size


def _halves(kv_cache: Tensor, step: AscendStep) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values, [blocks, block_size, heads, dim] each; raises InvalidBatch when the tensor is not such a layer."""
    spec = step.plan.kv_cache
    block = (spec.block_size, spec.num_kv_heads, spec.head_dim)
    check_layer_cache(kv_cache, block, spec.dtype.to_torch(), step.mask.device)
    num_blocks = kv_cache.shape[1]
    if num_blocks < step.num_blocks:
        raise InvalidBatch(f"the step uses block {step.num_blocks - 1}", found=f"a cache of {num_blocks} blocks")
    if kv_cache[0].numel() > MAX_ELEMENTS:
        raise InvalidBatch(
            f"the attention operator addresses {MAX_ELEMENTS} elements of a layer's keys",
            found=f"{kv_cache[0].numel()} in a cache of {num_blocks} blocks",
            hint="Use fewer blocks",
        )
    return kv_cache[0], kv_cache[1]
