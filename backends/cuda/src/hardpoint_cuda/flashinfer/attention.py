"""Paged attention by FlashInfer over the cache of other kernels, where a trial says that it is right and faster."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces import AttentionBackend, AttentionPlan, Device, Refusal
from hardpoint.interfaces.errors import BackendBroken, InvalidBatch
from hardpoint_cuda.flashinfer.claims import flashinfer_attention_capabilities
from hardpoint_cuda.flashinfer.trial import Trial, try_out
from hardpoint_cuda.flashinfer.wrappers import FlashInferStep, Kernels

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces import AttentionCapabilities, AttentionRequest, StepBatch
    from hardpoint.interfaces.batch import Int32Array

_log = logging.getLogger("hardpoint")

_MAX_RECENT = 8
"""Plans whose kernels are found by identity: those of a model's KV cache groups."""


class FlashInferAttention(AttentionBackend):
    """Attention over a cache that other kernels write, copy and swap; they attend too for models that FlashInfer is not chosen for.

    Args:
        base: those kernels; a layer of their cache is [2, blocks, kv_heads, block_size, head_dim]. Their claims are those of this
            backend, so they hold for both.
        is_named: FlashInfer alone was asked for: what it does not do is refused, and a trial that fails is an error.
    """

    def __init__(self, device: Device, base: AttentionBackend, *, is_named: bool = False) -> None:
        self._device = torch.device(device.torch_device)
        self._base = base
        self._is_named = is_named
        self._verdicts: dict[AttentionRequest, tuple[Kernels | None, str]] = {}
        self._recent: list[tuple[AttentionPlan, Kernels | None]] = []

    def capabilities(self) -> AttentionCapabilities:
        """Return what holds for all kernels that a plan may choose."""
        return self._base.capabilities()

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        """Return the plan of the base with the kernels that were chosen in its notes, or why the request cannot be served.

        The first plan of a request runs the trial on the device, after which nothing of it is left there but chosen kernels.

        Raises:
            BackendBroken: FlashInfer was named, and it fails or is wrong.
        """
        plan = self._base.plan(request)
        if isinstance(plan, Refusal):
            return plan
        reasons = flashinfer_attention_capabilities().explain(request)
        if reasons and self._is_named:
            return Refusal(reasons)
        if request not in self._verdicts:
            self._verdicts[request] = (None, f"no flashinfer: {'; '.join(reasons)}") if reasons else self._decide(plan)
            _log.info("attention on %s: %s", self._device, self._verdicts[request][1])
        return replace(plan, notes=(*plan.notes, self._verdicts[request][1]))

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> Any:
        """Return the step's metadata; raises InvalidBatch when its arrays do not fit together."""
        base, kernels = self._base.prepare(plan, batch), self._kernels_of(plan)
        return base if kernels is None else kernels.prepare(batch, base)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        """Write the step's keys and values to their slots, by the base."""
        self._base.write_kv(layer, k, v, kv_cache, metadata.base if isinstance(metadata, FlashInferStep) else metadata)

    def forward(
        self,
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
        """Compute attention of the step's queries over their sequences' caches into `out`."""
        if not isinstance(metadata, FlashInferStep):
            self._base.forward(layer, q, k, v, kv_cache, metadata, out, sinks, alibi_slopes)
        elif sinks is not None or alibi_slopes is not None:
            raise InvalidBatch("the layer was planned without sinks and ALiBi", found="a tensor")
        else:
            metadata.kernels.forward(layer, q, kv_cache, metadata, out)

    def copy_blocks(self, kv_cache: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers, by the base."""
        self._base.copy_blocks(kv_cache, pairs)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers from one cache to another, by the base."""
        self._base.swap_blocks(source, destination, pairs)

    def begin_capture(self, plan: AttentionPlan, max_num_seqs: int) -> None:
        """Allocate static metadata of the base and of FlashInfer."""
        self._base.begin_capture(plan, max_num_seqs)
        if (kernels := self._kernels_of(plan)) is not None:
            kernels.begin_capture(max_num_seqs)

    def end_capture(self) -> None:
        """Take what was prepared since `begin_capture` for what is replayed."""
        self._base.end_capture()
        for kernels, _ in self._verdicts.values():
            if kernels is not None:
                kernels.end_capture()

    def _kernels_of(self, plan: AttentionPlan) -> Kernels | None:
        # A request's hash is that of all its layers: too long for each step.
        for recent, kernels in self._recent:
            if recent is plan:
                return kernels
        kernels = self._verdicts.get(plan.request, (None, ""))[0]
        self._recent = [(plan, kernels), *self._recent[: _MAX_RECENT - 1]]
        return kernels

    def _decide(self, plan: AttentionPlan) -> tuple[Kernels | None, str]:
        """Return FlashInfer's kernels if they are to be used, and in any case the reason."""
        _log.info("FlashInfer is tried on %s; what it compiles for that takes minutes, once", self._device)
        kernels: Kernels | None = None
        try:
            kernels = Kernels(plan, self._device)
            trial = try_out(kernels, self._base, plan, self._device)
        except Exception as error:
            # Whatever fails in a library that is optional is a reason to do without it.
            if self._is_named:
                raise BackendBroken(
                    "HARDPOINT_ATTENTION=flashinfer was asked for, and FlashInfer failed in its trial",
                    found=_first_line(error),
                    hint="unset HARDPOINT_ATTENTION: Triton's kernels serve then",
                ) from error
            kernels, note = None, f"no flashinfer: it failed in its trial ({_first_line(error)})"
        else:
            kernels, note = self._judge(kernels, trial)
        if kernels is None and self._device.type != "cpu":
            torch.cuda.empty_cache()
        return kernels, note

    def _judge(self, kernels: Kernels, trial: Trial) -> tuple[Kernels | None, str]:
        if self._is_named or trial.is_faster:
            return kernels, f"flashinfer attends: {trial}"
        return None, f"no flashinfer: it is not faster: {trial}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
