"""Paged attention over the Triton kernels, for any device that Triton compiles for and for its interpreter.

The KV cache of a layer is [2, num_blocks, num_kv_heads, block_size, head_dim]: keys, then values, so that the tokens of a block lie
together for each head. Results of a sequence do not depend on the batch around it. No method waits for the device.
"""

from __future__ import annotations

import importlib.util
from functools import cached_property
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan, KVCacheSpec, Refusal
from hardpoint.interfaces.errors import BackendUnavailable, CapabilityRefused, InvalidBatch
from hardpoint.triton.capabilities import triton_attention_capabilities
from hardpoint.triton.choice import AttentionChoice, attention_choice
from hardpoint.triton.launch import Launches, interpreter_is_on
from hardpoint.triton.step import MAX_PROMPTS, OpenCache, Step, StepBuilder
from hardpoint.triton.tiles import COPY_WORDS, TileTarget
from hardpoint.worker.attention_checks import check_block_pairs, check_layer_cache, check_per_head, check_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hardpoint.interfaces.backend import Device
    from hardpoint.interfaces.batch import Int32Array, StepBatch
    from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionRequest


_MAX_RECENT = 8
"""Plans whose launches are found by identity: those of a model's KV cache groups."""


class TritonAttention(AttentionBackend):
    """Paged attention: prefill, chunked prefill, decode and mixes of them; batch-invariant.

    Args:
        device: where tensors are; kernels are compiled for the device that torch calls `device.torch_device`.
        claims: what the backend claims of its attention, within `triton_attention_capabilities`.
        target: facts about the device; None to ask Triton's driver at the first step.
        choice: how these kernels were chosen, for the plans' notes; None to choose from those of every backend.

    Raises:
        CapabilityRefused: triton is not installed.
        ConfigError: the environment asks for other kernels.
    """

    def __init__(
        self,
        device: Device,
        claims: AttentionCapabilities | None = None,
        target: TileTarget | None = None,
        choice: AttentionChoice | None = None,
    ) -> None:
        if importlib.util.find_spec("triton") is None:
            raise CapabilityRefused(
                f"attention in Triton was asked for on '{device.name}'",
                ["the package triton is not installed (it comes with `pip install 'hardpoint[triton]'`)"],
            )
        self._choice = choice or attention_choice()
        self._device = self._here = torch.device(device.torch_device)
        self._claims = claims or triton_attention_capabilities()
        self._given_target = target
        self._launches: dict[AttentionRequest, Launches] = {}
        self._recent: list[tuple[AttentionPlan, Launches]] = []
        self._captured: list[StepBuilder] = []

    def capabilities(self) -> AttentionCapabilities:
        """Return what these kernels do."""
        return self._claims

    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        """Return the cache's shape and block size, or why the request cannot be served."""
        claims = self.capabilities()
        if reasons := claims.explain(request):
            return Refusal(reasons)
        first = request.layers[0]
        spec = KVCacheSpec(
            num_layers=len(request.layers),
            block_size=request.block_size or claims.default_block_size,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            dtype=request.kv_dtype,
        )
        how = "kernels run in Triton's interpreter" if interpreter_is_on() else "kernels are compiled by Triton"
        return AttentionPlan(request, spec, graph_level=claims.graph_level, notes=(f"attention: {self._choice}", how))

    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> Step:
        """Return the step's metadata, on their way to the device; raises InvalidBatch when its arrays do not fit together."""
        captured = next((builder for builder in self._captured if builder.plan is plan), None) or next(
            (builder for builder in self._captured if builder.plan == plan), None
        )
        if captured is not None:
            return captured.build(batch)
        return self._launches_of(plan).steps(plan).build(batch)

    def begin_capture(self, plan: AttentionPlan, max_num_seqs: int) -> None:
        """Allocate static metadata: from here on all steps of decodes have theirs at the same addresses."""
        builder = self._launches_of(plan).steps(plan)
        builder.reserve(max_num_seqs)
        self._captured = [*(other for other in self._captured if other is not builder), builder]

    def begin_mixed_capture(self, plan: AttentionPlan, max_num_seqs: int, num_tokens: Sequence[int]) -> None:
        """Allocate static metadata for steps with prompts, padded to one of these numbers of tokens."""
        self._launches_of(plan).steps(plan).reserve_mixed(max_num_seqs, num_tokens)

    def can_replay(self, plan: AttentionPlan, batch: StepBatch, num_seqs: int, num_blocks: int) -> bool:
        """Return False for a step with more prompts than captured launches have room for."""
        if batch.num_seqs - batch.num_decodes <= MAX_PROMPTS:
            return True
        return int(np.count_nonzero(np.diff(batch.query_start)[batch.num_decodes :])) <= MAX_PROMPTS

    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Step) -> None:
        """Write the step's keys and values to their slots; a slot of -1 is not written."""
        launches, spec = self._launches_of(metadata.plan), metadata.plan.kv_cache
        cache = self._opened(kv_cache, metadata, launches)
        shape = (metadata.num_tokens, spec.num_kv_heads, spec.head_dim)
        check_rows("k", k, shape, launches.dtype, kv_cache.device)
        check_rows("v", v, shape, launches.dtype, kv_cache.device)
        if metadata.num_tokens:
            launches.write_kv(layer, k, v, cache, metadata)

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Step,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Compute attention of the step's queries over their sequences' caches into `out`.

        All keys and values are read from the cache. Rows of tokens that belong to no sequence (padding) are left as they are.
        """
        launches, numbers = self._launches_of(metadata.plan), metadata.plan.request.layers[layer]
        cache = self._opened(kv_cache, metadata, launches)
        shape = (metadata.num_tokens, numbers.num_heads, numbers.head_dim)
        check_rows("q", q, shape, launches.dtype, kv_cache.device)
        check_rows("out", out, shape, launches.dtype, kv_cache.device)
        check_per_head("sinks", sinks, numbers.sinks, numbers.num_heads, kv_cache.device)
        check_per_head("alibi_slopes", alibi_slopes, numbers.alibi, numbers.num_heads, kv_cache.device)
        metadata.cache = None  # nothing of the step outlives the cache
        launches.forward(layer, q, cache, metadata, out, sinks, alibi_slopes)

    def copy_blocks(self, kv_cache: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers; raises InvalidBatch, with nothing copied, for a block outside.

        Pairs may be copied in any order unless one reads what another writes: then they are copied one after the other.
        """
        if not len(pairs):
            return
        _check_copy(kv_cache, kv_cache, pairs)
        chained = np.intersect1d(pairs[:, 0], pairs[:, 1]).size
        for some in np.split(pairs, len(pairs)) if chained else [pairs]:
            self._copy(kv_cache, kv_cache, some)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers from one cache to another; raises InvalidBatch as copy_blocks does.

        Between the device and pinned memory of the host one kernel reads and writes both, and the call does not wait for it. Other
        memory of the host is copied block by block.
        """
        if len(pairs):
            _check_copy(source, destination, pairs)
            self._copy(source, destination, pairs)

    def _copy(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        if self._reaches(source) and self._reaches(destination):
            device_pairs = torch.from_numpy(np.ascontiguousarray(pairs, np.int32)).to(self._device, copy=True)
            words, planes = source[0, 0, 0].numel() * source.element_size() // 8, source.shape[0] * source.shape[1]
            grid = (len(pairs), planes, -(-words // COPY_WORDS))
            from hardpoint.triton import kernels

            kernels.copy_blocks[grid](
                source.view(torch.int64),
                destination.view(torch.int64),
                device_pairs,
                source.shape[2],
                destination.shape[2],
                words,
                WORDS=COPY_WORDS,
            )
        else:
            for one, other in pairs.tolist():
                destination[:, :, other].copy_(source[:, :, one])

    def _reaches(self, tensor: Tensor) -> bool:
        """Return whether kernels can read and write the tensor: on the device, or pinned on the host."""
        return tensor.device.type == self._device.type or tensor.is_pinned()

    @cached_property
    def _target(self) -> TileTarget:
        return self._given_target or _ask_driver(self._device)

    def _launches_of(self, plan: AttentionPlan) -> Launches:
        # A request's hash is that of all its layers: too long for each layer of each step.
        for recent, launches in self._recent:
            if recent is plan:
                return launches
        found = self._launches.get(plan.request)
        if found is None:
            found = self._launches[plan.request] = Launches(plan, self._target, self._device)
        self._recent = [(plan, found), *self._recent[: _MAX_RECENT - 1]]
        return found

    def _opened(self, kv_cache: Tensor, step: Step, launches: Launches) -> OpenCache:
        """Return a layer's cache as its kernels take it; raises InvalidBatch for one that is not the plan's, or too small for the step."""
        cache = step.cache
        if cache is None or cache.whole is not kv_cache:
            spec, device = step.plan.kv_cache, kv_cache.device
            if device != self._here and device.type == self._device.type:
                self._here = (
                    device  # its index may differ; the name of its type takes torch longer than all other checks
                )
            check_layer_cache(
                kv_cache, (spec.num_kv_heads, spec.block_size, spec.head_dim), launches.kv_dtype, self._here
            )
            if step.highest_block >= kv_cache.shape[1]:
                raise InvalidBatch(
                    f"the cache has {kv_cache.shape[1]} blocks", found=f"the batch uses block {step.highest_block}"
                )
            cache = step.cache = launches.opened(kv_cache)
        return cache


def _check_copy(source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
    for cache in (source, destination):
        if cache.ndim != 6 or not cache.is_contiguous():
            raise InvalidBatch(
                "a cache is [layers, 2, blocks, kv_heads, block_size, head_dim], contiguous",
                found=f"shape {tuple(cache.shape)}, strides {cache.stride()}",
            )
    check_block_pairs(source, destination, pairs, 2)


def _ask_driver(device: torch.device) -> TileTarget:
    """Return facts about the device that kernels run on, as Triton's driver gives them.

    Raises BackendUnavailable where that cannot start: it compiles a module in C at its first use, which wheels do not bring.
    """
    if interpreter_is_on():
        return TileTarget(lanes=32, capability=0, units=1, interpreted=True)
    from triton.runtime import driver

    try:
        target = driver.active.get_current_target()
        facts: dict[str, Any] = driver.active.utils.get_device_properties(device.index or 0)
    except (RuntimeError, OSError, ImportError, AssertionError, SubprocessError) as error:
        raise BackendUnavailable(
            f"Triton cannot start its driver for {device}",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            hint=(
                "Install a C compiler (gcc or clang, or name one in CC) and Python's headers (Python.h), and let Triton write to "
                "its folder ($TRITON_CACHE_DIR, else ~/.triton)"
            ),
        ) from error
    capability = target.arch if isinstance(target.arch, int) else 0
    return TileTarget(lanes=target.warp_size, capability=capability, units=facts["multiprocessor_count"])
