"""Paged attention of a backend on a device, beside torch's own over gathered keys and values, and the device's copy bandwidth.

    python benchmarks/device_attention.py --backend cuda [--device 0] [--repeats 20] [--json FILE]

Attention has the shape of Qwen3-0.6B: 16 query heads, 8 heads of keys and values of 128 elements, bfloat16. A case has sequences of
one length, whose blocks are scattered over a cache with more layers than fit into the device's caches; one run attends
over every layer once. Decodes are captured in a graph and replayed, as the engine does it, so that launching is not measured. GB/s
are bytes of keys and values over time. Torch's attention runs twice: over keys and values that are gathered from the blocks first, as
paged memory makes it necessary, and over such that lie together already. FlashInfer runs where it is installed, by the backend's adapter.
Results of all are compared before they are timed.

`--backend cpu --quick` shows that everything runs; its figures mean nothing and decide no bar.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_clock import Clock, copy_bandwidth, matrix_peak
from report import Verdict, command, machine, median, number, table, verdict_table, write_json
from torch.nn.functional import scaled_dot_product_attention

from hardpoint.interfaces import AttentionLayer, AttentionRequest, DType, StepBatch
from hardpoint.interfaces.attention import AttentionPlan
from hardpoint.interfaces.errors import HardpointError
from hardpoint.plugins import Resolved, resolve_backend

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
DTYPE = DType.BFLOAT16
CACHED = 512 << 20
"""Bytes of keys and values of all layers together, at least: several times the caches of devices."""

MAX_LAYERS = 16
BAR = 0.7
BARRED_SEQUENCES = 32
"""Least sequences for which the bar holds: fewer do not keep a large device busy."""

MAX_ERROR = 0.02
"""Most of |ours - theirs| / |theirs|: bfloat16 has 8 bits of mantissa, and orders of summation differ."""

CHOICE = "HARDPOINT_ATTENTION"
"""Environment variable that names the kernels of attention."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Sequences of one length; each has one query, or as many as it is long.

    Attributes:
        block_size: tokens per block; None for the backend's choice.
    """

    sequences: int
    context: int
    prefill: bool = False
    block_size: int | None = None

    @property
    def name(self) -> str:
        """As it is shown."""
        kind = "prefill" if self.prefill else "decode"
        block = "" if self.block_size is None else f", blocks of {self.block_size}"
        return f"{kind} {self.sequences} x {self.context}{block}"

    @property
    def queries(self) -> int:
        """Of each sequence."""
        return self.context if self.prefill else 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in one layer."""
        return 2 * self.sequences * self.context * KV_HEADS * HEAD_DIM * DTYPE.itemsize

    @property
    def operations(self) -> int:
        """Floating-point operations of one layer's prefill: four per visible key and element."""
        return self.sequences * 4 * (self.context * (self.context + 1) // 2) * HEADS * HEAD_DIM


def cases_of(quick: bool) -> list[Case]:
    """Return what is measured."""
    if quick:
        return [Case(2, 64), Case(1, 128, block_size=32), Case(1, 64, prefill=True)]
    decodes = [(1, 4096), (32, 512), (32, 1024), (32, 4096), (128, 1024), (256, 512), (256, 1024), (256, 4096)]
    return [
        *(Case(sequences, context) for sequences, context in decodes),
        *(Case(64, 2048, block_size=size) for size in (16, 32, 64, 128)),
        *(Case(sequences, context, prefill=True) for sequences, context in ((16, 512), (4, 2048), (1, 8192))),
    ]


class Problem:
    """A case on a device: cache, queries, and the backend's metadata for them."""

    def __init__(self, resolved: Resolved, case: Case, *, small: bool) -> None:
        """Fill a cache with random numbers; raises ValueError where the backend refuses the case."""
        self.case, self.device = case, torch.device(resolved.device.torch_device)
        generator = torch.Generator(self.device).manual_seed(0)
        layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        self.backend = resolved.descriptor.make("attention", resolved.device)
        plan = self.backend.plan(AttentionRequest((layer,), DTYPE, DTYPE, case.block_size, case.context))
        if not isinstance(plan, AttentionPlan):
            raise ValueError("; ".join(plan.reasons))
        if plan.kv_cache.axes != ("kv", "block", "head", "token", "dim"):
            raise ValueError(
                f"the cache has the axes {plan.kv_cache.axes}, over which torch's attention was not written"
            )
        self.plan = plan
        self.layers = 1 if small else min(max(1, -(-CACHED // case.kv_bytes)), MAX_LAYERS)
        blocks = -(-case.context // plan.block_size)
        order = torch.randperm(case.sequences * blocks, generator=torch.Generator().manual_seed(0))
        self.table = order.view(case.sequences, blocks).int()
        self.device_table = self.table.long().to(self.device)
        shape = (self.layers, *plan.kv_cache.shape(case.sequences * blocks)[1:])
        self.cache = torch.empty(shape, dtype=DTYPE.to_torch(), device=self.device).normal_(generator=generator)
        tokens = case.sequences * case.queries
        self.q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator, device=self.device).to(DTYPE.to_torch())
        self.out = torch.full_like(self.q, float("nan"))
        self.metadata = self.backend.prepare(plan, self._batch())

    def _batch(self) -> StepBatch:
        case, rows = self.case, np.arange(self.case.sequences, dtype=np.int32)
        tokens, nothing = case.sequences * case.queries, np.zeros((0, 2), np.int32)
        first = case.context - case.queries
        return StepBatch(
            token_ids=np.zeros(tokens, np.int64),
            positions=np.tile(np.arange(first, case.context, dtype=np.int64), case.sequences),
            slot_mapping=np.full(tokens, -1, np.int32),
            query_start=(np.arange(case.sequences + 1) * case.queries).astype(np.int32),
            context_lens=np.full(case.sequences, case.context, np.int32),
            block_table=self.table.numpy(),
            rows=rows,
            seq_ids=rows.astype(np.int64),
            num_decodes=0 if case.prefill else case.sequences,
            sample_rows=rows,
            sample_seq_ids=rows.astype(np.int64),
            swap_out=nothing,
            swap_in=nothing,
            copies=nothing,
            preempted=np.zeros(0, np.int64),
        )

    def ours(self) -> None:
        """Attend over every layer."""
        for cache in self.cache:
            self.backend.forward(0, self.q, self.q, self.q, cache, self.metadata, self.out)

    def gathered(self, layer: int) -> list[torch.Tensor]:
        """Return one layer's keys and values as [sequences, kv_heads, context, head_dim]."""
        picked = [self.cache[layer, part][self.device_table].transpose(1, 2) for part in (0, 1)]
        shape = (self.case.sequences, KV_HEADS, -1, HEAD_DIM)
        return [part.reshape(shape)[:, :, : self.case.context] for part in picked]

    def torch_attention(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return torch's attention, [sequences, heads, queries, head_dim]."""
        queries = self.q.view(self.case.sequences, self.case.queries, HEADS, HEAD_DIM).transpose(1, 2)
        return scaled_dot_product_attention(queries, keys, values, is_causal=self.case.prefill, enable_gqa=True)

    def gather_and_attend(self) -> None:
        """Torch's attention over every layer, whose blocks are gathered first."""
        for layer in range(self.layers):
            self.torch_attention(*self.gathered(layer))

    def attend_over(self, parts: list[list[torch.Tensor]]) -> Work:
        """Return torch's attention over every layer's keys and values that were gathered before."""

        def work() -> None:
            for keys, values in parts:
                self.torch_attention(keys, values)

        return work

    def check(self, found: torch.Tensor, whose: str) -> None:
        """Compare [tokens, heads, head_dim] of the last layer with torch's in float32; raises ValueError."""
        keys, values = (part.float() for part in self.gathered(self.layers - 1))
        queries = self.q.view(self.case.sequences, self.case.queries, HEADS, HEAD_DIM).transpose(1, 2).float()
        expected = scaled_dot_product_attention(queries, keys, values, is_causal=self.case.prefill, enable_gqa=True)
        expected = expected.transpose(1, 2).reshape(self.q.shape)
        error = float((found.float() - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            raise ValueError(f"{whose} is wrong by {error:.3g} of the result's norm")


@contextlib.contextmanager
def kernels(name: str) -> Iterator[None]:
    """Have backends choose these kernels where they have a choice."""
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[CHOICE]
        else:
            os.environ[CHOICE] = before


def flashinfer_work(resolved: Resolved, case: Case, *, small: bool) -> Work:
    """Return the backend's attention by FlashInfer, checked; raises ValueError where it has none, and what FlashInfer raises."""
    with kernels("flashinfer"):
        problem = Problem(resolved, case, small=small)
    if not any(note.startswith("flashinfer attends") for note in problem.plan.notes):
        raise ValueError(f"the backend {resolved.descriptor.name} does not use FlashInfer")
    problem.ours()
    problem.check(problem.out, "FlashInfer")
    return problem.ours


def measure(resolved: Resolved, clock: Clock, case: Case, repeats: int, *, small: bool) -> dict[str, Any]:
    """Return the seconds of one layer by system, each a list, or why there are none."""
    try:
        with kernels("triton"):
            problem = Problem(resolved, case, small=small)
        problem.ours()
        problem.check(problem.out, "the backend's attention")
    except (HardpointError, ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    works: dict[str, Callable[[], Work]] = {
        "hardpoint": lambda: problem.ours,
        "torch, gathering": lambda: problem.gather_and_attend,
        "torch, gathered before": lambda: problem.attend_over([problem.gathered(i) for i in range(problem.layers)]),
    }
    if find_spec("flashinfer"):
        works["flashinfer"] = lambda: flashinfer_work(resolved, case, small=small)
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, make in works.items():
        try:
            runs = clock.seconds(make(), repeats, captured=not case.prefill)
        except Exception as error:
            # A peer that fails is named with its reason, and the rest is measured.
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            seconds[name] = [run / problem.layers for run in runs]
    return {"layers": problem.layers, "block_size": problem.plan.block_size, "seconds": seconds, "failed": failed}


def amount(case: Case) -> float:
    """Return what a rate counts: gigabytes of keys and values, or teraoperations of a prefill."""
    return case.operations / 1e12 if case.prefill else case.kv_bytes / 1e9


def rate(case: Case, results: Mapping[str, Any], system: str) -> float | None:
    """Return a system's median GB/s or TFLOP/s; None where it did not run."""
    seconds = results[case.name].get("seconds", {}).get(system)
    return amount(case) / median(seconds) if seconds else None


def verdicts(cases: list[Case], results: Mapping[str, Any], limits: Mapping[str, float], held: bool) -> list[Verdict]:
    """Hold decodes against copies and peers, prefills against matrix products and peers."""
    found = []
    for case in cases:
        unit = "TFLOP/s" if case.prefill else "GB/s"
        limit = limits["matrix_operations_per_s"] / 1e12 if case.prefill else limits["copy_bytes_per_s"] / 1e9
        mine, metric = rate(case, results, "hardpoint"), f"{case.name}, {unit}"
        barred = not case.prefill and case.sequences >= BARRED_SEQUENCES
        met = mine >= BAR * limit if held and barred and mine is not None else None
        whose = "matrix peak" if case.prefill else "copies"
        found.append(Verdict(metric, mine, limit, whose, f"≥ {BAR:.2f}" if barred else None, met))
        for peer in ("torch, gathering", "torch, gathered before", "flashinfer"):
            if (theirs := rate(case, results, peer)) is not None:
                found.append(Verdict(metric, mine, theirs, peer, None, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="few small cases; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    try:
        resolved = resolve_backend(arguments.backend, device=arguments.device)
    except HardpointError as error:
        sys.exit(str(error))
    device = resolved.device
    if device.simulated:
        sys.exit(f"the device {device.index} of backend '{device.backend}' is simulated: it computes nothing")
    about = machine(("hardpoint", f"hardpoint-{device.backend}", "torch", "triton", "flashinfer-python", "numpy"))
    clock = Clock(torch.device(device.torch_device))
    held = not clock.is_host and not arguments.quick

    def measured_limits() -> dict[str, float]:
        size, width = (1 << 24, 256) if arguments.quick else (4 << 30, 8192)
        repeats = 3 if arguments.quick else 10
        return {
            "copy_bytes_per_s": copy_bandwidth(clock, size, repeats),
            "matrix_operations_per_s": matrix_peak(clock, width, repeats),
        }

    before, cases = measured_limits(), cases_of(arguments.quick)
    results = {case.name: measure(resolved, clock, case, arguments.repeats, small=arguments.quick) for case in cases}
    after = measured_limits()
    limits = {key: max(before[key], after[key]) for key in before}
    found = verdicts(cases, results, limits, held)
    problems = [f"{name}: {entry['error']}" for name, entry in results.items() if "error" in entry]
    problems += [
        f"{name}, {peer}: {reason}"
        for name, entry in results.items()
        for peer, reason in entry.get("failed", {}).items()
    ]

    print(command())
    print(
        f"{device.name}, bfloat16; copies {limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s, matrix products"
        f" {limits['matrix_operations_per_s'] / 1e12:,.1f} TFLOP/s; medians of {arguments.repeats}."
        f"{'' if held else ' THE FIGURES MEAN NOTHING.'}\n"
    )
    systems = ("hardpoint", "torch, gathering", "torch, gathered before", "flashinfer")
    rows = [[case.name, *(number(rate(case, results, system)) for system in systems)] for case in cases]
    print(table(["GB/s, prefill TFLOP/s", *systems], rows))
    print(f"\n{verdict_table(found)}")
    print("".join(f"\n{problem}" for problem in problems), end="\n" if problems else "")
    if arguments.json:
        result = {
            "command": command(),
            "simulated": False,
            "meaningful": held,
            "machine": about,
            "device": {"backend": device.backend, "index": device.index, "name": device.name},
            "limits": {"best": limits, "before": before, "after": after},
            "cases": results,
            "verdicts": [verdict.as_dict() for verdict in found],
        }
        write_json(arguments.json, result)
    ours_failed = any("error" in entry or "hardpoint" in entry["failed"] for entry in results.values())
    if ours_failed or any(verdict.met is False for verdict in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
