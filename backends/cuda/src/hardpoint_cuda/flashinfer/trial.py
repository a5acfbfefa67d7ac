"""The trial of FlashInfer on the device: right beside the base's kernels, and faster?

A decode step, as captured steps run it (padding included), and a step of decodes and chunks of prompts attend over one random layer, whose
unused slots and blocks are NaN. Two right results of a row differ by at most twice the conformance suite's bound
(`hardpoint_conformance.oracle`), of which only the part is taken that no kernel can avoid: with u half of the dtype's eps, p the weights,

    |one - other| <= 2 * c * u * (|one| + sum p|v|)        c = 2, and 3 with a soft cap

The sum is the base's attention over absolute values. Times are those of all layers' kernels, by the device's events, and for FlashInfer
also of its plans, which the host makes while the device waits. On a device that is the host's processor everything runs as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces import AttentionLayer, StepBatch
from hardpoint.interfaces.errors import BackendBroken

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from hardpoint.interfaces import AttentionBackend, AttentionPlan
    from hardpoint_cuda.flashinfer.wrappers import FlashInferStep, Kernels

SEQUENCES, CONTEXT, CACHED = 32, 2048, 128 << 20
"""Sequences of the decode step, most tokens of each, and most bytes of the layer's cache: more than fit into a device's caches."""
PROMPT_TOKENS = 4096
"""Tokens of prompts in the other step, about."""
PADDING = 2
"""Sequences of the decode step that are padding."""
RUNS = 10

MARGIN, TIE = 0.9, 1.02
"""FlashInfer is faster if one step takes at most MARGIN of the base's time, and none more than TIE of it."""

_FACTOR, _FACTOR_SOFT_CAP = 2.0, 3.0

Work = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds of a step's attention in all layers.

    Attributes:
        step: what was computed, human-readable.
    """

    step: str
    flashinfer: float
    base: float

    @property
    def ratio(self) -> float:
        """FlashInfer's share of the base's time."""
        return self.flashinfer / self.base

    def __str__(self) -> str:
        return f"{self.step} takes {self.flashinfer * 1e3:.3g} ms and not {self.base * 1e3:.3g}"


@dataclass(frozen=True)
class Trial:
    """Times of both steps, whose results were right."""

    times: tuple[Times, ...]

    @property
    def is_faster(self) -> bool:
        """Whether FlashInfer is clearly faster in one step, and slower in none."""
        ratios = [times.ratio for times in self.times]
        return min(ratios) <= MARGIN and max(ratios) <= TIE

    def __str__(self) -> str:
        return "; ".join(map(str, self.times))


def try_out(kernels: Kernels, base: AttentionBackend, plan: AttentionPlan, device: torch.device) -> Trial:
    """Compare and time FlashInfer's kernels beside the base's; raises BackendBroken where they disagree, and what either raises."""
    scene = Scene(base, plan, device)
    try:
        return Trial((_try_decode(kernels, scene), _try_mixture(kernels, scene)))
    finally:
        kernels.forget_captures()


class Scene:
    """Sequences in the cache of one layer, which the base has written; the rest of it is NaN."""

    def __init__(self, base: AttentionBackend, plan: AttentionPlan, device: torch.device) -> None:
        self.base, self.plan, self.device = base, plan, device
        spec, size = plan.kv_cache, plan.block_size
        per_token = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        longest = max(min(CONTEXT, CACHED // per_token // SEQUENCES, plan.request.max_context), 1)
        self.contexts = np.maximum(longest - np.arange(SEQUENCES), 1)
        blocks = -(-self.contexts // size)
        order = np.random.default_rng(0).permutation(int(blocks.sum()) + 1).astype(np.int32)
        self.table = np.zeros((SEQUENCES, blocks[0]), np.int32)
        self.table[np.arange(blocks[0]) < blocks[:, None]] = order[:-1]
        self.generator = torch.Generator(device).manual_seed(0)
        self.cache = torch.empty(spec.shape(len(order))[1:], dtype=spec.dtype.to_torch(), device=device)
        self.cache.view(torch.uint8).fill_(0xFF)
        tokens = int(self.contexts.sum())
        k, v = (self.random(tokens, spec.num_kv_heads) for _ in range(2))
        batch = self.batch(np.arange(SEQUENCES), self.contexts, decodes=0)
        base.write_kv(0, k, v, self.cache, base.prepare(plan, batch))
        self.absolute = self.cache.clone()
        bits = self.absolute[1].view(torch.uint8 if spec.dtype.itemsize == 1 else torch.int16)
        bits.bitwise_and_(torch.iinfo(bits.dtype).max if spec.dtype.itemsize == 2 else 0x7F)

    def random(self, tokens: int, heads: int) -> Tensor:
        """Return normal numbers, [tokens, heads, head_dim] in the queries' dtype."""
        shape = (tokens, heads, self.plan.kv_cache.head_dim)
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.plan.request.dtype.to_torch())

    def batch(self, which: npt.NDArray[Any], queries: npt.NDArray[Any], *, decodes: int, padding: int = 0) -> StepBatch:
        """Return the batch of some sequences' last `queries` tokens; padding has one token and no sequence, as in captured steps."""
        contexts, size = self.contexts[which], self.plan.block_size
        owner = np.repeat(which, queries)
        start = np.append(0, np.cumsum(queries))
        positions = np.arange(start[-1]) + np.repeat(contexts - queries - start[:-1], queries)
        slots = self.table[owner, positions // size] * size + positions % size
        nothing, seqs = np.zeros((0, 2), np.int32), len(which) + padding
        return StepBatch(
            token_ids=np.zeros(len(owner) + padding, np.int64),
            positions=np.append(positions, np.zeros(padding, np.int64)),
            slot_mapping=np.append(slots, np.full(padding, -1)).astype(np.int32),
            query_start=np.append(start, np.full(padding, start[-1])).astype(np.int32),
            context_lens=np.append(contexts, np.zeros(padding, np.int64)).astype(np.int32),
            block_table=self.table,
            rows=np.append(which, np.zeros(padding, np.int64)).astype(np.int32),
            seq_ids=np.arange(seqs),
            num_decodes=decodes,
            sample_rows=np.zeros(0, np.int32),
            sample_seq_ids=np.zeros(0, np.int64),
            swap_out=nothing,
            swap_in=nothing,
            copies=nothing,
            preempted=np.zeros(0, np.int64),
        )

    def nobody(self) -> StepBatch:
        """Return the batch that captured steps of as many sequences are captured with: padding alone."""
        return self.batch(np.arange(0), np.arange(0), decodes=0, padding=SEQUENCES)

    def layers(self) -> list[tuple[int, AttentionLayer, int]]:
        """Return each layer that is unlike the others: its index, its numbers, and how many are like it."""
        layers = self.plan.request.layers
        return [(layers.index(layer), layer, count) for layer, count in Counter(layers).items()]

    def attend(self, layer: int, q: Tensor, step: Any, out: Tensor, *, absolute: bool = False) -> Tensor:
        """Compute the base's attention into `out`, and return it."""
        self.base.forward(layer, q, q, q, self.absolute if absolute else self.cache, step, out)
        return out


def _try_decode(kernels: Kernels, scene: Scene) -> Times:
    """Try a step of decodes with padding, captured (where the device has graphs) when there is no sequence yet, and then replayed."""
    live = SEQUENCES - PADDING
    batch = scene.batch(np.arange(live), np.ones(live, np.int64), decodes=live, padding=PADDING)
    kernels.begin_capture(SEQUENCES)
    static = kernels.prepare(scene.nobody(), None)
    kernels.end_capture()
    name = f"a decode step of {live} sequences with up to {scene.contexts[0]} tokens"
    return _try_step(kernels, scene, batch, name, static)


def _try_mixture(kernels: Kernels, scene: Scene) -> Times:
    """Try a step of decodes and chunks of prompts."""
    decodes = SEQUENCES // 4
    chunks = -(-scene.contexts // 2)
    prompts = np.arange(decodes, SEQUENCES)
    prompts = prompts[np.cumsum(chunks[prompts]) - chunks[prompts] < PROMPT_TOKENS]
    which = np.append(np.arange(decodes), prompts)
    batch = scene.batch(which, np.append(np.ones(decodes, np.int64), chunks[prompts]), decodes=decodes)
    return _try_step(kernels, scene, batch, f"one of {decodes} decodes and {chunks[prompts].sum()} tokens of prompts")


def _try_step(
    kernels: Kernels, scene: Scene, batch: StepBatch, name: str, static: FlashInferStep | None = None
) -> Times:
    """Compare and time a step; `static` is that of its captured wrappers."""
    device, base_step = scene.device, scene.base.prepare(scene.plan, batch)
    theirs, ours = _seconds(lambda: kernels.prepare(batch, None), device, by_host=True), 0.0
    for index, layer, count in scene.layers():
        q = scene.random(batch.num_tokens, layer.num_heads)
        found, base_out = torch.zeros_like(q), torch.zeros_like(q)
        step = static or kernels.prepare(batch, None)
        attend: Work = partial(kernels.forward, index, q, scene.cache, step, found)
        attend_base: Work = partial(scene.attend, index, q, base_step, base_out)
        if static:
            kernels.prepare(scene.nobody(), None)
            attend, attend_base = _captured(attend, device), _captured(attend_base, device)
            kernels.prepare(batch, None)
        theirs += count * _seconds(attend, device)
        ours += count * _seconds(attend_base, device)
        _compare(scene, index, layer, q, found, base_step, slice(0, int(batch.query_start[-1])), name)
    return Times(name, theirs, ours)


def _compare(
    scene: Scene, index: int, layer: AttentionLayer, q: Tensor, found: Tensor, base_step: Any, rows: slice, name: str
) -> None:
    expected, size = (
        scene.attend(index, q, base_step, torch.zeros_like(q), absolute=absolute).float() for absolute in (False, True)
    )
    factor = _FACTOR if layer.soft_cap is None else _FACTOR_SOFT_CAP
    unit = torch.finfo(found.dtype).eps / 2
    bound = 2 * factor * unit * (expected.abs().amax(-1) + size.amax(-1))
    error = (found.float() - expected).abs().amax(-1)
    if not bool((error <= bound)[rows].all()):
        ratio = float((error / bound)[rows].nan_to_num(nan=torch.inf).max())
        raise BackendBroken(
            f"FlashInfer's result of {name} is not that of the other kernels",
            found=f"an error of {ratio:.3g} times its bound in {layer}",
        )


def _seconds(work: Work, device: torch.device, *, by_host: bool = False) -> float:
    """Return the median of several runs, after one that is not counted."""
    work()
    if device.type == "cpu" or by_host:
        return median(_by_host(work, device) for _ in range(RUNS))
    marks: Sequence[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return float(median(start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)))


def _by_host(work: Work, device: torch.device) -> float:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _captured(work: Work, device: torch.device) -> Work:
    """Return what replays the work's launches from a graph."""
    if device.type == "cpu":
        return work
    # Before the capture, in which nothing may be compiled.
    work()
    graph = torch.cuda.CUDAGraph()
    # The current stream is entered once more, because torch leaves the capture's in force when a capture's beginning fails.
    with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph, capture_error_mode="relaxed"):
        work()
    return graph.replay
