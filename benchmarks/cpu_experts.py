"""The experts of the CPU backend beside a loop over experts in torch, at the shapes of published mixtures.

    python benchmarks/cpu_experts.py [--threads 2] [--dtype float32] [--tokens 1 8 64] [--rounds 7] [--shapes ...] [--json FILE]

The two take turns at every single call, and each is judged by its fastest and by its median one. Every call has other tokens, which choose
other experts. GB/s counts the bytes of the weights that a call's tokens choose, once each; the read bandwidth of the same number of threads
is measured in the same run. Mixtral's experts have a quarter of their inner size, for memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import report
import torch
from bandwidth import read_bandwidth
from torch import Tensor
from torch.nn import functional

from hardpoint.interfaces import Activation, Device, DType, ExpertsProgram, ExpertsRequest
from hardpoint_cpu import _native
from hardpoint_cpu.kernels import CpuKernels

SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral 8x7B / 4": (8, 2, 4096, 3584),
}
"""(experts, experts of a token, hidden size, inner size)."""
DEVICE = Device(backend="cpu", index=0, name="host", torch_device="cpu", total_memory=1 << 40)


def ours(program: ExpertsProgram, xs: list[Tensor], logits: list[Tensor], packed: list[Tensor], index: int) -> Tensor:
    """Return the experts' sum for the tokens of the given index, natively."""
    return program.run(xs[index], logits[index], packed[0], packed[1])


def torch_loop(xs: list[Tensor], logits: list[Tensor], gate_up: Tensor, down: Tensor, top_k: int, index: int) -> Tensor:
    """Return the same as transformers computes it."""
    x = xs[index]
    shares, chosen = torch.softmax(logits[index].float(), -1).topk(top_k, -1)
    shares /= shares.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, places = torch.where(chosen == expert)
        gate, up = functional.linear(x[tokens], gate_up[expert]).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, (y * shares[tokens, places, None]).to(x.dtype))
    return out


def seconds(runs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call; the first of each is not timed."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(index)
            found[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in found.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(options.threads)
    _native.set_num_threads(options.threads)

    bandwidth = read_bandwidth(options.threads).gb_per_s
    print(f"{_native.isa()}, {options.threads} threads, {options.dtype}; read bandwidth {bandwidth:.1f} GB/s")
    rows, results = [], []
    for name, (count, top_k, hidden, inner) in ((name, SHAPES[name]) for name in options.shapes):
        request = ExpertsRequest(count, top_k, hidden, inner, Activation.SILU, DType.of(dtype), renormalise=True)
        program = CpuKernels(DEVICE).plan_experts(request)
        assert isinstance(program, ExpertsProgram)
        gate_up = (torch.randn(count, 2 * inner, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(count, hidden, inner) / inner**0.5).to(dtype)
        packed = [torch.empty(shape, dtype=dtype) for shape in program.weight_shapes()]
        program.write_gate_up(packed[0], 0, gate_up.flatten(0, 1))
        program.write_down(packed[1], 0, down.flatten(0, 1))
        for tokens in options.tokens:
            xs = [torch.randn(tokens, hidden).to(dtype) for _ in range(options.rounds + 1)]
            logits = [torch.randn(tokens, count).to(dtype) for _ in xs]
            runs: dict[str, Callable[[int], object]] = {
                "hardpoint": partial(ours, program, xs, logits, packed),
                "torch": partial(torch_loop, xs, logits, gate_up, down, top_k),
            }
            with torch.inference_mode():
                taken = seconds(runs, options.rounds)
            chosen = sum(len(one.topk(top_k, -1).indices.unique()) for one in logits[1:]) / options.rounds
            read = chosen * 3 * inner * hidden * dtype.itemsize
            best, usual = ({key: pick(times) for key, times in taken.items()} for pick in (min, report.median))
            rows.append(
                [
                    name,
                    str(tokens),
                    f"{best['hardpoint'] * 1e3:.2f}",
                    f"{usual['hardpoint'] * 1e3:.2f}",
                    f"{read / best['hardpoint'] / 1e9:.1f}",
                    f"{read / best['hardpoint'] / 1e9 / bandwidth:.0%}",
                    f"{6 * tokens * top_k * inner * hidden / best['hardpoint'] / 1e9:.0f}",
                    f"{best['torch'] / best['hardpoint']:.2f}",
                    f"{usual['torch'] / usual['hardpoint']:.2f}",
                ]
            )
            results.append({"shape": name, "tokens": tokens, "weight_bytes": read, "seconds": taken})
    header = ["experts of", "tokens", "best ms", "median ms", "GB/s", "of read", "GFLOP/s", "torch/ours best", "median"]
    print(report.table(header, rows))
    if options.json:
        report.write_json(
            options.json,
            {
                "command": report.command(),
                "machine": report.machine(("hardpoint-cpu", "torch")),
                "isa": _native.isa(),
                "dtype": options.dtype,
                "threads": options.threads,
                "read_gb_per_s": bandwidth,
                "results": results,
            },
        )


if __name__ == "__main__":
    main()
