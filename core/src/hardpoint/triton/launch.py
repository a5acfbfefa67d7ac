"""The launches of a plan's kernels: what is the same for a layer in every step is computed once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.triton.dispatch import Launch
from hardpoint.triton.step import Geometry, OpenCache, Step, StepBuilder
from hardpoint.triton.tiles import (
    PROGRAMS_PER_UNIT,
    SPLIT_KEYS,
    WRITE_TOKENS,
    TileTarget,
    decode_tiles,
    max_splits,
    padded,
    prefill_tiles,
)
from hardpoint.triton.work import SplitRule

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.attention import AttentionPlan
    from hardpoint.interfaces.capabilities import AttentionLayer, AttentionRequest

_LOG2_E = math.log2(math.e)
_MERGE_DIM = 64
"""Elements of a head that one program merges."""


def interpreter_is_on() -> bool:
    """Return whether Triton would interpret kernels: it reads the variable when one is decorated."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


@dataclass(frozen=True)
class KernelConstants:
    """The compile-time arguments of a layer's kernels, by name; those of a launch (warps, stages) are among them."""

    write: dict[str, Any]
    decode: dict[str, Any]
    merge: dict[str, Any]
    prefill: dict[str, Any]

    @classmethod
    def of(
        cls, request: AttentionRequest, layer: AttentionLayer, block_size: int, target: TileTarget
    ) -> KernelConstants:
        """Return the constants of a layer."""
        dim = layer.head_dim
        decode, prefill = tiles_of(request, target)
        held = kv_format(request, target)
        row = {"D": dim, "D_PAD": padded(dim)}
        marks = {"WINDOW": layer.sliding_window is not None, "SINKS": layer.sinks}
        attend = row | marks | {
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "BLOCK_SIZE": block_size,
            "SOFT_CAP": layer.soft_cap is not None,
            "ALIBI": layer.alibi,
            "KV_FORMAT": held,
            # The interpreter multiplies the bits of bfloat16 as if they were integers.
            "SINGLE": target.interpreted,
        }  # fmt: skip
        # Else the compiler tests each exponential for a result below the normal numbers, which takes scalar registers.
        options = {"allow_flush_denorm": True} if target.lanes == 64 else {}
        rule = split_rule(request, target)
        split = {"BLOCK_N": rule.block_n, "MIN_TILES": rule.min_tiles, "MAX_SPLITS": rule.max_splits}
        tokens = 64 if target.interpreted else WRITE_TOKENS
        return cls(
            write=row | {"TOKENS": tokens, "BLOCK_SIZE": block_size, "KV_FORMAT": held, "num_warps": 4},
            decode=attend
            | split
            | options
            | {"PERSISTENT": target.persistent}
            | {"BLOCK_M": decode.block_m, "num_warps": decode.warps, "num_stages": decode.stages},
            merge=marks
            | split
            | {"D": dim, "D_PART": _MERGE_DIM, "SPLITS_PAD": padded(rule.max_splits), "num_warps": 4},
            prefill=attend
            | options
            | {"BLOCK_M": prefill.block_m, "BLOCK_N": prefill.block_n}
            | {"num_warps": prefill.warps, "num_stages": prefill.stages},
        )


def kv_format(request: AttentionRequest, target: TileTarget) -> str:
    """Return how kernels read the cache: in the queries' dtype, as e4m3 by the target's instructions, or by its bits."""
    if request.kv_dtype is request.dtype:
        return "same"
    return "native" if target.converts_float8 else "bits"


def tiles_of(request: AttentionRequest, target: TileTarget) -> tuple[Any, Any]:
    """Return the tiles of decodes and of everything else; one shape for all layers, so that one list of work serves them all."""
    dim, itemsize = request.layers[0].head_dim, request.dtype.itemsize
    group = max(layer.num_heads // layer.num_kv_heads for layer in request.layers)
    unpacks = kv_format(request, target) == "bits"
    return decode_tiles(dim, group, itemsize, target), prefill_tiles(dim, itemsize, target, unpacks)


def split_rule(request: AttentionRequest, target: TileTarget) -> SplitRule:
    """Return how decodes are split."""
    block_n = tiles_of(request, target)[0].block_n
    return SplitRule(block_n, SPLIT_KEYS // block_n, max_splits(request.layers[0].num_kv_heads, target))


@dataclass(frozen=True)
class _Numbers:
    """A layer's run-time arguments: factors of logits, cap, values and what is written, and the window."""

    group: int
    scale: float
    cap: float
    value_scale: float
    window: int
    key_factor: float
    value_factor: float

    @classmethod
    def of(cls, layer: AttentionLayer, held: str) -> _Numbers:
        # The kernels leave out a power of two when they take the bits of e4m3 apart.
        exponent = 256.0 if held == "bits" else 1.0
        scale, cap = layer.scale * exponent * layer.k_scale, layer.soft_cap
        return cls(
            group=layer.num_heads // layer.num_kv_heads,
            scale=scale * _LOG2_E if cap is None else scale / cap,
            cap=0.0 if cap is None else cap * _LOG2_E,
            value_scale=exponent * layer.v_scale,
            window=layer.sliding_window or 0,
            key_factor=1 / layer.k_scale,
            value_factor=1 / layer.v_scale,
        )


@dataclass(frozen=True)
class _LayerLaunches:
    """A layer's kernels with their compile-time arguments."""

    write: Launch
    decode: Launch
    merge: Launch
    prefill: Launch

    @classmethod
    def of(cls, kernels: Any, constants: KernelConstants) -> _LayerLaunches:
        return cls(
            write=Launch(kernels.write_kv, constants.write),
            decode=Launch(kernels.decode, constants.decode),
            merge=Launch(kernels.merge, constants.merge),
            prefill=Launch(kernels.prefill, constants.prefill),
        )


class Launches:
    """Launches the kernels of one plan's layers.

    Attributes:
        dtype: of queries, keys, values and results.
        kv_dtype: of the cache.
    """

    def __init__(self, plan: AttentionPlan, target: TileTarget, device: torch.device) -> None:
        from hardpoint.triton import kernels

        request = plan.request
        self._target = target
        self._device = device
        self._spec = plan.kv_cache
        self._format = kv_format(request, target)
        self.dtype, self.kv_dtype = request.dtype.to_torch(), plan.kv_cache.dtype.to_torch()
        kinds = {
            layer: _LayerLaunches.of(kernels, KernelConstants.of(request, layer, plan.block_size, target))
            for layer in set(request.layers)
        }
        self._layers = [kinds[layer] for layer in request.layers]
        self._numbers = [_Numbers.of(layer, self._format) for layer in request.layers]
        # A grid's limit in its first dimension.
        programs = target.units * PROGRAMS_PER_UNIT if target.persistent else 2**31 - 1
        self._geometry = Geometry.of(plan, split_rule(request, target), tiles_of(request, target)[1].block_m, programs)
        self._builder: StepBuilder | None = None
        self._block_stride = self._spec.num_kv_heads * self._spec.block_size * self._spec.head_dim
        self._no_numbers = torch.zeros(4, dtype=torch.float32, device=device)

    def steps(self, plan: AttentionPlan) -> StepBuilder:
        """Return what makes the plan's metadata."""
        if self._builder is None:
            self._builder = StepBuilder(plan, self._geometry, self._device, self._target.caches_scalars)
        return self._builder

    def opened(self, kv_cache: Tensor) -> OpenCache:
        """Return a layer's cache as its kernels take it."""
        written = kv_cache if self._format == "same" else kv_cache.view(torch.uint8)
        read = written if self._format == "bits" else kv_cache
        # Keys come first, so that where they begin is where the cache does.
        values = written[1]
        return OpenCache(kv_cache, (written, values), (read, values if read is written else read[1]))

    def write_kv(self, layer: int, k: Tensor, v: Tensor, cache: OpenCache, step: Step) -> None:
        """Launch the kernel that writes keys and values to their slots."""
        launch, numbers = self._layers[layer].write, self._numbers[layer]
        launch(
            (-(-step.num_tokens // launch.constants["TOKENS"]), self._spec.num_kv_heads, 1),
            (k, v, *cache.written, step.slots),
            step.num_tokens,
            k.stride(0),
            v.stride(0),
            self._block_stride,
            numbers.key_factor,
            numbers.value_factor,
        )

    def forward(
        self,
        layer: int,
        q: Tensor,
        cache: OpenCache,
        step: Step,
        out: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        """Launch the kernels of a layer's attention: decodes, their merge, and the rest, as far as the step has them."""
        launches, numbers, kv_heads = self._layers[layer], self._numbers[layer], self._spec.num_kv_heads
        sinks = self._no_numbers if sinks is None else sinks
        slopes = self._no_numbers if slopes is None else slopes
        partials, q_stride, out_stride = step.partials, q.stride(0), out.stride(0)
        header, contexts = step.header, step.decode_contexts
        if step.programs:
            held = (partials.values, partials.state)
            launches.decode(
                (step.programs, 1, 1),
                (q, *cache.read, out, header, contexts, step.items, step.tables, *held, sinks, slopes),
                q_stride,
                out_stride,
                self._block_stride,
                kv_heads,
                partials.splits,
                numbers.scale,
                numbers.cap,
                numbers.value_scale,
                numbers.window,
            )
        if step.programs and partials.splits:
            heads = numbers.group * kv_heads
            launches.merge(
                (step.num_decodes, heads, -(-self._spec.head_dim // _MERGE_DIM)),
                (out, contexts, partials.values, partials.state, sinks),
                out_stride,
                heads,
                partials.splits,
                numbers.value_scale,
                numbers.window,
            )
        items = step.prefills.get(numbers.group)
        if items is not None:
            launches.prefill(
                (items.numel() // 2 * kv_heads, 1, 1),
                (q, *cache.read, out, header, step.contexts, step.starts, items, step.tables, sinks, slopes),
                q_stride,
                out_stride,
                self._block_stride,
                kv_heads,
                numbers.scale,
                numbers.cap,
                numbers.value_scale,
                numbers.window,
            )
