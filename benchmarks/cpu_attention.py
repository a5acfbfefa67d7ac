"""Paged attention of the CPU backend beside the machine's read bandwidth and torch.

Decode: batch 32, context 1024, 9 query and 3 key heads of 64 elements, the caches of several layers in turn, so that keys and
values come from memory. The limit is the bandwidth at which one thread reads memory, measured between the rounds; the peer is
torch, which has no paged attention: it gathers the blocks and calls its scaled_dot_product_attention.

Prefill: one prompt of 512 tokens through the attention of 30 layers of the same shape; the peer is torch's
scaled_dot_product_attention on contiguous keys and values, without any gathering.

Long contexts: decode of one sequence of 4096 and of 16384 tokens with all threads; a cache in float8_e4m3fn beside one in bfloat16, and
all threads beside one, in turns.

    python benchmarks/cpu_attention.py [--json FILE] [--rounds 7] [--threads 2]

Other programs on the same machine change the numbers. Each ratio is taken within a round, and the median of the rounds is shown;
what one thread does (its decode and the reading of memory) is timed by that thread's own CPU time, the rest by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from report import command, machine, number, table

from hardpoint.interfaces import AttentionPlan, Device, DType
from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.capabilities import AttentionLayer, AttentionRequest
from hardpoint_cpu import _native
from hardpoint_cpu.allocator import CpuAllocator
from hardpoint_cpu.attention import CpuAttention

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
DEVICE = Device(backend="cpu", index=0, name="host", torch_device="cpu", total_memory=1 << 34, driver_version="host")


@dataclass(frozen=True)
class Row:
    """One measured configuration; rates are GB/s for decode and GFLOP/s for prefill, medians over the rounds.

    Attributes:
        limit: read bandwidth of one thread in GB/s (decode only).
        of_limit: ours with one thread over the limit, median of the rounds' ratios (decode only).
        over_peer: ours with all threads over the peer with all threads, median of the rounds' ratios.
    """

    name: str
    one_thread: float
    all_threads: float
    peer: float
    over_peer: float
    limit: float | None = None
    of_limit: float | None = None


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of one call."""
    begin = clock()
    function()
    return clock() - begin


class Problem:
    """Sequences of one length over caches of several layers, blocks scattered."""

    def __init__(
        self,
        dtype: torch.dtype,
        block_size: int,
        layers: int,
        lens: list[tuple[int, int]],
        kv_dtype: DType | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        kind = DType.of(dtype)
        kv_kind = kv_dtype or kind
        layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        self.backend = CpuAttention(DEVICE)
        context = max(n for _, n in lens)
        plan = self.backend.plan(AttentionRequest((layer,), kind, kv_kind, block_size, context))
        if not isinstance(plan, AttentionPlan):
            raise SystemExit(f"the backend refuses: {plan}")
        blocks = context // block_size
        self.table = torch.randperm(len(lens) * blocks, generator=generator).view(len(lens), blocks)
        self.cache = CpuAllocator(DEVICE).empty(
            (layers, *plan.kv_cache.shape(len(lens) * blocks)[1:]), kv_kind, "kv_cache"
        )
        for cache in self.cache:
            cache.copy_(torch.randn(cache.shape, generator=generator))
        query_start = np.cumsum([0] + [m for m, _ in lens]).astype(np.int32)
        tokens = int(query_start[-1])
        self.q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.out = torch.empty_like(self.q)
        nothing = np.zeros((0, 2), dtype=np.int32)
        batch = StepBatch(
            token_ids=np.zeros(tokens, dtype=np.int64),
            positions=np.zeros(tokens, dtype=np.int64),
            slot_mapping=np.full(tokens, -1, dtype=np.int32),
            query_start=query_start,
            context_lens=np.array([n for _, n in lens], dtype=np.int32),
            block_table=self.table.int().numpy(),
            rows=np.arange(len(lens), dtype=np.int32),
            seq_ids=np.arange(len(lens), dtype=np.int64),
            num_decodes=sum(m == 1 for m, _ in lens),
            sample_rows=np.arange(len(lens), dtype=np.int32),
            sample_seq_ids=np.arange(len(lens), dtype=np.int64),
            swap_out=nothing,
            swap_in=nothing,
            copies=nothing,
            preempted=np.zeros(0, dtype=np.int64),
        )
        self.step = self.backend.prepare(plan, batch)

    def ours(self, threads: int) -> float:
        """Return the seconds that all layers take on this many threads."""
        _native.set_num_threads(threads)

        def run() -> None:
            for cache in self.cache:
                self.backend.forward(0, self.q, self.q, self.q, cache, self.step, self.out)

        return seconds(run, time.thread_time if threads == 1 else time.perf_counter)

    def gathered(self, layer: int, part: int) -> torch.Tensor:
        """Return one layer's keys (0) or values (1) as [sequences, kv_heads, context, head_dim]."""
        picked = self.cache[layer, part][self.table].transpose(1, 2)
        return picked.reshape(len(self.table), KV_HEADS, -1, HEAD_DIM)


def decode(dtype: torch.dtype, block_size: int, rounds: int, threads: int) -> Row:
    """Measure decode of 32 sequences of 1024 tokens."""
    layers, sequences, context = (12 if dtype.itemsize == 2 else 6), 32, 1024
    problem = Problem(dtype, block_size, layers, [(1, context)] * sequences)
    gigabytes = 2 * sequences * context * KV_HEADS * HEAD_DIM * dtype.itemsize / 1e9
    memory = CpuAllocator(DEVICE).empty((1 << 28,), DType.UINT8, "probe").fill_(1)

    def probe() -> float:
        elapsed = seconds(lambda: _native.read_bandwidth(memory.data_ptr(), memory.nbytes), time.thread_time)
        return memory.nbytes / 1e9 / elapsed

    def gather_and_sdpa() -> None:
        F.scaled_dot_product_attention(
            problem.q.unsqueeze(2), problem.gathered(0, 0), problem.gathered(0, 1), enable_gqa=True
        )

    one, both, peer, limit, of_limit = [], [], [], [], []
    for _ in range(rounds):
        before = probe()
        one.append(layers * gigabytes / problem.ours(1))
        limit.append(max(before, probe()))
        of_limit.append(one[-1] / limit[-1])
        both.append(layers * gigabytes / problem.ours(threads))
        peer.append(gigabytes / seconds(gather_and_sdpa))
    ratio = statistics.median(x / y for x, y in zip(both, peer, strict=True))
    median = statistics.median
    name = f"decode {DType.of(dtype)}, block {block_size}"
    return Row(name, median(one), median(both), median(peer), ratio, median(limit), median(of_limit))


def prefill(dtype: torch.dtype, rounds: int, threads: int) -> tuple[Row, float]:
    """Measure a 512-token prompt; also return the milliseconds of 30 layers on all threads."""
    layers, tokens = 30, 512
    problem = Problem(dtype, 32, layers, [(tokens, tokens)])
    gigaflop = layers * 4 * (tokens * (tokens + 1) / 2) * HEADS * HEAD_DIM / 1e9
    group = HEADS // KV_HEADS
    q = problem.q.transpose(0, 1).unsqueeze(0).contiguous()
    k, v = (problem.gathered(0, part).repeat_interleave(group, 1) for part in (0, 1))

    def sdpa() -> None:
        for _ in range(layers):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    one, both, peer = [], [], []
    for _ in range(rounds):
        one.append(gigaflop / problem.ours(1))
        both.append(gigaflop / problem.ours(threads))
        peer.append(gigaflop / seconds(sdpa))
    ratio = statistics.median(x / y for x, y in zip(both, peer, strict=True))
    median = statistics.median
    row = Row(f"prefill {DType.of(dtype)}, 512 tokens", median(one), median(both), median(peer), ratio)
    return row, gigaflop / median(both) * 1e3


def long_decode(context: int, rounds: int, threads: int) -> dict[str, float]:
    """Measure decode of one sequence in turns: medians in milliseconds of 30 layers, and medians of the rounds' ratios."""
    layers = 30
    wide = Problem(torch.bfloat16, 32, layers, [(1, context)])
    narrow = Problem(torch.bfloat16, 32, layers, [(1, context)], DType.FLOAT8_E4M3)
    both, held, one = [], [], []
    for _ in range(rounds):
        both.append(wide.ours(threads))
        held.append(narrow.ours(threads))
        one.append(wide.ours(1))
    median = statistics.median
    return {
        "context": context,
        "bfloat16 ms": median(both) * 1e3,
        "float8_e4m3fn ms": median(held) * 1e3,
        "bfloat16 / float8_e4m3fn": median(x / y for x, y in zip(both, held, strict=True)),
        "1 thread / all": median(x / y for x, y in zip(one, both, strict=True)),
    }


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=_native.num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    rows, milliseconds = [], {}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        rows.extend(decode(dtype, block_size, arguments.rounds, arguments.threads) for block_size in (16, 32))
    for dtype in (torch.bfloat16, torch.float32):
        row, milliseconds[str(DType.of(dtype))] = prefill(dtype, arguments.rounds, arguments.threads)
        rows.append(row)
    long = [long_decode(context, arguments.rounds, arguments.threads) for context in (4096, 16384)]
    _native.set_num_threads(arguments.threads)
    job = min(_native.job_seconds(5000, arguments.threads) for _ in range(5))

    header = [
        "configuration",
        "read, 1 thread",
        "ours, 1 thread",
        "of read",
        f"ours, {arguments.threads}",
        "torch",
        "ours / torch",
    ]
    print(f"$ {command()}\ninstruction set {_native.isa()}; decode in GB/s, prefill in GFLOP/s\n")
    print(
        table(
            header,
            [
                [
                    row.name,
                    number(row.limit),
                    number(row.one_thread),
                    "–" if row.of_limit is None else f"{row.of_limit:.0%}",
                    number(row.all_threads),
                    number(row.peer),
                    f"{row.over_peer:.1f}",
                ]
                for row in rows
            ],
        )
    )
    print(
        "\nattention of 30 layers, 512-token prompt: " + ", ".join(f"{k} {v:.1f} ms" for k, v in milliseconds.items())
    )
    for one in long:
        print("one sequence: " + ", ".join(f"{name} {number(value)}" for name, value in one.items()))
    print(f"one empty job of the thread pool: {job * 1e6:.2f} µs")
    if arguments.json:
        result = {
            "command": command(),
            "machine": machine(["torch", "numpy"]),
            "instruction_set": _native.isa(),
            "threads": arguments.threads,
            "rows": [asdict(row) for row in rows],
            "prefill_30_layers_ms": milliseconds,
            "long_decode": long,
            "pool_job_seconds": job,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
