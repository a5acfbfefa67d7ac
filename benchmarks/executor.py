"""What a step costs besides the model when its ranks are in processes of their own.

    python benchmarks/executor.py [--json FILE] [--rounds N] [--steps N]

The scheduler's own batches go to workers that compute nothing: through a method call in this process, and through processes of
one and two ranks. What the processes cost more than the method call is the overhead. Steps: decodes of 32 requests, whose
block tables grow as they do in service, and a prefill of 2,048 tokens. Where Ray is installed, two ranks as its actors are measured beside
them, in a cluster of this machine that is started for it. Rounds of the executors alternate. Time on the clock is what a
request waits for; processor time of the engine's thread beside it says how much of that is work and how much is waiting to be woken,
which grows with everything else that runs on the machine. The bar is held against the median of the time on the clock.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import report

from hardpoint.executor import Executor, InProcessExecutor, ProcessTransport, RemoteExecutor
from hardpoint.executor.ring import CAPACITY, RingReader, RingWriter, make_counters
from hardpoint.executor.steps import StepEncoder
from hardpoint.interfaces import StepInput, WorkerConfig, WorkerContext
from hardpoint.plugins import ENTRY_POINT_GROUP, Resolved
from hardpoint.scheduler import Scheduler, SchedulerConfig

BAR_US = 150.0
RAY_BAR_US = 1500.0
RAY = "2 ranks on Ray"
BLOCK_SIZE = 16
DECODES = 32
PREFILL = 2048
IDLE = Path(__file__).with_name("idle_backend.py")


def install(site: Path) -> Resolved:
    """Install the idle backend into a folder where this process and its ranks find it."""
    (site / IDLE.name).write_text(IDLE.read_text("utf-8"), "utf-8")
    info = site / "hardpoint_idle-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hardpoint-idle\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nidle = {IDLE.stem}\n", "utf-8")
    sys.path.insert(0, str(site))
    descriptor = import_module(IDLE.stem).hardpoint_backend()
    return Resolved(descriptor, descriptor.probe().devices[0])


def on_ray(resolved: Resolved, site: Path) -> Executor:
    """Return an executor of two actors in a cluster of this machine alone."""
    from hardpoint.executor.ray_transport import RayTransport

    # Where actors look for the idle backend; Ray hands it on.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    settings = {"address": "local", "amount": 0.5}
    executor = RemoteExecutor(RayTransport(resolved, WorkerConfig(model="", tensor_parallel_size=2), None, settings))
    executor.call("load")
    return executor


def scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_device_blocks=100_000,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            max_model_len=8192,
        )
    )


def decodes(steps: int) -> Iterator[StepInput]:
    """Yield steps of 32 decodes, contexts from 512 tokens on."""
    books, rng = scheduler(), random.Random(0)
    for _ in range(DECODES):
        books.add_request([rng.randrange(50_000) for _ in range(512)], max_tokens=7000)
    while steps:
        batch = books.schedule()
        assert batch is not None
        if batch.num_decodes == DECODES:
            steps -= 1
            yield StepInput(batch)
        books.update(np.full(len(batch.sample_rows), 7, np.int64))


def prefills(steps: int) -> Iterator[StepInput]:
    """Yield steps of one prompt of 2,048 tokens each."""
    books, rng = scheduler(), random.Random(0)
    for _ in range(steps):
        handle = books.add_request([rng.randrange(50_000) for _ in range(PREFILL)], max_tokens=10)
        batch = books.schedule()
        assert batch is not None
        assert batch.num_tokens == PREFILL
        yield StepInput(batch)
        books.update(np.full(1, 7, np.int64))
        books.abort([handle])
        books.release([handle])


SHAPES = {f"decode of {DECODES}": decodes, f"prefill of {PREFILL:,}": prefills}


def measure(executors: dict[str, Executor], rounds: int, steps: int) -> dict[str, Any]:
    """Return seconds of every step by shape and executor: on the clock, and of this thread's processor time."""
    wall: dict[tuple[str, str], list[float]] = defaultdict(list)
    processor: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for shape, make in SHAPES.items():
            for name, executor in executors.items():
                for number, step in enumerate(make(steps + 20)):
                    used, start = time.thread_time(), time.perf_counter()
                    executor.submit(step)
                    executor.collect()
                    end = time.perf_counter()
                    if number >= 20:
                        wall[shape, name].append(end - start)
                        processor[shape, name].append(time.thread_time() - used)
    return {
        shape: {
            name: {
                "median_us": statistics.median(wall[shape, name]) * 1e6,
                "p99_us": float(np.quantile(wall[shape, name], 0.99)) * 1e6,
                "fastest_us": min(wall[shape, name]) * 1e6,
                "processor_us": statistics.median(processor[shape, name]) * 1e6,
            }
            for name in executors
        }
        for shape in SHAPES
    }


def ring_costs(repeats: int = 2000) -> dict[str, dict[str, float]]:
    """Return what it costs to write a step's message once, which every further rank costs again, and to read it."""
    memory = memoryview(bytearray(CAPACITY))
    counters = make_counters(CAPACITY)
    writer, reader = RingWriter(memory, *counters), RingReader(memory, *counters)
    costs = {}
    for shape, make in SHAPES.items():
        encoder = StepEncoder()
        encoder.block_size = BLOCK_SIZE
        for step in make(3):
            parts = encoder.encode(step)
            encoder.commit()
        written, read = [], []
        for call in range(repeats):
            start = time.perf_counter()
            writer.write(2, call, parts, lambda fd: None)
            middle = time.perf_counter()
            reader.read()
            written.append(middle - start)
            read.append(time.perf_counter() - middle)
        costs[shape] = {
            "bytes": sum(map(len, parts)),
            "write_us": statistics.median(written) * 1e6,
            "read_us": statistics.median(read) * 1e6,
        }
    for fd in counters:
        os.close(fd)
    return costs


def verdicts(results: dict[str, Any]) -> list[report.Verdict]:
    found = []
    for shape, row in results.items():
        for name, limit in (("1 rank", None), ("2 ranks", BAR_US), (RAY, RAY_BAR_US)):
            if name not in row:
                continue
            overhead = row[name]["median_us"] - row["in process"]["median_us"]
            bar = f"≤ {limit:,.0f} µs" if limit else None
            metric = f"overhead of a {shape}, {name} (µs)"
            found.append(
                report.Verdict(metric, overhead, limit or BAR_US, "limit", bar, overhead <= limit if limit else None)
            )
    return found


def show(results: dict[str, Any], costs: dict[str, dict[str, float]], found: list[report.Verdict]) -> None:
    rows = [
        [f"{shape}, {name}", *(f"{values[key]:.1f}" for key in ("median_us", "p99_us", "fastest_us", "processor_us"))]
        for shape, row in results.items()
        for name, values in row.items()
    ]
    print(report.table(["one step (µs)", "median", "p99", "fastest", "processor"], rows))
    rows = [[shape, *(f"{value:,.1f}" for value in values.values())] for shape, values in costs.items()]
    print("\n" + report.table(["one message of one rank", "bytes", "write (µs)", "read (µs)"], rows))
    print("\n" + report.verdict_table(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="steps of each shape, executor and round")
    arguments = parser.parse_args()

    machine = report.machine(
        ("hardpoint", "numpy", "msgspec", "ray") if find_spec("ray") else ("hardpoint", "numpy", "msgspec")
    )
    print(f"machine: {machine['cpu']}, {machine['cores']} cores, load average {machine['load_average_at_start'][0]}")
    if machine["load_average_at_start"][0] > 1:
        print("the machine is busy: times on the clock hold waits for others")
    with tempfile.TemporaryDirectory() as site:
        resolved = install(Path(site))
        config = WorkerConfig(model="")
        context = WorkerContext(resolved.descriptor, resolved.device, config)
        executors: dict[str, Executor] = {"in process": InProcessExecutor(resolved.descriptor.worker()(context))}
        try:
            for ranks in (1, 2):
                several = WorkerConfig(model="", tensor_parallel_size=ranks)
                name = "1 rank" if ranks == 1 else f"{ranks} ranks"
                executors[name] = RemoteExecutor(ProcessTransport(resolved, several))
                executors[name].call("load")
            if find_spec("ray"):
                executors[RAY] = on_ray(resolved, Path(site))
            else:
                print("Ray is not installed: not measured (pip install ray)")
            results = measure(executors, arguments.rounds, arguments.steps)
        finally:
            for executor in executors.values():
                executor.shutdown()
    costs = ring_costs()
    found = verdicts(results)
    show(results, costs, found)
    if arguments.json:
        document = {
            "command": report.command(),
            "machine": machine
            | {"load_average_at_end": [round(value, 2) for value in os.getloadavg()], "niceness": os.nice(0)},
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "results": results,
            "ring": costs,
            "verdicts": [verdict.as_dict() for verdict in found],
        }
        report.write_json(arguments.json, document)
        print(f"\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
