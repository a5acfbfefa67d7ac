"""Paged attention in plain torch: right, readable, and slow. Kernels of the device take the place of `forward`.

The KV cache of a layer is [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values. Sums are float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hardpoint.interfaces import AttentionCapabilities, Device
from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan, AttentionRequest, KVCacheSpec, Refusal
from hardpoint.interfaces.batch import Int32Array, StepBatch
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint_acme.capabilities import capabilities


@dataclass(frozen=True)
class Step:
    """One step's metadata: copies, because the batch's arrays are the scheduler's and change.

    Attributes:
        tokens: int64[n], the tokens whose keys and values are written, less those that are padding.
        slots: int64[n], where they go.
        sequences: first and last token of each sequence, and the slots int64[context] of its keys, in order.
    """

    plan: AttentionPlan
    tokens: Tensor
    slots: Tensor
    sequences: tuple[tuple[int, int, Tensor], ...]


class AcmeAttention(AttentionBackend):
    """Prefill, chunked prefill, decode and mixes of them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def capabilities(self) -> AttentionCapabilities:
        """Return what this backend does on its device."""
        return capabilities(self._device).attention

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        """Return the cache's shape, or why the request cannot be served."""
        claims = self.capabilities()
        if reasons := claims.explain(request):
            return Refusal(reasons)
        layer, block_size = request.layers[0], request.block_size or claims.default_block_size
        shape = (len(request.layers), block_size, layer.num_kv_heads, layer.head_dim)
        return AttentionPlan(request, KVCacheSpec(*shape, request.kv_dtype, ("kv", "block", "token", "head", "dim")))

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> Step:
        """Return the step's slots on the device."""
        size, device, ends, sequences = plan.block_size, self._device.torch_device, batch.query_start.tolist(), []
        for row, context, first, last in zip(batch.rows, batch.context_lens, ends[:-1], ends[1:], strict=True):
            if first < last:
                positions = np.arange(context)
                slots = batch.block_table[row, positions // size] * size + positions % size
                sequences.append((first, last, torch.from_numpy(slots).to(device)))
        written = torch.tensor(batch.slot_mapping, dtype=torch.int64, device=device)
        tokens = (written >= 0).nonzero().flatten()
        return Step(plan, tokens, written[tokens], tuple(sequences))

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Step) -> None:
        """Write the step's keys and values to their slots."""
        cache = _by_slot(kv_cache)
        cache[0, metadata.slots] = k[metadata.tokens]
        cache[1, metadata.slots] = v[metadata.tokens]

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Step, out: Tensor,
        sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute attention of the step's queries over their sequences' caches into `out`."""
        if sinks is not None or alibi_slopes is not None:
            raise CapabilityRefused("attention was asked for", ["sinks and alibi are not supported"])
        facts, cache = metadata.plan.request.layers[layer], _by_slot(kv_cache)
        for first, last, slots in metadata.sequences:
            keys, values = cache[:, slots].float()
            queries = q[first:last].float().reshape(last - first, facts.num_kv_heads, -1, facts.head_dim)
            logits = torch.einsum("qhgd,khd->hgqk", queries, keys) * facts.scale
            positions = torch.arange(len(slots), device=q.device)
            hidden = positions > positions[first - last :, None]
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)

    def copy_blocks(self, kv_cache: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers."""
        self.swap_blocks(kv_cache, kv_cache, pairs)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers from one whole cache to another."""
        for source_block, block in pairs.tolist():
            destination[:, :, block] = source[:, :, source_block]


def _by_slot(kv_cache: Tensor) -> Tensor:
    """Return a layer's cache as [2, num_slots, num_kv_heads, head_dim]."""
    return kv_cache.view(2, -1, *kv_cache.shape[3:])
