"""Times the choices that `hardpoint/triton/tiles.py` and its neighbours make, on a CUDA device, to choose them by measurement.

    python benchmarks/device_tune.py [--seconds 60] [--only attention sample ...] [--json FILE] [--quick]

The shape is Qwen3-0.6B's in bfloat16: 16 query heads over 8 heads of keys and values of 128 elements, blocks of 32 tokens, hidden 1024.

attention: `decode` and `merge` together, by tile, length of parts and programs. sample: the sampler over 151936 logits. products: what
a step of few sequences multiplies, by torch and by two simple kernels of this file. merge, norms, argmax: what is in their names.

All variants are compiled in parallel first, so that the device's time goes to measuring. A variant is compared with torch's result before
it is timed, and named with its reason where it fails. Times are medians of replayed graphs; launches of one graph read different memory
where a model's would, so that the device's caches do not hold it. `--quick` has few variants, to see that all of it runs.

Nothing here decides anything: the tables are for whoever edits `tiles.py`. What is not done when the time is over is left out, and said.
"""

# Triton's compile-time constants have upper-case names.
# ruff: noqa: N803

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from device_clock import Clock
from report import command, machine, median, number, table, write_json
from torch.nn.functional import linear, scaled_dot_product_attention

from hardpoint.triton.tiles import padded
from hardpoint.triton.work import SplitRule, decode_items

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 32
GROUP = HEADS // KV_HEADS
BLOCK_STRIDE = KV_HEADS * BLOCK_SIZE * HEAD_DIM
HIDDEN, VOCAB = 1024, 151936
WEIGHTS = {"qkv": (4096, 1024), "o": (1024, 2048), "gate-up": (6144, 1024), "down": (1024, 3072), "head": (VOCAB, 1024)}
DTYPE = torch.bfloat16
ROTATED_BYTES = 300 << 20
"""What the launches of a graph read together, at least: several times the device's caches."""
MAX_ERROR = 0.02
REPEATS = 5
UNCHECKED = "HARDPOINT_TUNE_UNCHECKED"
"""Environment variable: wrong results are timed too. For simulated devices, which compute nothing."""


# Kernels that are not (yet) of the engine.


@triton.jit
def gemv(x, weight, out, columns, K: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """Write weight [columns, K] times one row x; columns is a multiple of N_TILE."""
    n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    k = tl.arange(0, K_TILE)
    sums = tl.zeros((N_TILE, K_TILE), tl.float32)
    for start in tl.static_range(0, K, K_TILE):
        row = tl.load(x + start + k).to(tl.float32)
        sums += tl.load(weight + n[:, None] * K + start + k[None, :]).to(tl.float32) * row[None, :]
    tl.store(out + n, tl.sum(sums, 1).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def skinny(x, weight, out, rows, columns, K: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """Write x [rows, K] times the transposed weight [columns, K], for up to 16 rows."""
    m = tl.arange(0, 16)
    n = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    k = tl.arange(0, K_TILE)
    there = m < rows
    sums = tl.zeros((16, N_TILE), tl.float32)
    for start in tl.range(0, K, K_TILE):
        some = tl.load(x + m[:, None] * K + start + k[None, :], mask=there[:, None], other=0.0)
        tile = tl.load(weight + n[:, None] * K + start + k[None, :])
        sums = tl.dot(some, tl.trans(tile), sums)
    tl.store(out + m[:, None] * columns + n[None, :], sums.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=["heads", "partial_splits"])
def merge_in_turn(
    out, contexts, partial, partial_state, out_stride, heads, partial_splits, value_scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    H_TILE: tl.constexpr,
):  # fmt: skip
    """As the engine's `merge`, but whole heads, H_TILE of them, and one part after the other. The grid is (sequences, heads / H_TILE)."""
    seq = tl.program_id(0)
    head = tl.program_id(1) * H_TILE + tl.arange(0, H_TILE)
    end = tl.cdiv(tl.load(contexts + seq), BLOCK_N)
    length = tl.maximum(tl.cdiv(end, MAX_SPLITS), MIN_TILES)
    splits = tl.cdiv(end, length)
    if splits > 1:
        d = tl.arange(0, D)
        split = tl.arange(0, SPLITS_PAD)
        first = (seq.to(tl.int64) * heads + head) * partial_splits
        state = partial_state + 2 * (first[:, None] + split[None, :])
        there = (split < splits)[None, :]
        largest = tl.max(tl.load(state, mask=there, other=-1.0e30), 1)
        total = tl.zeros((H_TILE,), tl.float32)
        result = tl.zeros((H_TILE, D), tl.float32)
        for one in range(splits):
            weight = tl.exp2(tl.load(partial_state + 2 * (first + one)) - largest)
            total += weight * tl.load(partial_state + 2 * (first + one) + 1)
            result += weight[:, None] * tl.load(partial + (first + one)[:, None] * D + d[None, :])
        result = result * (value_scale / total)[:, None]
        tl.store(out + seq.to(tl.int64) * out_stride + head[:, None] * D + d[None, :], result.to(out.dtype.element_ty))


# What is launched, described without a device: workers compile it, and the parent launches it over tensors.


@dataclass(frozen=True)
class Of:
    """A tensor in a launch, by the name that a problem has it under."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One launch."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for calls that have one compiled kernel: of numbers, Triton tells apart ones and multiples of 16."""
        kinds: list[Any] = []
        for one, parameter in zip(self.arguments, kernel_of(self.kernel).params, strict=False):
            plain = parameter.do_not_specialize
            kinds.append(one.dtype if isinstance(one, Of) else (type(one), plain or one == 1, plain or one % 16 == 0))
        return repr((self.kernel, kinds, sorted(self.constants.items())))

    def launch(self, tensors: dict[str, list[torch.Tensor]], turn: int) -> None:
        """Launch over the tensors whose turn it is."""
        given = [
            tensors[one.name][turn % len(tensors[one.name])] if isinstance(one, Of) else one for one in self.arguments
        ]
        kernel_of(self.kernel)[self.grid](*given, **self.constants)


@dataclass(frozen=True)
class Variant:
    """One way to do a case's work: kernels in turn, or `work`, which is torch's."""

    section: str
    case: str
    name: str
    calls: tuple[Call, ...] = ()
    work: Callable[[dict[str, list[torch.Tensor]], int], object] | None = None


@cache
def kernel_of(name: str) -> Any:
    """Return a kernel by its name; "sample/8" is the sampler with eight bounds in a pass."""
    if name in ("gemv", "skinny", "merge_in_turn"):
        return globals()[name]
    if name.startswith("sample/"):
        return _sampler_with(int(name.removeprefix("sample/")))
    modules = {"decode": "kernels", "merge": "kernels", "sample": "sampling_kernels"}
    module = importlib.import_module(f"hardpoint.triton.{modules.get(name, 'row_kernels')}")
    return getattr(module, name)


def _sampler_with(bounds: int) -> Any:
    """Return the sampler of a copy of its module that has another number of bounds: it is a constant there."""
    original = importlib.util.find_spec("hardpoint.triton.sampling_kernels")
    assert original is not None
    assert original.origin is not None
    text = Path(original.origin).read_text()
    changed = "\n".join(
        f"BOUNDS = tl.constexpr({bounds})" if line.startswith("BOUNDS = ") else line for line in text.split("\n")
    )
    name = f"sampling_kernels_{bounds}"
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(changed)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.sample  # type: ignore[attr-defined]


class _TargetAlone:
    """What Triton asks of a driver when it compiles: workers need no context on the device, of which each would take seconds."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_call(call: Call, capability: int) -> str | None:
    """Compile a call's kernel into Triton's cache on disk; return why it failed, None if it did not."""
    from triton.runtime import driver

    driver.set_active(_TargetAlone(capability))
    try:
        given = [one.dtype if isinstance(one, Of) else one for one in call.arguments]
        kernel_of(call.kernel).warmup(*given, grid=call.grid, **call.constants)
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


# The problems: tensors of a case, what its result has to be, and the variants.


@dataclass
class Problem:
    """A case on the device.

    Attributes:
        tensors: by name, one or several that launches take in turn.
        read: bytes that one launch has to read and write, for a rate; 0 for none.
        wrong: returns what is wrong with the results of turn 0, None for nothing.
        turns: launches of one graph.
    """

    tensors: dict[str, list[torch.Tensor]]
    read: int
    wrong: Callable[[], str | None]
    turns: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A case's variants, and what makes its tensors."""

    variants: list[Variant]
    problem: Callable[[torch.device], Problem]


def _far(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return None if error < MAX_ERROR else f"wrong by {error:.3g} of the norm"


def _turns(read: int, most: int = 160) -> int:
    return min(most, max(8, -(-ROTATED_BYTES // read)))


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)


DECODE_TILES = [
    (64, 4, 5), (32, 4, 5), (128, 4, 5), (64, 4, 4), (64, 4, 3), (64, 4, 6), (32, 4, 6), (32, 2, 5), (32, 2, 6), (32, 4, 4), (64, 2, 5),
    (64, 2, 4), (64, 8, 5), (128, 4, 3), (128, 8, 5),
]  # fmt: skip
"""(keys, warps, stages); the first is what `tiles.py` has."""


def _max_splits(units: int) -> int:
    return min(64, max(8, 2 * units // KV_HEADS))


def _rule(block_n: int, split_keys: int, units: int) -> SplitRule:
    return SplitRule(block_n, split_keys // block_n, _max_splits(units))


def _decode_calls(
    sequences: int, context: int, tile: tuple[int, int, int], split_keys: int, programs: int, units: int
) -> tuple[Call, ...]:
    """Return the launches of one attention; `programs` per unit, 0 for one of each part."""
    block_n, warps, stages = tile
    rule = _rule(block_n, split_keys, units)
    splits = int(rule.splits(np.full(1, context, np.int32))[0])
    room = splits if splits > 1 else 0
    work = sequences * splits * KV_HEADS
    shared = {"BLOCK_N": block_n, "MIN_TILES": rule.min_tiles, "MAX_SPLITS": rule.max_splits, "D": HEAD_DIM}
    marks = {"WINDOW": False, "SINKS": False}
    decode = Call(
        "decode",
        (min(work, programs * units) if programs else work,),
        (
            *(Of(name, DTYPE) for name in ("q", "keys", "values", "out")),
            *(Of(name, torch.int32) for name in (f"header {splits}", "contexts", f"items {splits}", "tables")),
            *(Of(name, torch.float32) for name in ("partial", "state", "nothing", "nothing")),
            2 * HEADS * HEAD_DIM,
            HEADS * HEAD_DIM,
            BLOCK_STRIDE,
            KV_HEADS,
            room,
            HEAD_DIM**-0.5 * math.log2(math.e),
            0.0,
            1.0,
            0,
        ),
        shared
        | marks
        | {"GROUP": GROUP, "BLOCK_M": 16, "D_PAD": HEAD_DIM, "BLOCK_SIZE": BLOCK_SIZE, "SOFT_CAP": False}
        | {"ALIBI": False, "KV_FORMAT": "same", "SINGLE": False, "PERSISTENT": programs > 0}
        | {"num_warps": warps, "num_stages": stages},
    )
    return (decode, *([_merge_call(sequences, room, shared, 64, 4, padded(rule.max_splits))] if room else []))


def _merge_call(sequences: int, room: int, shared: dict[str, Any], part: int, warps: int, pad: int) -> Call:
    tensors = (
        Of("out", DTYPE),
        Of("contexts", torch.int32),
        *(Of(name, torch.float32) for name in ("partial", "state", "nothing")),
    )
    return Call(
        "merge",
        (sequences, HEADS, HEAD_DIM // part),
        (*tensors, HEADS * HEAD_DIM, HEADS, room, 1.0, 0),
        shared | {"D_PART": part, "SPLITS_PAD": pad, "WINDOW": False, "SINKS": False, "num_warps": warps},
    )


def attention_cases(units: int, quick: bool) -> Iterator[Case]:
    shapes = [(256, 540), (32, 540), (1, 540), (32, 4096), (1, 32000)]
    for sequences, context in shapes[1:3] if quick else shapes:
        case, variants, seen = f"{sequences} x {context}", [], set()
        for index, tile in enumerate(DECODE_TILES[:2] if quick else DECODE_TILES):
            # Every tile with the shortest and the longest parts, and the more likely ones with what lies between.
            for split_keys in (256, 512, 1024) if index < 3 else (256, 1024):
                for programs in (6, 4, 8, 12, 16, 0) if index < 2 else (6, 12):
                    calls = _decode_calls(sequences, context, tile, split_keys, programs, units)
                    # Where there is less work than programs, their number changes nothing.
                    key = repr([(call.key, call.grid) for call in calls])
                    if key in seen:
                        continue
                    seen.add(key)
                    how = f"{programs} programs" if programs else "not persistent"
                    name = f"{tile[0]} keys, {tile[1]} warps, {tile[2]} stages, parts of {split_keys}, {how}"
                    variants.append(Variant("attention", case, name, calls))
        yield Case(variants, lambda device, s=sequences, c=context: attention_problem(device, s, c, units))


_CACHE: dict[torch.device, torch.Tensor] = {}


def _kv_cache(device: torch.device) -> torch.Tensor:
    """Return one layer's cache for all cases, larger than the device's caches many times over."""
    if device not in _CACHE:
        _CACHE[device] = torch.empty((2, 5000, BLOCK_STRIDE), dtype=DTYPE, device=device).normal_()
    return _CACHE[device]


def attention_problem(device: torch.device, sequences: int, context: int, units: int) -> Problem:
    cache = _kv_cache(device)
    blocks = -(-context // BLOCK_SIZE)
    read = 2 * sequences * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    turns, order = _turns(read), np.random.default_rng(0).permutation(cache.shape[1]).astype(np.int32)
    tables = []
    for turn in range(turns):
        picked = order[(turn * sequences * blocks + np.arange(sequences * blocks)) % len(order)]
        tables.append(torch.from_numpy(picked.reshape(sequences, blocks)).to(device))
    most = _max_splits(units)
    tensors = {
        "q": [_random(device, sequences, 2 * HEADS, HEAD_DIM)],
        "keys": [cache[0]],
        "values": [cache[1]],
        "out": [torch.full((sequences, HEADS, HEAD_DIM), math.nan, dtype=DTYPE, device=device)],
        "contexts": [torch.full((sequences,), context, dtype=torch.int32, device=device)],
        "tables": tables,
        "partial": [torch.empty(sequences * HEADS * most * HEAD_DIM, device=device)],
        "state": [torch.empty(sequences * HEADS * most * 2, device=device)],
        "nothing": [torch.zeros(4, device=device)],
    }
    for split_keys in (256, 512, 1024):
        for block_n in (32, 64, 128):
            splits = _rule(block_n, split_keys, units).splits(np.full(sequences, context, np.int32))
            items = decode_items(splits)
            header = np.array([len(items), blocks], np.int32)
            tensors[f"header {splits[0]}"] = [torch.from_numpy(header).to(device)]
            tensors[f"items {splits[0]}"] = [torch.from_numpy(items).to(device)]
    expected = _attention(tensors["q"][0], cache, tables[0], context)
    out = tensors["out"][0]
    return Problem(tensors, read, lambda: _far(out, expected), turns)


def _attention(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, context: int) -> torch.Tensor:
    """Return torch's attention over blocks, some sequences at a time."""
    results = []
    for queries, blocks in zip(q[:, :HEADS].split(32), tables.long().split(32), strict=True):
        shape = (*blocks.shape, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        keys, values = (
            half[blocks].view(shape).transpose(1, 2).reshape(len(blocks), KV_HEADS, -1, HEAD_DIM)[:, :, :context]
            for half in cache
        )
        queries = queries[:, :, None].float()
        found = scaled_dot_product_attention(queries, keys.float(), values.float(), enable_gqa=True)
        results.append(found[:, :, 0])
    return torch.cat(results)


def merge_cases(units: int, quick: bool) -> Iterator[Case]:
    for sequences, context in [(32, 540)] if quick else [(256, 540), (1, 540), (32, 4096), (1, 32000)]:
        case, rule = f"{sequences} x {context}", _rule(64, 256, units)
        splits, most = int(rule.splits(np.full(1, context, np.int32))[0]), padded(rule.max_splits)
        shared = {"BLOCK_N": 64, "MIN_TILES": rule.min_tiles, "MAX_SPLITS": rule.max_splits, "D": HEAD_DIM}
        variants = []
        # As many rows as a plan may have parts, and as this context has, were it known when the kernel is compiled.
        for pad in dict.fromkeys((most, padded(splits))):
            for part, warps in (
                [(64, 4)] if quick else [(64, 4), (64, 2), (64, 1), (32, 1), (32, 4), (128, 4), (128, 2), (128, 1)]
            ):
                call = _merge_call(sequences, splits, shared, part, warps, pad)
                variants.append(Variant("merge", case, f"{part} elements, {warps} warps, {pad} rows", (call,)))
        for heads, warps in ((1, 1), (2, 1), (2, 2), (4, 4)):
            call = Call(
                "merge_in_turn",
                (sequences, HEADS // heads),
                (
                    Of("out", DTYPE),
                    Of("contexts", torch.int32),
                    Of("partial", torch.float32),
                    Of("state", torch.float32),
                    HEADS * HEAD_DIM,
                    HEADS,
                    splits,
                    1.0,
                ),
                shared | {"SPLITS_PAD": most, "H_TILE": heads, "num_warps": warps},
            )
            variants.append(Variant("merge", case, f"in turn, {heads} heads, {warps} warps", (call,)))
        yield Case(variants, lambda device, s=sequences, c=context, n=splits: merge_problem(device, s, c, n))


def merge_problem(device: torch.device, sequences: int, context: int, splits: int) -> Problem:
    partial = torch.randn(sequences, HEADS, splits, HEAD_DIM, device=device)
    state = torch.rand(sequences, HEADS, splits, 2, device=device) + 0.5
    weights = torch.exp(math.log(2) * (state[..., 0] - state[..., 0].amax(-1, keepdim=True)))
    expected = (partial * weights[..., None]).sum(2) / (weights * state[..., 1]).sum(2)[..., None]
    out = torch.full((sequences, HEADS, HEAD_DIM), math.nan, dtype=DTYPE, device=device)
    tensors = {
        "out": [out],
        "contexts": [torch.full((sequences,), context, dtype=torch.int32, device=device)],
        # As `decode` leaves them: in the device's cache.
        "partial": [partial],
        "state": [state],
        "nothing": [torch.zeros(4, device=device)],
    }
    read = partial.nbytes + state.nbytes + out.nbytes
    return Problem(tensors, read, lambda: _far(out, expected), 20)


SAMPLER_SHAPES = [
    (1024, 4),
    (1024, 8),
    (2048, 8),
    (2048, 16),
    (4096, 8),
    (4096, 16),
    (4096, 32),
    (8192, 16),
    (8192, 32),
]
SAMPLINGS = {
    "greedy": (0.0, 1.0, 0),
    "top_p 0.9": (1.0, 0.9, 0),
    "top_k 50, top_p 0.9": (1.0, 0.9, 50),
    "top_p 0.9, logits of bfloat16": (1.0, 0.9, 0),
    "plain": (1.0, 1.0, 0),
}


def sample_cases(quick: bool) -> Iterator[Case]:
    rows, width = (2, 3000) if quick else (256, VOCAB)
    for case in SAMPLINGS:
        variants = []
        for kernel in ("sample", "sample/8"):
            for block, warps in SAMPLER_SHAPES[:1] if quick else SAMPLER_SHAPES:
                if kernel != "sample" and block // warps > 256:
                    continue
                call = Call(
                    kernel,
                    (rows,),
                    (
                        Of("logits", torch.float32),
                        Of("step", torch.int64),
                        *(Of(name, torch.int32) for name in ("parameters", "masks")),
                        Of("biases", torch.float32),
                        Of("history", torch.int32),
                        *(Of(name, torch.int64) for name in ("last", "tokens")),
                        width,
                        rows,
                        width,
                        -(-width // 32),
                    ),
                    {"BLOCK": block, "num_warps": warps},
                )
                variants.append(Variant("sample", case, f"{kernel}, blocks of {block}, {warps} warps", (call,)))
        yield Case(variants, lambda device, c=case: sample_problem(device, rows, width, c))


def sample_problem(device: torch.device, rows: int, width: int, case: str) -> Problem:
    """The tokens have to be the definition's in some rows; greedy ones torch's in all, and other ones all those of the first variant."""
    from hardpoint.sampling import SamplingParams
    from hardpoint.sampling.random import draws, stream_key
    from hardpoint_conformance import sampling_reference

    temperature, top_p, top_k = SAMPLINGS[case]
    # Numbers of the host's generator, which is the same everywhere, for some rows; the device's for the others.
    logits = 3 * torch.randn(rows, width, device=device)
    if "bfloat16" in case:
        logits = logits.bfloat16().float()
    floats = np.array([1 / temperature if temperature else 0.0, -np.inf], np.float32).view(np.int32)
    line = [floats[0], int(top_p * 2**24), floats[1], top_k or width, 0, 0, 0, 0, -1, -1, -1, -1]
    drawn = np.array([draws(np.array([stream_key(row)], np.uint64), np.zeros(1, np.int64))[0] for row in range(rows)])
    step = np.stack([np.arange(rows), np.zeros(rows), drawn]).astype(np.int64)
    tokens = torch.full((rows,), -7, dtype=torch.int64, device=device)
    tensors = {
        "logits": [logits],
        "step": [torch.from_numpy(step).to(device)],
        "parameters": [torch.tensor([line] * rows, dtype=torch.int32, device=device)],
        "masks": [torch.zeros(4, dtype=torch.int32, device=device)],
        "biases": [torch.zeros(4, device=device)],
        "history": [torch.zeros(4, dtype=torch.int32, device=device)],
        "last": [torch.zeros(rows, dtype=torch.int64, device=device)],
        "tokens": [tokens],
    }
    expected: list[int] = []
    for row in range(2):
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=row)
        sampling = params.to_sequence_sampling(row, (0,), 0, 0, [])
        expected.append(sampling_reference.sample_row(logits[row].cpu().numpy(), sampling, []))
    known = {"all": logits.argmax(-1)} if not temperature else {}

    def wrong() -> str | None:
        if tokens[:2].tolist() != expected:
            return f"tokens {tokens[:2].tolist()}, and by definition {expected}"
        different = int((tokens != known.setdefault("all", tokens.clone())).sum())
        return f"{different} tokens are not those of the first variant" if different else None

    return Problem(tensors, logits.nbytes, wrong, 4)


GEMV_TILES = [
    (4, 1024, 4),
    (8, 512, 4),
    (8, 1024, 4),
    (8, 1024, 8),
    (16, 512, 4),
    (16, 256, 4),
    (4, 512, 2),
    (2, 1024, 2),
]
"""(columns, elements of a row at a time, warps)."""
SKINNY_TILES = [(16, 256, 4, 3), (32, 128, 4, 4), (16, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4)]
"""(columns, elements of a row at a time, warps, stages)."""


def product_cases(quick: bool) -> Iterator[Case]:
    for which, (columns, k) in list(WEIGHTS.items())[: 1 if quick else None]:
        for rows in (1, 4) if quick else (1, 4, 8, 16):
            case = f"{which} [{columns}, {k}], {rows} rows"
            variants = [Variant("products", case, "torch", work=_torch_product)]
            tensors = tuple(Of(name, DTYPE) for name in ("x", "weight", "out"))
            if rows == 1:
                for n_tile, k_tile, warps in GEMV_TILES:
                    constants = {"K": k, "N_TILE": n_tile, "K_TILE": k_tile, "num_warps": warps}
                    call = Call("gemv", (columns // n_tile,), (*tensors, columns), constants)
                    name = f"sums of [{n_tile}, {k_tile}], {warps} warps"
                    variants.append(Variant("products", case, name, (call,)))
            for n_tile, k_tile, warps, stages in SKINNY_TILES:
                constants = {"K": k, "N_TILE": n_tile, "K_TILE": k_tile, "num_warps": warps, "num_stages": stages}
                call = Call("skinny", (columns // n_tile,), (*tensors, rows, columns), constants)
                name = f"tl.dot of [{n_tile}, {k_tile}], {warps} warps, {stages} stages"
                variants.append(Variant("products", case, name, (call,)))
            yield Case(variants, lambda device, n=columns, k=k, m=rows: product_problem(device, n, k, m))


def _torch_product(tensors: dict[str, list[torch.Tensor]], turn: int) -> None:
    weight = tensors["weight"][turn % len(tensors["weight"])]
    tensors["out"][0].copy_(linear(tensors["x"][0], weight)) if turn < 0 else linear(tensors["x"][0], weight)


def product_problem(device: torch.device, columns: int, k: int, rows: int) -> Problem:
    read = columns * k * DTYPE.itemsize
    turns = _turns(read)
    weights = list(_random(device, min(turns, -(-ROTATED_BYTES // read)), columns, k).unbind(0))
    x, out = _random(device, rows, k), torch.full((rows, columns), math.nan, dtype=DTYPE, device=device)
    expected = linear(x.float(), weights[0].float())
    return Problem({"x": [x], "weight": weights, "out": [out]}, read, lambda: _far(out, expected), turns)


def norm_cases(quick: bool) -> Iterator[Case]:
    for kernel in ("rms_norm", "add_rms_norm"):
        for width, inner in ((128, HEADS), (HIDDEN, 1)):
            if kernel == "add_rms_norm" and inner > 1:
                continue
            for rows in (1, 256):
                case, variants = f"{kernel}, {rows} x {inner} x {width}", []
                names = ("x", "weight", "out") if kernel == "rms_norm" else ("x", "residual", "weight", "out")
                tensors = tuple(Of(name, DTYPE) for name in names)
                numbers = (1e-6, inner * width, width if inner > 1 else 0, inner)
                if kernel == "add_rms_norm":
                    numbers = (1e-6, width, width)
                for warps in (1, 4) if quick else (1, 2, 4, 8):
                    constants = {"N": width, "N_PAD": padded(width), "num_warps": warps}
                    call = Call(kernel, (rows * inner,), (*tensors, *numbers), constants)
                    variants.append(Variant("norms", case, f"{warps} warps", (call,)))
                yield Case(
                    variants,
                    lambda device, k=kernel, r=rows * inner, w=width: norm_problem(device, r, w, k == "add_rms_norm"),
                )


def norm_problem(device: torch.device, rows: int, width: int, adds: bool) -> Problem:
    x, weight = _random(device, rows, width), _random(device, width)
    # Added again and again in place, x must not grow; zeros are added.
    residual = _random(device, rows, width)
    x = torch.zeros_like(x) if adds else x
    source = (residual if adds else x).float()
    expected = source * torch.rsqrt(source.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    out = torch.full_like(x, math.nan)
    tensors = {"x": [x], "weight": [weight], "out": [out], "residual": [residual]}
    return Problem(tensors, 0, lambda: _far(out, expected), 40)


def argmax_cases(quick: bool) -> Iterator[Case]:
    works = {
        "float(), then argmax": lambda t, turn: t["tokens"][0].copy_(t["logits"][turn % len(t["logits"])].float().argmax(-1)),
        "argmax of bfloat16": lambda t, turn: t["tokens"][0].copy_(t["logits"][turn % len(t["logits"])].argmax(-1)),
        "float() alone": lambda t, turn: t["logits"][turn % len(t["logits"])].float(),
    }  # fmt: skip
    for rows in (1,) if quick else (1, 256):
        case = f"{rows} rows of {VOCAB}"
        variants = [Variant("argmax", case, name, work=work) for name, work in works.items()]
        yield Case(variants, lambda device, r=rows: argmax_problem(device, r))


def argmax_problem(device: torch.device, rows: int) -> Problem:
    logits = list((3 * torch.randn(1 if rows > 1 else 16, rows, VOCAB, device=device)).to(DTYPE).unbind(0))
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    best = logits[0].amax(-1)

    def wrong() -> str | None:
        found = logits[0].gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
        return None if bool((found == best).all()) else "not the highest logit"

    return Problem({"logits": logits, "tokens": [tokens]}, logits[0].nbytes, wrong, 16)


# Running it all.


def compile_all(calls: Sequence[Call], capability: int, workers: int, seconds: float) -> dict[str, str]:
    """Compile in parallel, for so long; return why by the keys of those that failed or were not reached."""
    longest = {"sample": 0, "sample/8": 0, "decode": 1}
    unique = {call.key: call for call in sorted(calls, key=lambda call: longest.get(call.kernel, 2))}
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    futures = {pool.submit(compile_call, call, capability): key for key, call in unique.items()}
    done, missing = wait(futures, timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    failed = {futures[future]: "not compiled in time" for future in missing}
    for future in done:
        try:
            reason = future.result()
        except Exception as error:
            reason = _reason(error)
        if reason is not None:
            failed[futures[future]] = reason
    return failed


def time_variant(variant: Variant, problem: Problem, clock: Clock) -> float:
    """Return the seconds of one launch, checked; raises ValueError where the result is wrong."""

    def launch(turn: int) -> None:
        if variant.work is not None:
            variant.work(problem.tensors, turn)
        for call in variant.calls:
            call.launch(problem.tensors, turn)

    def all_turns() -> None:
        for turn in range(problem.turns):
            launch(turn)

    for name in ("out", "tokens"):
        for one in problem.tensors.get(name, []):
            one.fill_(math.nan if one.is_floating_point() else -7)
    # A negative turn is the one that is compared.
    launch(-len_of_rotation(problem))
    clock.synchronize()
    wrong = None if variant.name == "float() alone" else problem.wrong()
    if wrong is not None and not os.environ.get(UNCHECKED):
        raise ValueError(wrong)
    return median(clock.seconds(all_turns, REPEATS, captured=True)) / problem.turns


def len_of_rotation(problem: Problem) -> int:
    """Return a number of turns after which every tensor is the first again."""
    return math.lcm(*(len(held) for held in problem.tensors.values()))


def print_case(rows: list[dict[str, Any]], title: str) -> None:
    """Print a table, the fastest variant first, those that failed last."""
    ordered = sorted(rows, key=lambda row: row["us"] if row["us"] is not None else math.inf)
    lines = [
        [row["variant"], number(row["us"]), "–" if row["gb_per_s"] is None else number(row["gb_per_s"]), row["note"]]
        for row in ordered
    ]
    print(f"\n{title}\n\n{table(['variant', 'µs', 'GB/s', 'note'], lines)}", flush=True)


SECTIONS = ("attention", "sample", "products", "merge", "norms", "argmax")


def all_cases(sections: Sequence[str], units: int, quick: bool) -> list[Case]:
    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "attention": lambda: attention_cases(units, quick),
        "sample": lambda: sample_cases(quick),
        "products": lambda: product_cases(quick),
        "merge": lambda: merge_cases(units, quick),
        "norms": lambda: norm_cases(quick),
        "argmax": lambda: argmax_cases(quick),
    }
    return [case for section in sections for case in makers[section]()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="nothing is begun after so long")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="few variants; to see that all of it runs")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    began = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    cases = all_cases(arguments.only, properties.multi_processor_count, arguments.quick)
    calls = [call for case in cases for variant in case.variants for call in variant.calls]
    failed = compile_all(calls, 10 * properties.major + properties.minor, arguments.workers, 0.6 * arguments.seconds)
    print(command())
    print(
        f"{properties.name}, {properties.multi_processor_count} units; {len({call.key for call in calls})} kernels compiled in"
        f" {time.monotonic() - began:.0f} s, {len(failed)} failed",
        flush=True,
    )
    clock, results = Clock(device), []
    about = machine(("hardpoint", "torch", "triton", "numpy"))

    def write() -> None:
        if arguments.json:
            found = {"command": command(), "machine": about, "device": properties.name, "results": results}
            write_json(arguments.json, found)

    torch.manual_seed(0)
    left_out = 0
    for case in cases:
        rows: list[dict[str, Any]] = []
        problem = None
        for variant in case.variants:
            row = {"section": variant.section, "case": variant.case, "variant": variant.name}
            row |= {"us": None, "gb_per_s": None, "note": ""}
            if time.monotonic() - began > arguments.seconds:
                left_out += 1
                continue
            rows.append(row)
            reasons = [failed[call.key] for call in variant.calls if call.key in failed]
            try:
                if reasons:
                    raise ValueError(reasons[0])
                problem = problem or case.problem(device)
                seconds = time_variant(variant, problem, clock)
                row["us"] = 1e6 * seconds
                row["gb_per_s"] = problem.read / seconds / 1e9 if problem.read else None
            except Exception as error:
                # A variant that fails is named with its reason, and the others are measured.
                row["note"] = _reason(error)
        if rows:
            print_case(rows, f"{rows[0]['section']}: {rows[0]['case']}")
            results.extend(rows)
            write()
        problem = None
    print(f"\n{time.monotonic() - began:.0f} s; {left_out} variants were left out for time", flush=True)


if __name__ == "__main__":
    main()
