"""Faults of attention.

Some change what a correct backend is given (other numbers in the plan, other arrays in the batch, other tensors); the others replace
its computation by a plain one with a fault in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import (
    AttentionCapabilities,
    AttentionFeature,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    Capabilities,
    Device,
    DType,
    GraphLevel,
    Refusal,
    StepBatch,
)
from hardpoint_conformance.claims import members
from hardpoint_conformance.mutants.derived import Faults, Methods, derived
from hardpoint_conformance.mutants.plain_attention import PlainAttention, PlainStep, plain
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    from hardpoint.interfaces.batch import Int32Array

_FAULTS = Faults("attention")
MUTANTS = _FAULTS.mutants
fault = _FAULTS.fault


def other_layers(base: Any, change: Callable[[AttentionLayer], AttentionLayer]) -> Methods:
    """Compute as if the layers had other numbers."""

    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
        request = replace(plan.request, layers=tuple(change(layer) for layer in plan.request.layers))
        return base.prepare(self, replace(plan, request=request), batch)

    return {"prepare": prepare}


def other_batch(base: Any, change: Callable[[AttentionPlan, StepBatch], StepBatch]) -> Methods:
    """Compute as if the batch had other arrays."""

    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
        return base.prepare(self, plan, change(plan, batch))

    return {"prepare": prepare}


def other_inputs(base: Any, change: Callable[[dict[str, Any]], None]) -> Methods:
    """Compute as if `forward` had other arguments, by name."""

    def forward(
        self: Any,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        inputs = {"q": q, "out": out, "sinks": sinks, "alibi_slopes": alibi_slopes}
        change(inputs)
        base.forward(self, layer, k=k, v=v, kv_cache=kv_cache, metadata=metadata, **inputs)

    return {"forward": forward}


def other_output(base: Any, change: Callable[[Any, StepBatch, Tensor], None]) -> Methods:
    """Change what was computed; `change` gets the backend, the batch and the output."""

    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
        self.vendor_batch = batch
        return base.prepare(self, plan, batch)

    def forward(
        self: Any,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        base.forward(self, layer, q, k, v, kv_cache, metadata, out, sinks, alibi_slopes)
        change(self, self.vendor_batch, out)

    return {"prepare": prepare, "forward": forward}


def next_up(values: Tensor) -> None:
    """Move numbers to the next larger magnitude of their type, in place."""
    values.view({2: torch.int16, 4: torch.int32}[values.element_size()]).add_(1)


# Masks


@fault("A sliding window of w shows w + 1 keys.", "attn.window.edge@1", "attn.window.one@1", "attn.window.long@1")
def window_one_wider(base: Any) -> Methods:
    return other_layers(
        base, lambda layer: replace(layer, sliding_window=layer.sliding_window and layer.sliding_window + 1)
    )


@fault("A sliding window of w shows w - 1 keys.", "attn.window.edge@1", "attn.window.long@1")
def window_one_narrower(base: Any) -> Methods:
    return other_layers(
        base, lambda layer: replace(layer, sliding_window=layer.sliding_window and max(layer.sliding_window - 1, 1))
    )


@fault("The sliding window is accepted and ignored.", "attn.window.edge@1", "attn.window.long@1")
def window_ignored(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, sliding_window=None))


@fault("Queries of a prefill see the keys after them.", "attn.prefill.whole@1", "attn.prefill.batch@1")
def causal_mask_missing(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            return distance > -(layer.sliding_window or 1 << 40) if layer.causal else super().visible(distance, layer)

    return plain(Kernel)


@fault("A layer that is not causal hides the keys after a query.", "attn.bidirectional.whole@1")
def both_sides_are_causal(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            return super().visible(distance, layer) & (distance <= 0)

    return plain(Kernel)


@fault("A window on both sides shows one key too many after the query.", "attn.bidirectional.window@1")
def window_one_wider_ahead(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen = super().visible(distance, layer)
            return seen if layer.causal else seen | (distance == (layer.sliding_window or 0))

    return plain(Kernel)


@fault("A window on both sides shows one key too few before the query.", "attn.bidirectional.window@1")
def window_one_narrower_behind(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen, window = super().visible(distance, layer), layer.sliding_window
            return seen if layer.causal or not window or window == 1 else seen & (distance != 1 - window)

    return plain(Kernel)


@fault("Whole sequences see the first token of the next one.", "attn.bidirectional.whole@1")
def whole_sequences_see_the_next(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def span(self, step: PlainStep, index: int) -> slice:
            own = super().span(step, index)
            return slice(own.start, min(own.stop + 1, step.query_start[-1]))

    return plain(Kernel)


@fault("The last of whole sequences sees the tokens of padding.", "attn.bidirectional.batch@1")
def whole_sequences_see_padding(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def span(self, step: PlainStep, index: int) -> slice:
            own, tokens = super().span(step, index), len(step.slots)
            return slice(own.start, tokens) if own.stop == step.query_start[-1] and own.start < own.stop else own

    return plain(Kernel)


@fault("Layers that are not causal are planned beside causal ones.", "attn.bidirectional.apart@1")
def both_sides_beside_causal(base: Any) -> Methods:
    def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
        if len({layer.causal for layer in request.layers}) > 1:
            request = replace(request, layers=tuple(replace(layer, causal=True) for layer in request.layers))
        made: AttentionPlan | Refusal = base.plan(self, request)
        return made

    return {"plan": plan}


@fault("A query does not see its own key, unless it is the only one.", "attn.prefill.whole@1", "attn.decode.single@1")
def own_key_missing(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen = super().visible(distance, layer)
            return seen & ((distance < 0) | (seen.sum(-1, keepdim=True) == 1))

    return plain(Kernel)


@fault("All layers are computed with the first layer's numbers.", "attn.layers.differ@1")
def numbers_of_first_layer(base: Any) -> Methods:
    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
        first = plan.request.layers[0]
        alike = tuple(
            replace(layer, scale=first.scale, sliding_window=first.sliding_window, soft_cap=first.soft_cap)
            for layer in plan.request.layers
        )
        return base.prepare(self, replace(plan, request=replace(plan.request, layers=alike)), batch)

    return {"prepare": prepare}


@fault("Several queries at the end of a context all see all of it.", "attn.decode.several@1")
def few_queries_see_all(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            queries, keys = distance.shape
            seen = super().visible(distance, layer)
            return torch.ones_like(seen) if queries < min(keys, 9) and layer.sliding_window is None else seen

    return plain(Kernel)


@fault("A window wider than the context shows nothing but the query's own key.", "attn.window.wide@1")
def wide_window_shows_own_key(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen = super().visible(distance, layer)
            wide = layer.sliding_window is not None and layer.sliding_window > distance.shape[-1]
            return distance == 0 if wide else seen

    return plain(Kernel)


@fault("Keys behind the window have a weight of almost nothing.", "attn.poison.window@1")
def hidden_keys_weigh_little(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def masked(self, logits: Tensor, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen = super().masked(logits, distance, layer)
            behind = (distance <= 0) & ~self.visible(distance, layer)
            return torch.where(behind, logits - 100.0, seen)

    return plain(Kernel)


# Logits


@fault("Logits are not scaled.", "attn.scale.custom@1")
def scale_dropped(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, scale=1.0))


@fault("The scale is applied to the queries and again to the logits.", "attn.scale.custom@1")
def scale_applied_twice(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, scale=layer.scale**2))


@fault("The model's scale is replaced by 1 / sqrt(head_dim).", "attn.scale.custom@1")
def scale_always_default(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, scale=layer.head_dim**-0.5))


@fault(
    "The soft cap is accepted and ignored.",
    "attn.softcap.value@1",
    "attn.softcap.saturated@1",
    "attn.features.combined@1",
)
def soft_cap_ignored(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, soft_cap=None))


@fault("The soft cap is half of what the model says.", "attn.softcap.value@1")
def soft_cap_halved(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, soft_cap=layer.soft_cap and layer.soft_cap / 2))


@fault(
    "The soft cap is applied after the mask, so that masked keys have logits of -cap.",
    "attn.softcap.value@1",
    "attn.softcap.saturated@1",
)
def soft_cap_after_mask(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def masked(self, logits: Tensor, distance: Tensor, layer: AttentionLayer) -> Tensor:
            logits = super().masked(logits, distance, replace(layer, soft_cap=None))
            return logits if layer.soft_cap is None else layer.soft_cap * (logits / layer.soft_cap).tanh()

    return plain(Kernel)


@fault("A layer's scales of the cache are accepted and ignored.", "attn.kv.scales@1")
def cache_scales_ignored(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, k_scale=1.0, v_scale=1.0))


@fault("The scale of the cache's keys is applied to its values, and the other way round.", "attn.kv.scales@1")
def cache_scales_swapped(base: Any) -> Methods:
    return other_layers(base, lambda layer: replace(layer, k_scale=layer.v_scale, v_scale=layer.k_scale))


@fault("Numbers of a cache in float8_e4m3fn are read as those of float8_e5m2.", "attn.kv.narrow@1", "attn.kv.scales@1")
def narrow_cache_in_another_format(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        cache = inputs["kv_cache"]
        if cache.dtype is torch.float8_e4m3fn:
            inputs["kv_cache"] = cache.view(torch.float8_e5m2).float().to(cache.dtype)

    return other_inputs(base, change)


@fault("Attention sinks are accepted and ignored.", "attn.sinks.value@1", "attn.sinks.range@1")
def sinks_ignored(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        if inputs["sinks"] is not None:
            inputs["sinks"] = inputs["sinks"].new_full(inputs["sinks"].shape, -torch.inf)

    return other_inputs(base, change)


@fault("All heads have the first head's sink.", "attn.sinks.value@1")
def sinks_of_first_head(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        if inputs["sinks"] is not None:
            inputs["sinks"] = inputs["sinks"][:1].expand_as(inputs["sinks"]).contiguous()

    return other_inputs(base, change)


@fault("ALiBi slopes are accepted and ignored.", "attn.alibi.value@1")
def alibi_ignored(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        if inputs["alibi_slopes"] is not None:
            inputs["alibi_slopes"] = inputs["alibi_slopes"] * 0

    return other_inputs(base, change)


@fault("ALiBi has the wrong sign: it favours what is far away.", "attn.alibi.value@1")
def alibi_sign_wrong(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        if inputs["alibi_slopes"] is not None:
            inputs["alibi_slopes"] = -inputs["alibi_slopes"]

    return other_inputs(base, change)


@fault(
    "The softmax does not take the largest logit off first, and overflows.",
    "attn.data.large-logits@1",
    "attn.data.extreme@1",
)
def softmax_without_maximum(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def weights(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
            powers = logits.exp()
            total = powers.sum(-1, keepdim=True)
            return powers / (total if sinks is None else total + sinks.float().exp()[:, None, None])

    return plain(Kernel)


# Heads and numbers


@fault("Query heads take KV heads in turn (head % kv_heads), not in groups.", "attn.heads.group@1")
def gqa_interleaved(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def kv_heads(self, layer: AttentionLayer) -> Tensor:
            return torch.arange(layer.num_heads) % layer.num_kv_heads

    return plain(Kernel)


@fault("All query heads read the first KV head.", "attn.heads.group@1")
def first_kv_head_only(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def kv_heads(self, layer: AttentionLayer) -> Tensor:
            return super().kv_heads(layer) * 0

    return plain(Kernel)


@fault("Weighted values are summed up in half precision.", "attn.accumulate.values@1")
def half_precision_accumulation(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def mix(self, weights: Tensor, values: Tensor) -> Tensor:
            total = torch.zeros(weights.shape[1], *values.shape[1:], dtype=torch.float16)
            for key in range(len(values)):
                total += (weights[:, :, key].T[..., None] * values[key]).half()
            return total.float()

    return plain(Kernel)


@fault("float32 is claimed, and computed in bfloat16.", "attn.accumulate.products@1", "attn.heads.dim@1")
def float32_computed_in_bfloat16(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            return super().gather(pages, step, index, length).to(torch.bfloat16).float()

    return plain(Kernel)


# Reading the cache


@fault("Blocks that no sequence has are read, with a weight of zero.", "attn.poison.unused-block@1")
def unused_blocks_read(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            return super().gather(pages, step, index, length) + 0 * pages.float().sum()

    return plain(Kernel)


@fault("Blocks before the window are read, with a weight of zero.", "attn.window.freed-blocks@1")
def freed_blocks_read(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def freed(self, step: PlainStep, layer: AttentionLayer, query: int) -> int:
            return 0

    return plain(Kernel)


@fault("All layers have the first layer's part of the cache.", "attn.kv.layers@1")
def layers_share_a_cache(base: Any) -> Methods:
    def first(self: Any, layer: int, kv_cache: Tensor) -> Tensor:
        if layer == 0:
            self._first = kv_cache
        found: Tensor = vars(self).get("_first", kv_cache)
        return found

    def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        base.write_kv(self, layer, k, v, first(self, layer, kv_cache), metadata)

    def forward(
        self: Any,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        base.forward(self, layer, q, k, v, first(self, layer, kv_cache), metadata, out, sinks, alibi_slopes)

    return {"write_kv": write_kv, "forward": forward}


@fault("What is written once more is rounded once more.", "attn.kv.idempotent@1")
def written_again_is_rounded_again(base: Any) -> Methods:
    def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        last = vars(self).get("_last")
        if last is not None and last[0] == layer and last[1] is metadata:
            k = k.clone()
            next_up(k)
        self._last = (layer, metadata)
        base.write_kv(self, layer, k, v, kv_cache, metadata)

    return {"write_kv": write_kv}


@fault(
    "Values are read to the end of the last block with weights of zero: a NaN there spoils the sum.",
    "attn.poison.tail@1",
)
def values_read_past_end(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            return super().gather(pages, step, index, _whole_blocks(step, length))

    return plain(Kernel)


@fault(
    "Hidden keys are masked by a multiplication with zero, which a NaN survives.",
    "attn.poison.tail@1",
)
def mask_by_multiplication(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            return super().gather(pages, step, index, _whole_blocks(step, length))

        def masked(self, logits: Tensor, distance: Tensor, layer: AttentionLayer) -> Tensor:
            if layer.soft_cap is not None:
                logits = layer.soft_cap * (logits / layer.soft_cap).tanh()
            seen = self.visible(distance, layer)
            return logits * seen + ~seen * -1e30

        def mix(self, weights: Tensor, values: Tensor) -> Tensor:
            return super().mix(weights, values.nan_to_num())

    return plain(Kernel)


def _whole_blocks(step: PlainStep, length: int) -> int:
    size = step.plan.block_size
    return -(-length // size) * size


@fault(
    "One block more than the context has is read from the table, with weights of zero.",
    "attn.poison.null-block@1",
)
def null_block_read(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            found = super().gather(pages, step, index, length)
            count = -(-length // step.plan.block_size)
            further = step.tables[index][count : count + 1]
            return found + sum((pages[block].float() * 0).sum() for block in further if block < len(pages))

    return plain(Kernel)


@fault("Sequence r takes row r of the block table, whatever `rows` says.", "attn.prefill.batch@1", "attn.block.size@1")
def table_rows_ignored(base: Any) -> Methods:
    def change(plan: AttentionPlan, batch: StepBatch) -> StepBatch:
        return replace(batch, rows=np.arange(batch.num_seqs, dtype=np.int32))

    return other_batch(base, change)


@fault(
    "A sequence's blocks are taken to lie one after the other, from its first.",
    "attn.blocks.order@1",
    "attn.blocks.permuted@1",
)
def blocks_taken_in_a_row(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            self._num_blocks = len(pages)
            return super().gather(pages, step, index, length)

        def blocks(self, step: PlainStep, index: int, count: int) -> list[int]:
            first = step.tables[index][0]
            return [(first + block) % self._num_blocks for block in range(count)]

    return plain(Kernel)


@fault(
    "The newest key of a context is left out.",
    "attn.decode.single@1",
    "attn.decode.long@1",
    "attn.decode.incremental@1",
)
def context_one_shorter(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def context(self, step: PlainStep, index: int) -> int:
            return max(step.context_lens[index] - 1, 1)

        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen = super().visible(distance, layer)
            return seen | ~seen.any(-1, keepdim=True)

    return plain(Kernel)


@fault("A prefill chunk does not see what was computed before it.", "attn.prefill.chunk@1", "attn.chunking.invariant@1")
def chunk_ignores_context(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            queries, keys = distance.shape
            seen = super().visible(distance, layer)
            if queries > 1:
                seen[:, : keys - queries] = False
            return seen

    return plain(Kernel)


@fault("In a mixed batch only the decodes are computed.", "attn.batch.mixed@1", "attn.batch.mixed-features@1")
def mixed_batch_decodes_only(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def start(self, step: PlainStep) -> None:
            if 0 < step.num_decodes < len(step.context_lens):
                step.query_start[step.num_decodes + 1 :] = [step.num_decodes] * (
                    len(step.context_lens) - step.num_decodes
                )

    return plain(Kernel)


@fault("A block that two sequences of a batch share is read for the first of them only.", "attn.blocks.shared@1")
def shared_block_read_once(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def start(self, step: PlainStep) -> None:
            self._owner: dict[int, int] = {}

        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            size, found = step.plan.block_size, super().gather(pages, step, index, length)
            for place, block in enumerate(self.blocks(step, index, -(-length // size))):
                if self._owner.setdefault(block, index) != index:
                    found[place * size : (place + 1) * size] = 0
            return found

    return plain(Kernel)


@fault(
    "Metadata are kept by the sizes of the batch, and used again for another batch of these sizes.",
    "attn.metadata.fresh@1",
    "attn.metadata.moved@1",
)
def metadata_stale(base: Any) -> Methods:
    def prepare(self: Any, plan: AttentionPlan, batch: StepBatch) -> Any:
        kept = vars(self).setdefault("_kept_metadata", {})
        key = (plan.request, batch.num_seqs, batch.num_tokens)
        if key not in kept:
            kept[key] = base.prepare(self, plan, _copied(batch))
        return kept[key]

    return {"prepare": prepare}


def _copied(batch: StepBatch) -> StepBatch:
    arrays = ("query_start", "context_lens", "block_table", "rows", "slot_mapping")
    return replace(batch, **{name: getattr(batch, name).copy() for name in arrays})


@fault("A decode sees its last block to the end, with what others left there.", "attn.blocks.leftovers@1")
def decode_sees_leftovers(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            return super().gather(pages, step, index, _whole_blocks(step, length))

        def visible(self, distance: Tensor, layer: AttentionLayer) -> Tensor:
            seen = super().visible(distance, layer)
            return seen | (distance > 0) if len(distance) == 1 else seen

    return plain(Kernel)


@fault("Offsets into the cache are computed in 32 bits.", "attn.offset.large@1")
def offsets_in_32_bits(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def gather(self, pages: Tensor, step: PlainStep, index: int, length: int) -> Tensor:
            self._most = (1 << 31) // pages[0].numel()
            return super().gather(pages, step, index, length)

        def blocks(self, step: PlainStep, index: int, count: int) -> list[int]:
            return [block % self._most for block in super().blocks(step, index, count)]

    return plain(Kernel)


@fault("A sequence without tokens in the step is an error.", "attn.padding.sequences@1")
def empty_sequence_fails(base: Any) -> Methods:
    def change(plan: AttentionPlan, batch: StepBatch) -> StepBatch:
        if (np.diff(batch.query_start) == 0).any():
            raise IndexError("list index out of range")
        return batch

    return other_batch(base, change)


@fault("A step without tokens is an error.", "attn.batch.empty@1")
def empty_batch_fails(base: Any) -> Methods:
    def change(plan: AttentionPlan, batch: StepBatch) -> StepBatch:
        if batch.num_tokens == 0:
            raise IndexError("list index out of range")
        return batch

    return other_batch(base, change)


# Writing the cache


@fault(
    "The last token of a block is written one slot too early, over its neighbour.",
    "attn.kv.write@1",
    "attn.block.size@1",
)
def slot_off_at_block_border(base: Any) -> Methods:
    def change(plan: AttentionPlan, batch: StepBatch) -> StepBatch:
        slots = batch.slot_mapping
        return replace(batch, slot_mapping=np.where(slots % plan.block_size == plan.block_size - 1, slots - 1, slots))

    return other_batch(base, change)


@fault(
    "Padding tokens (slot -1) are written to slot 0.",
    "attn.kv.no-slot@1",
    "attn.padding.tokens@1",
    "attn.poison.padding@1",
)
def padding_written(base: Any) -> Methods:
    return other_batch(
        base, lambda plan, batch: replace(batch, slot_mapping=np.maximum(batch.slot_mapping, 0).astype(np.int32))
    )


@fault("Keys are written as values and values as keys.", "attn.kv.write@1")
def keys_and_values_swapped(base: Any) -> Methods:
    def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        base.write_kv(self, layer, v, k, kv_cache, metadata)

    return {"write_kv": write_kv}


@fault("Keys and values lose their last bits when they are written.", "attn.kv.write@1", "attn.kv.narrow@1")
def written_rounded(base: Any) -> Methods:
    def write_kv(self: Any, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        k, v = (x.to(torch.float8_e5m2).to(x.dtype) for x in (k, v))
        base.write_kv(self, layer, k, v, kv_cache, metadata)

    return {"write_kv": write_kv}


@fault("A write clears the rest of its block, which a sequence may share.", "attn.kv.write@1")
def write_clears_rest_of_block(base: Any) -> Methods:
    class Kernel(PlainAttention):
        def write(self, step: PlainStep, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
            for slot in step.slots:
                block, offset = divmod(slot, step.plan.block_size)
                if slot >= 0:
                    keys[block, offset:], values[block, offset:] = 0, 0
            super().write(step, k, v, keys, values)

    return plain(Kernel)


@fault("Only the first pair of blocks is copied.", "attn.kv.copy@1")
def copies_first_pair_only(base: Any) -> Methods:
    def copy_blocks(self: Any, kv_cache: Tensor, pairs: Int32Array) -> None:
        base.copy_blocks(self, kv_cache, pairs[:1])

    return {"copy_blocks": copy_blocks}


@fault("Blocks are copied in the first layer only.", "attn.kv.copy@1")
def copies_first_layer_only(base: Any) -> Methods:
    def copy_blocks(self: Any, kv_cache: Tensor, pairs: Int32Array) -> None:
        base.copy_blocks(self, kv_cache[:1], pairs)

    return {"copy_blocks": copy_blocks}


@fault("All blocks are read before the first of them is written.", "attn.kv.copy-chained@1")
def chained_copies_read_too_early(base: Any) -> Methods:
    def copy_blocks(self: Any, kv_cache: Tensor, pairs: Int32Array) -> None:
        base.swap_blocks(self, kv_cache.clone(), kv_cache, pairs)

    return {"copy_blocks": copy_blocks}


@fault("Swapping blocks copies the wrong way round.", "attn.kv.swap@1")
def swap_reversed(base: Any) -> Methods:
    def swap_blocks(self: Any, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        base.swap_blocks(self, destination, source, pairs[:, ::-1])

    return {"swap_blocks": swap_blocks}


@fault("Swapped blocks arrive in each other's places.", "attn.kv.swap@1")
def swap_places_mixed_up(base: Any) -> Methods:
    def swap_blocks(self: Any, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        base.swap_blocks(self, source, destination, np.stack([pairs[:, 0], pairs[::-1, 1]], axis=1))

    return {"swap_blocks": swap_blocks}


# Tensors


@fault("A row beyond the output's last is written.", "attn.bounds.sentinels@1")
def output_written_beyond_rows(base: Any) -> Methods:
    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        end = out.storage_offset() + (out.shape[0] + 1) * out.stride(0)
        if out.stride(0) and end <= out.untyped_storage().nbytes() // out.element_size():
            out.as_strided(
                (1, *out.shape[1:]), out.stride(), out.storage_offset() + out.shape[0] * out.stride(0)
            ).zero_()

    return other_output(base, change)


@fault("Queries are taken to lie without gaps, whatever their stride.", "attn.layout.strides@1")
def query_stride_ignored(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        q = inputs["q"]
        inputs["q"] = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))

    return other_inputs(base, change)


@fault(
    "The output is taken to lie without gaps, whatever its stride.", "attn.layout.strides@1", "attn.bounds.sentinels@1"
)
def output_stride_ignored(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        out = inputs["out"]
        inputs["out"] = out.as_strided(out.shape, (out.shape[1] * out.shape[2], out.shape[2], 1))

    return other_inputs(base, change)


@fault("The queries are scaled in place.", "attn.inputs.untouched@1")
def queries_scaled_in_place(base: Any) -> Methods:
    def change(inputs: dict[str, Any]) -> None:
        scaled = inputs["q"]
        inputs["q"] = scaled.clone()
        scaled.mul_(0.125)

    return other_inputs(base, change)


# Repeatability


@fault(
    "The last bit of a sequence's result depends on its place in the batch.",
    "determinism.batch.invariant@1",
    "attn.batch.order@1",
)
def place_in_batch_changes_result(base: Any) -> Methods:
    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        if batch.num_seqs > 1:
            next_up(out[batch.query_start[1] : batch.query_start[-1]])

    return other_output(base, change)


@fault("The last bit of the result changes from run to run.", "determinism.run.repeat@1")
def last_bit_changes_by_run(base: Any) -> Methods:
    runs = iter(range(1 << 62))

    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        if next(runs) % 2:
            next_up(out[: batch.query_start[-1]])

    return other_output(base, change)


@fault("The last bit of the result differs from one attention object to the next.", "determinism.run.instances@1")
def instances_differ(base: Any) -> Methods:
    made = iter(range(1 << 62))

    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        if vars(self).setdefault("_number", next(made)) % 2:
            next_up(out[: batch.query_start[-1]])

    return other_output(base, change)


@fault("The last bit of a decode differs when there are prompts in the step.", "determinism.batch.chunks@1")
def decodes_beside_prompts_differ(base: Any) -> Methods:
    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        if 0 < batch.num_decodes < batch.num_seqs:
            next_up(out[: batch.num_decodes])

    return other_output(base, change)


@fault("Sequences beyond the fourth of a batch are not computed.", "determinism.batch.tolerance@1")
def four_sequences_only(base: Any) -> Methods:
    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        if batch.num_seqs > 4:
            out[batch.query_start[4] : batch.query_start[-1]] = 0

    return other_output(base, change)


@fault(
    "Where a step has fewer tokens than the one before, the last row of that one is left in its results.",
    "attn.metadata.smaller@1",
)
def larger_step_leaves_a_row(base: Any) -> Methods:
    def change(self: Any, batch: StepBatch, out: Tensor) -> None:
        count, before = int(batch.query_start[-1]), vars(self).get("_before")
        now = out[:count].clone()
        if before is not None and 0 < count < len(before):
            out[count - 1] = before[-1]
        self._before = now

    return other_output(base, change)


# Claims


@fault("The attention object claims fewer features than the descriptor.", "attn.claims.agree@1")
def attention_claims_less(base: Any) -> Methods:
    def capabilities(self: Any) -> AttentionCapabilities:
        claims: AttentionCapabilities = base.capabilities(self)
        return replace(claims, features=frozenset())

    return {"capabilities": capabilities}


@fault("A cache in float16 is accepted for all queries.", "attn.kv-dtype.pairs@1")
def cache_in_half_for_all(base: Any) -> Methods:
    def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
        dtype = request.dtype if request.kv_dtype is DType.FLOAT16 else request.kv_dtype
        made: AttentionPlan | Refusal = base.plan(self, replace(request, kv_dtype=dtype))
        if isinstance(made, Refusal):
            return made
        return replace(made, request=request, kv_cache=replace(made.kv_cache, dtype=request.kv_dtype))

    return {"plan": plan}


def _without_claim(target: Target, feature: AttentionFeature, methods: Callable[[Any], Methods]) -> Target:
    """Return a target that does not claim a feature, with an attention backend that has these methods."""

    def capabilities(device: Device) -> Capabilities:
        claims = target.descriptor.capabilities(device)
        return replace(claims, attention=replace(claims.attention, features=claims.attention.features - {feature}))

    def attention() -> Any:
        base = target.descriptor.attention()
        own = {"capabilities": lambda self: capabilities(target.device).attention}
        return derived(base, {**methods(base), **own})

    return target.with_descriptor(capabilities=capabilities, attention=attention)


@_FAULTS.target_fault(
    "The soft cap is not claimed; a request for it is accepted, and the cap ignored.", "attn.feature.refused@1"
)
def unclaimed_soft_cap_ignored(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
            plain_layers = tuple(replace(layer, soft_cap=None) for layer in request.layers)
            made: AttentionPlan | Refusal = base.plan(self, replace(request, layers=plain_layers))
            return made if isinstance(made, Refusal) else replace(made, request=request)

        return {**other_layers(base, lambda layer: replace(layer, soft_cap=None)), "plan": plan}

    return _without_claim(target, AttentionFeature.SOFT_CAP, methods)


@_FAULTS.target_fault(
    "The soft cap is not claimed; it is refused with an exception in `plan`.", "attn.feature.refused@1"
)
def unclaimed_soft_cap_crashes(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
            if any(layer.soft_cap for layer in request.layers):
                raise NotImplementedError("soft cap")
            made: AttentionPlan | Refusal = base.plan(self, request)
            return made

        return {"plan": plan}

    return _without_claim(target, AttentionFeature.SOFT_CAP, methods)


@fault("Every head dimension is accepted, claimed or not.", "attn.plan.refusal@1", "attn.plan.reasons@1")
def unclaimed_head_dim_accepted(base: Any) -> Methods:
    def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
        dim = members(self.capabilities().head_dims, 1024)[0]
        made: AttentionPlan | Refusal = base.plan(
            self, replace(request, layers=tuple(replace(layer, head_dim=dim) for layer in request.layers))
        )
        if isinstance(made, Refusal):
            return made
        spec = replace(made.kv_cache, head_dim=request.layers[0].head_dim)
        return replace(made, request=request, kv_cache=spec)

    return {"plan": plan}


@fault("A refusal has no reasons.", "attn.plan.refusal@1", "attn.plan.reasons@1", "attn.kv-dtype.refused@1")
def refusal_without_reasons(base: Any) -> Methods:
    def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
        made: AttentionPlan | Refusal = base.plan(self, request)
        return Refusal(()) if isinstance(made, Refusal) else made

    return {"plan": plan}


@fault("The plan has another block size than the request asked for.", "attn.plan.spec@1")
def block_size_replaced(base: Any) -> Methods:
    def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
        if base.plan(self, request) and request.block_size in self.capabilities().block_sizes:
            request = replace(request, block_size=None)
        made: AttentionPlan | Refusal = base.plan(self, request)
        return made

    return {"plan": plan}


# No fault


@fault(
    "No fault: attention is computed in plain torch, as a second correct backend.",
    *dict.fromkeys(clause for mutant in MUTANTS for clause in mutant.killed_by),
    harmless=True,
)
def plain_torch_attention(base: Any) -> Methods:
    return plain(PlainAttention)


@fault("A plan offers graphs, which are not claimed.", "graph.unclaimed.none@1")
def unclaimed_graphs_offered(base: Any) -> Methods:
    def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
        made: AttentionPlan | Refusal = base.plan(self, request)
        return made if isinstance(made, Refusal) else replace(made, graph_level=GraphLevel.UNIFORM_DECODE)

    return {"plan": plan}
