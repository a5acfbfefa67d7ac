"""The server on a CPU, beside the offline engine and beside other servers: the same requests, in turns.

    python benchmarks/serving.py [--parts offline,cost,vllm,llama,wake] [--rounds N] [--threads N] [--quick] [--json FILE]

`offline`: `hardpoint serve demo` and an offline engine of the same settings answer the same 64 requests, mixed ones (prompts of 32 to 256
tokens, answers of 64 to 128) and short ones (16 to 64, 16 to 32). `cost`: what HTTP and text cost the server's process, whose engine has a
simulated device that computes nothing, in processor time a token at several depths. `vllm`, `llama`: the same requests go to `vllm serve`
(200 streams at once) and to `llama-server` (16 at a time). `wake`: a request that wakes the demo model beside a cold start. The demo model
is in bf16 but for `llama`, where both serve the packaged file as it is stored and its weights in bf16, and `wake`.

Systems take turns at every measurement, in an order that is reversed in each round; one that waits is stopped (SIGSTOP); the median of
the ratios of neighbours is held against the bar. The client is this process. Peers that are not installed are named (`make peers`), and
the rest is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import report
from child import ChildFailed, run_script
from cpu_engine import PEERS, pin_to_cores, vllm_environment
from revisions import REQUESTS, Revision, mixed_lengths, short_lengths
from server_process import ServerProcess, System, llama_server, ours, vllm

sys.path.insert(0, str(PEERS))
import export_demo

from hardpoint.bench.statistics import summary
from hardpoint.bench.workload import Ask, Lengths, random_asks

FIRST_TOKEN_BAR_MS, THROUGHPUT_BAR, COST_BAR_US = 5.0, 0.95, 60.0
VLLM_STREAMS, VLLM_RATE_BAR, VLLM_FIRST_BAR, VLLM_GAP_BAR = 200, 1.3, 0.8, 1.0
LLAMA_STREAMS, LLAMA_RATE_BAR = 16, 3.0
WAKE_BAR = 1 / 20
COST_DEPTHS = (1, 64, 200)
COST_STEP_S = 0.02
"""Of the simulated device: long enough that the server keeps up with 200 streams, and brings each token in an event of its own."""
VLLM_OPTIONS = ("--scheduling-policy", "shortest", "--num-blocks", str((1 << 30) // (16 * 30 * 2 * 3 * 64 * 2)))
"""As much memory for keys and values as vLLM is given: blocks of 16 tokens, 30 layers, 3 heads of 64, bfloat16."""
BF16 = ("--dtype", "bfloat16", "--quantization", "none")
PARTS = ("offline", "cost", "vllm", "llama", "wake")
SIMULATED = report.REPOSITORY / "core" / "tests" / "engine"
TOKEN = "benchmark"
"""Of the control interface."""


class Run:
    """All samples of a run, by name, and what is held against the bars."""

    def __init__(self, rounds: int, threads: int, peers: Path, quick: bool) -> None:
        self.rounds, self.threads, self.peers, self.quick = rounds, threads, peers, quick
        self.cpus = pin_to_cores(threads)
        self.samples: dict[str, list[float]] = {}
        self.verdicts: list[report.Verdict] = []
        self.missing: dict[str, str] = {}

    def note(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return report.median(self.samples[name])

    def ratio(self, ours_name: str, other: str) -> float:
        """Return the median of the ratios of neighbours."""
        pairs = zip(self.samples[ours_name], self.samples[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def judge(self, label: str, ours_name: str, other: str, bar: str, meets: Callable[[float], bool]) -> None:
        """Hold the ratio of two samples against a bar."""
        ratio, name = self.ratio(ours_name, other), other.split(":")[0]
        verdict = report.Verdict(
            label, self.median(ours_name), self.median(other), name, bar, meets(ratio), paired=ratio
        )
        self.verdicts.append(verdict)

    def in_turn(self, systems: dict[str, Any], measure: Callable[[str, Any, int], None]) -> None:
        """Let each system be measured in each round, alone; `measure` is given the round's number."""
        for number in range(self.rounds):
            for name in list(systems) if number % 2 else reversed(list(systems)):
                systems[name].go_on()
                measure(name, systems[name], number)
                systems[name].stop()


def offline(run: Run) -> None:
    """Our server beside our engine without one."""
    engine, server = Revision([sys.executable], run.threads), ServerProcess(ours(run.threads, REQUESTS, *BF16))
    draw = random.Random(20240901)
    workloads = {"short": short_lengths(), "mixed": mixed_lengths()}

    def prompt(length: int) -> list[int]:
        return [draw.randrange(256, 49_000) for _ in range(length)]

    def rate(workload: str, kind: str) -> float:
        lengths = workloads[workload]
        asks = [{"prompt": prompt(length), "max_tokens": count} for length, count in lengths]
        return sum(count for _, count in lengths) / server.run(asks, stream=kind == "stream").seconds

    def measure_server(workload: str, kind: str) -> None:
        server.go_on()
        run.note(f"{kind}: {workload} rate", rate(workload, kind))
        server.stop()

    def measure_first_token(who: str) -> None:
        if who == "offline":
            run.note("offline: first token", engine.measure("first_token"))
            return
        server.go_on()
        run.note("server: first token", server.seconds_of_one(prompt(512)) * 1e3)
        server.stop()

    try:
        engine.wait_ready()
        rate("short", "stream")
        server.stop()
        for number in range(run.rounds):
            for workload in workloads:
                # The engine in the middle: each way of asking is its neighbour.
                kinds = ("stream", "whole") if number % 2 else ("whole", "stream")
                measure_server(workload, kinds[0])
                run.note(f"offline: {workload} rate", engine.measure(workload))
                measure_server(workload, kinds[1])
            for who in ("offline", "server") if number % 2 else ("server", "offline"):
                measure_first_token(who)
    finally:
        engine.close()
        server.close()
    for workload in workloads:
        for kind in ("stream", "whole"):
            label = f"{REQUESTS} {workload} requests, {kind} (tok/s)"
            mine, theirs = f"{kind}: {workload} rate", f"offline: {workload} rate"
            run.judge(label, mine, theirs, f"≥ {THROUGHPUT_BAR} ×", lambda ratio: ratio >= THROUGHPUT_BAR)
    late = statistics.median(
        a - b for a, b in zip(run.samples["server: first token"], run.samples["offline: first token"], strict=True)
    )
    run.verdicts.append(
        report.Verdict(
            f"first token of 512 (ms); {late:.1f} ms later",
            run.median("server: first token"),
            run.median("offline: first token"),
            "offline",
            f"≤ {FIRST_TOKEN_BAR_MS:g} ms later",
            late <= FIRST_TOKEN_BAR_MS,
        )
    )


def cost(run: Run) -> None:
    """Processor time of the server's process for each token, by how many streams there are."""
    sys.path.insert(0, str(SIMULATED))
    import simulated_device

    with tempfile.TemporaryDirectory() as site:
        simulated_device.install(Path(site))
        settings = {"PYTHONPATH": site, "HARDPOINT_SIMULATED_STEP": str(COST_STEP_S)}
        server = ServerProcess(ours(1, 256, "--backend", simulated_device.NAME, **settings))
        tokens = 32 if run.quick else 200
        try:
            for _ in range(run.rounds):
                for depth in COST_DEPTHS:
                    asks: list[Ask] = [{"prompt": [300 + n] * 16, "max_tokens": tokens} for n in range(depth)]
                    before = server.processor_seconds()
                    server.run(asks)
                    spent = server.processor_seconds() - before
                    run.note(f"cost: {depth}", spent / (depth * tokens) * 1e6)
        finally:
            server.close()
    for depth in COST_DEPTHS:
        value = run.median(f"cost: {depth}")
        # One stream pays for waking every thread for one token: it is shown, and the bar is for many.
        bar, met = (None, None) if depth == 1 else (f"≤ {COST_BAR_US:g}", value <= COST_BAR_US)
        run.verdicts.append(
            report.Verdict(f"HTTP and text, {depth} streams (µs of processor time a token)", value, None, "", bar, met)
        )


_WARM_UP = -1
"""Takes the place of a round's number."""


def beside(
    run: Run,
    mine: Sequence[System],
    others: Sequence[ServerProcess],
    draw: Callable[[int], Sequence[Ask]],
    concurrency: int | None,
) -> None:
    """Send the same requests to servers of ours and to others, which are warm and stopped, and note what they did.

    Each round has prompts of its own: those of the round before would be found in the prefix cache, which the others have not.

    Args:
        draw: returns the requests of a round.
    """
    streams = concurrency or len(draw(0))

    def measure(name: str, server: ServerProcess, number: int) -> None:
        found = summary(server.run(draw(number), concurrency), ())
        run.note(f"{name}: rate of {streams}", found["output_tokens_per_second"])
        run.note(f"{name}: first token of {streams}", found["ttft_seconds"]["p50"] * 1e3)
        run.note(f"{name}: gap of {streams}", found["itl_seconds"]["p99"] * 1e3)

    with ExitStack() as started:
        servers = {one.system.name: one for one in others}
        for system in mine:
            server = started.enter_context(closing(ServerProcess(system)))
            # A whole round, so that its memory was touched as that of a server that has run for a while.
            server.run(draw(_WARM_UP))
            server.stop()
            servers[system.name] = server
        run.in_turn(servers, measure)


def _drawn(seed: int, count: int, outputs: str) -> Callable[[int], Sequence[Ask]]:
    """Return what draws the requests of a round."""
    lengths = Lengths.parse("32:128"), Lengths.parse(outputs)
    return lambda number: random_asks(np.random.default_rng((seed, number + 1)), count, *lengths, chat=False)


def _some(asks: Sequence[Ask]) -> Sequence[Ask]:
    return asks[: max(len(asks) // 4, 1)]


def _judge(run: Run, mine: str, other: str, streams: int, rate: float, first: float | None, gap: float | None) -> None:
    """Hold rate, median first token and 99th percentile of the gaps against bars; None for a mere comparison."""

    def compared(label: str, key: str, factor: float | None, rising: bool) -> None:
        ours_name, theirs = f"{mine}: {key} of {streams}", f"{other}: {key} of {streams}"
        if factor is None:
            run.verdicts.append(report.Verdict(label, run.median(ours_name), run.median(theirs), other, None, None))
            return
        sign, ratio = ("≥", 1) if rising else ("≤", -1)
        run.judge(label, ours_name, theirs, f"{sign} {factor:g} ×", lambda found: (found - factor) * ratio >= 0)

    what = f"{streams} streams{mine.removeprefix('hardpoint')}"
    compared(f"{what} (tok/s)", "rate", rate, rising=True)
    compared(f"{what}, median first token (ms)", "first token", first, rising=False)
    compared(f"{what}, p99 between tokens (ms)", "gap", gap, rising=False)


def beside_vllm(run: Run) -> None:
    """200 streams at once, here and there. Compiled and eager vLLM are both tried, and the faster one is the peer."""
    exported = run_script(sys.executable, PEERS / "export_demo.py", timeout_s=600)
    streams = 24 if run.quick else VLLM_STREAMS
    draw = _drawn(7, streams, "8:16" if run.quick else "32:64")
    some = _some(draw(_WARM_UP))
    folder = run.peers / "vllm"
    with tempfile.TemporaryDirectory() as scratch:
        settings = vllm_environment(folder, run.cpus, Path(scratch)) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with ExitStack() as started:
            trials = []
            for eager in (False, True):
                server = ServerProcess(vllm(folder, exported["hf"], settings, eager=eager))
                started.callback(server.close)
                server.run(some)
                trials.append((server.run(some).seconds, server))
                server.stop()
            peer = min(trials, key=lambda trial: trial[0])[1]
            peer.go_on()
            peer.run(draw(_WARM_UP))
            peer.stop()
            mine = ours(run.threads, 256, *BF16, *VLLM_OPTIONS)
            beside(run, [mine], [peer], draw, None)
    _judge(run, mine.name, peer.system.name, streams, VLLM_RATE_BAR, VLLM_FIRST_BAR, VLLM_GAP_BAR)


def beside_llama(run: Run) -> None:
    """16 streams at a time, here and there: of the packaged file, as each serves it, and of its weights in bf16."""
    exported = run_script(sys.executable, PEERS / "export_demo.py", timeout_s=600)
    draw = _drawn(8, LLAMA_STREAMS * (1 if run.quick else 2), "8:16" if run.quick else "48:96")
    files = {"as stored": str(export_demo.packaged_model()), "in bf16": exported["gguf"]}
    options = {"as stored": (), "in bf16": BF16}
    mine = [replace(ours(run.threads, 256, *options[form]), name=f"hardpoint, {form}") for form in files]
    with ExitStack() as started:
        peers = []
        for form, file in files.items():
            system = llama_server(run.peers / "llamaserver", file, run.threads, LLAMA_STREAMS, 512)
            peer = ServerProcess(replace(system, name=f"{system.name}, {form}"))
            started.callback(peer.close)
            peer.run(_some(draw(_WARM_UP)))
            peer.stop()
            peers.append(peer)
        beside(run, mine, peers, draw, LLAMA_STREAMS)
    names = [one.system.name for one in peers]
    fastest = max(names, key=lambda name: run.median(f"{name}: rate of {LLAMA_STREAMS}"))
    # What a user gets who serves the file, beside the best that the peer makes of it; then the same weights.
    for own, other in ((mine[0].name, fastest), (mine[1].name, names[1])):
        _judge(run, own, other, LLAMA_STREAMS, LLAMA_RATE_BAR, None, None)


def wake(run: Run) -> None:
    """A request that wakes the model, whose weights lie in their source, beside a server that is started for it."""
    system = ours(run.threads, REQUESTS, "--when-asleep", "wake", "--control-port", "0", HARDPOINT_CONTROL_TOKEN=TOKEN)
    for _ in range(run.rounds):
        server = ServerProcess(system)
        try:
            run.note("cold start", server.start_s * 1e3)
            for _ in range(3):
                _sleep(server)
                run.note("wake: each", server.seconds_of_one() * 1e3)
            run.note("wake on demand", statistics.median(run.samples["wake: each"][-3:]))
        finally:
            server.close()
    run.judge(
        "a request that wakes the model (ms)",
        "wake on demand",
        "cold start",
        "≤ 1/20 ×",
        lambda ratio: ratio <= WAKE_BAR,
    )


def _sleep(server: ServerProcess) -> None:
    request = urllib.request.Request(
        f"{server.control_url()}/models/demo/sleep",
        b'{"level": 1, "tier": "source"}',
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        if b'"succeeded"' not in answer.read():
            raise ChildFailed("the model did not go to sleep")


MEASURES = {"offline": offline, "cost": cost, "vllm": beside_vllm, "llama": beside_llama, "wake": wake}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, of those above")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="few requests: shows that everything runs; the figures mean little"
    )
    parser.add_argument("--peers-dir", type=Path, default=report.REPOSITORY / ".peers", help="made by `make peers`")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    # Servers are in groups of their own, and are closed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load, start = os.getloadavg()[0], time.monotonic()
    if load > 0.5:
        print(f"warning: the machine is busy (load {load:.1f}); results will be noisy", file=sys.stderr)
    run = Run(arguments.rounds, arguments.threads, arguments.peers_dir.resolve(), arguments.quick)
    for part in parts:
        print(f"{part} ...", file=sys.stderr)
        try:
            MEASURES[part](run)
        except ChildFailed as error:
            run.missing[part] = str(error)
    print(report.verdict_table(run.verdicts))
    for part, why in run.missing.items():
        print(f"Not measured: {part}: {why}")
    for name, values in run.samples.items():
        print(f"{name}: {report.number(run.median(name))} (median of {len(values)})")
    print(f"Load at the start: {load:.1f}; {time.monotonic() - start:.0f} s in all")
    print(f"Reproduce: {report.command()}")
    if arguments.json:
        document: dict[str, Any] = {
            "benchmark": "serving",
            "command": report.command(),
            "machine": report.machine(
                ("hardpoint", "hardpoint-cpu", "torch", "fastapi", "uvicorn", "uvloop", "httptools")
            ),
            "rounds": run.rounds,
            "threads": run.threads,
            "quick": run.quick,
            "verdicts": [verdict.as_dict() for verdict in run.verdicts],
            "not_measured": run.missing,
            "samples": run.samples,
        }
        report.write_json(arguments.json, document)


if __name__ == "__main__":
    main()
