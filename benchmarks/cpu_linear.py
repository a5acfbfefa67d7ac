"""Linear layers of the CPU backend beside torch's, at the shapes of SmolLM2-135M.

    python benchmarks/cpu_linear.py [--threads 2] [--dtype bfloat16] [--rows 1 4 16 64 256 512] [--json FILE]

Every shape cycles through enough copies of its weight to exceed the caches, as the layers of a model do. The three
implementations take turns, and each is judged by its fastest round: Hardpoint's packed layer, `torch.nn.functional.linear`,
and oneDNN with weights that torch packs beforehand. GB/s counts the weight's bytes; the read bandwidth of the same number of
threads is measured in the same run.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from pathlib import Path

import report
import torch
from bandwidth import read_bandwidth
from torch import Tensor

from hardpoint_cpu import _native

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
COLD_BYTES = 96 << 20
PAUSE = 0.03
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def huge_pages(size: int) -> Tensor:
    """Return `size` bytes in huge pages where the system grants them, as the backend's allocator does."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def ours(weights: list[Tensor], x: Tensor) -> Callable[[int], None]:
    """Return a call that runs the native layer with the weight of the given index."""
    (n, k), code = weights[0].shape, CODES[x.dtype]
    size = _native.packed_bytes(n, k, code)
    arena = huge_pages(size * len(weights))
    for index, weight in enumerate(weights):
        _native.pack_weight(weight.data_ptr(), k, n, k, code, 0, 0, 1, arena.data_ptr() + index * size)
    out = huge_pages(len(x) * n * x.itemsize).view(x.dtype).view(len(x), n)
    workspace = torch.empty(_native.linear_workspace_bytes(len(x), k, code, False), dtype=torch.uint8)
    rows, base = (x.data_ptr(), k, len(x)), arena.data_ptr()
    rest = (0, 0, 0.0, out.data_ptr(), n, code, n, 0, workspace.data_ptr(), workspace.numel())

    def run(index: int) -> None:
        _native.linear((base + index * size, n, k, code, -1), *rows, *rest)

    run.memory = (arena, out, workspace, x)  # type: ignore[attr-defined]
    return run


def torch_plain(weights: list[Tensor], x: Tensor) -> Callable[[int], None]:
    """Return a call of torch.nn.functional.linear."""
    return lambda index: _drop(torch.nn.functional.linear(x, weights[index]))


def torch_packed(weights: list[Tensor], x: Tensor) -> Callable[[int], None]:
    """Return a call of oneDNN's linear layer with weights reordered for this number of rows."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, len(x)) for weight in weights]
    return lambda index: _drop(torch.ops.mkldnn._linear_pointwise(x, packed[index], None, "none", [], ""))


def _drop(_: Tensor) -> None:
    return None


def seconds_per_call(runs: dict[str, Callable[[int], None]], copies: int, rounds: int) -> dict[str, float]:
    """Return each implementation's fastest round divided by its calls; implementations take turns.

    Each turn begins after a pause, in which the other's idle threads stop spinning, and an untimed call that wakes its own.
    """
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            run(0)
            start = time.perf_counter()
            for index in range(copies):
                run(index)
            best[name] = min(best[name], (time.perf_counter() - start) / copies)
    return best


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=[str(d).removeprefix("torch.") for d in CODES], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 512])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(options.threads)
    _native.set_num_threads(options.threads)

    bandwidth = read_bandwidth(options.threads).gb_per_s
    print(f"{_native.isa()}, {options.threads} threads, {options.dtype}; read bandwidth {bandwidth:.1f} GB/s")
    print(
        f"{'layer':8} {'N x K':>12} {'rows':>5} {'us':>9} {'GB/s':>6} {'of read':>7} {'GFLOP/s':>8} {'x torch':>8} {'x packed':>8}"
    )
    results = []
    for layer in options.shapes:
        n, k = SHAPES[layer]
        size = n * k * dtype.itemsize
        for rows in options.rows:
            copies = max(1, -(-COLD_BYTES // size)) if rows <= 16 else max(1, -(-(COLD_BYTES // 6) // size))
            weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
            # As activations are held in the engine; for all systems.
            x = huge_pages(rows * k * dtype.itemsize).view(dtype).view(rows, k).copy_(torch.randn(rows, k))
            runs = {"hardpoint": ours(weights, x), "torch": torch_plain(weights, x)}
            if dtype is not torch.float16:
                runs["torch_packed"] = torch_packed(weights, x)
            with torch.inference_mode():
                best = seconds_per_call(runs, copies, options.rounds)
            t = best["hardpoint"]
            ratios = [best[peer] / t if peer in best else float("nan") for peer in ("torch", "torch_packed")]
            print(
                f"{layer:8} {f'{n} x {k}':>12} {rows:5} {t * 1e6:9.1f} {size / t / 1e9:6.1f} {size / t / 1e9 / bandwidth:7.0%} "
                f"{2 * rows * n * k / t / 1e9:8.0f} {ratios[0]:8.2f} {ratios[1]:8.2f}",
                flush=True,
            )
            results.append({"layer": layer, "n": n, "k": k, "rows": rows, "seconds": best})
    if options.json:
        document = {
            "command": report.command(),
            "machine": report.machine(("hardpoint-cpu", "torch")),
            "isa": _native.isa(),
            "threads": options.threads,
            "dtype": options.dtype,
            "read_bandwidth_gbs": bandwidth,
            "results": results,
        }
        report.write_json(options.json, document)


if __name__ == "__main__":
    main()
