"""Whether the device waits for the host: the rate of a simulated device, and what the engine makes of it.

    python benchmarks/overlap.py [--json FILE] [--rounds N] [--steps N] [--baseline PATH]

The device takes 2 ms for a step, in simulated time, whatever the step is. Scheduling, booking, and the text of 256 streams are real: the
demo model's tokenizer, and a stop string to be looked for in each stream, so that every token is detokenised when it comes. The rate is
that of the steps of a run of decodes, beside the device's own, with 0, 1 and 2 steps in flight. `--baseline` gives the source tree of an
older engine (its `core/src`), which runs in a process of its own with the same interpreter. Measurements alternate, one of each in
every round, and the best of each is reported beside the median: on a busy machine every disturbance makes a step longer.

Beside it, what the loop itself costs on the host with a worker that is idle (no time, constant tokens): processor time of one step of 256
running requests, from the commands to the events, without their text, which is the clients' work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parent.parent
DEVICE = ROOT / "core" / "tests" / "engine" / "simulated_device.py"
STREAMS = 256
STEP_SECONDS = 0.002
BAR = 0.95
LOOP_BAR_US = 120.0


def _device() -> Any:
    spec = spec_from_file_location("simulated_device", DEVICE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _engine(depth: int, seconds: float, name: str) -> Any:
    from hardpoint import LLM

    os.environ["HARDPOINT_SIMULATED_DEPTH"] = str(depth)
    os.environ["HARDPOINT_SIMULATED_STEP"] = str(seconds)
    return LLM(
        "demo", backend=name, num_device_blocks=40_000, max_num_seqs=STREAMS, max_num_batched_tokens=8192, swap_space=0
    )


def _add(llm: Any, steps: int) -> None:
    from hardpoint import SamplingParams
    from hardpoint.sampling import RequestOutputKind

    params = SamplingParams(
        max_tokens=steps, ignore_eos=True, stop=["\x00never"], output_kind=RequestOutputKind.FINAL_ONLY, seed=1
    )
    for number in range(STREAMS):
        llm.engine.add_request(f"{number}", {"prompt_token_ids": [1000 + number] * 16}, params)


def rate(llm: Any, steps: int) -> float:
    """Return the decode steps per second with the text of all streams made."""
    engine = llm.engine
    _add(llm, steps)
    for _ in range(20):
        engine.step()
    before, start = engine.stats().steps, time.perf_counter()
    while engine.stats().steps < before + steps - 40:
        engine.step()
    seconds = time.perf_counter() - start
    measured = (engine.stats().steps - before) / seconds
    while engine.has_unfinished_requests():
        engine.step()
    return measured


def loop_cost(llm: Any, steps: int) -> float:
    """Return the processor time of one step of the loop alone, in seconds."""
    from hardpoint.interfaces import StepOutput

    core = llm.engine._loop.core
    worker = core.executor._worker
    _add(llm, steps)
    for _ in range(20):
        llm.engine.step()
    outputs, samples = worker._steps, StepOutput(worker._last[:STREAMS].copy() + 1000)
    submit = type(worker).submit
    type(worker).submit = lambda self, step: outputs.append((0.0, samples))
    try:
        times = []
        for _ in range((steps - 40) // 16):
            start = time.thread_time()
            for _ in range(16):
                core.advance()
                core.take_events()
            times.append((time.thread_time() - start) / 16)
    finally:
        type(worker).submit = submit
    llm.engine.abort_request([f"{number}" for number in range(STREAMS)])
    return statistics.median(times)


def serve(steps: int) -> None:
    """Answer each line on stdin, a depth or "loop", with a measurement of this process's engine."""
    device = _device()
    with tempfile.TemporaryDirectory() as site:
        device.install(Path(site))
        engines: dict[str, Any] = {}
        for line in sys.stdin:
            job = line.strip()
            if job not in engines:
                depth = 1 if job == "loop" else int(job)
                engines[job] = _engine(depth, 0.0 if job == "loop" else STEP_SECONDS, device.NAME)
            value = loop_cost(engines[job], steps) if job == "loop" else rate(engines[job], steps)
            print(json.dumps(value), flush=True)


class Measured:
    """An engine in a process of its own."""

    def __init__(self, steps: int, source: Path | None) -> None:
        environment = dict(os.environ)
        if source is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(source), str(ROOT / "benchmarks")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--steps", str(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def measure(self, job: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        value: float = json.loads(self._process.stdout.readline())
        return value

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=340)
    parser.add_argument("--baseline", type=Path, help="source tree of an older engine, its core/src")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.steps)
        return

    engines = {"now": Measured(arguments.steps, None)}
    if arguments.baseline:
        engines["baseline"] = Measured(arguments.steps, arguments.baseline)
    jobs = [("now", job) for job in ("0", "1", "2", "loop")] + ([("baseline", "0")] if arguments.baseline else [])
    samples: dict[tuple[str, str], list[float]] = {job: [] for job in jobs}
    for _ in range(arguments.rounds):
        for who, job in jobs:
            samples[who, job].append(engines[who].measure(job))
    for engine in engines.values():
        engine.close()

    device_rate = 1 / STEP_SECONDS
    print(f"device: {device_rate:.0f} steps/s, {STREAMS} streams, {arguments.rounds} rounds in turn")
    rates: dict[str, dict[str, float]] = {}
    for (who, job), values in samples.items():
        if job == "loop":
            continue
        name = f"steps in flight: {job}" if who == "now" else "baseline"
        rates[name] = {"median": statistics.median(values), "best": max(values)}
        share = {key: value / device_rate for key, value in rates[name].items()}
        print(
            f"  {name:20} {rates[name]['median']:7.1f} steps/s, {share['median']:.3f} of the device's (best {share['best']:.3f})"
        )
    loop = [value * 1e6 for value in samples["now", "loop"]]
    print(f"loop, idle worker: {statistics.median(loop):.1f} µs a step (best {min(loop):.1f})")
    shares = [rates[f"steps in flight: {depth}"]["median"] / device_rate for depth in (1, 2)]
    bars = [
        {
            "bar": "share of the device's rate with steps in flight",
            "limit": BAR,
            "value": max(shares),
            "met": max(shares) >= BAR,
        },
        {
            "bar": "loop with an idle worker, µs a step",
            "limit": LOOP_BAR_US,
            "value": statistics.median(loop),
            "met": statistics.median(loop) <= LOOP_BAR_US,
        },
    ]
    for bar in bars:
        print(f"  {'met   ' if bar['met'] else 'MISSED'}  {bar['bar']}: {bar['value']:.3f} (bar {bar['limit']})")
    if arguments.json:
        document = {
            "command": report.command(),
            "machine": report.machine(("hardpoint", "numpy", "tokenizers")),
            "device": "simulated",
            "rounds": arguments.rounds,
            "streams": STREAMS,
            "device_steps_per_second": device_rate,
            "steps_per_second": rates,
            "loop_us": {"median": statistics.median(loop), "best": min(loop)},
            "bars": bars,
        }
        report.write_json(arguments.json, document)
        print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
