"""Scheduler and block manager alone, without a model, beside vLLM's V1 scheduler in the same run.

    python benchmarks/scheduler.py [--json FILE] [--vllm-python PATH] [--rounds N]

Steady decode: one step with every request running, schedule() and update(), the arrays for the worker included. Admission:
one prompt, given as a list of int, through add_request(), schedule() and update(); cold, with its whole prefix cached by a
running request, and with its prefix cached in freed blocks. Both run in one thread and never wait, and its processor time is
what is measured, so that neighbours on a busy machine do not count. Rounds of the two systems alternate; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import report

from hardpoint.scheduler import Scheduler, SchedulerConfig

ROOT = Path(__file__).resolve().parent.parent
PEER_SCRIPT = ROOT / "benchmarks" / "peers" / "vllm_scheduler.py"
BLOCK_SIZE = 16
BUDGET = 65_536
RUNNING = (16, 64, 256, 1024)
PROMPTS = (1_024, 4_096, 32_768)
POOLS = (10_000, 100_000, 1_000_000)
POOL = 100_000
CHUNK = 16
"""Steps timed together: every sequence gets a new block, and fills one, once in this number of steps."""
KINDS = ("cold", "hit", "freed_hit")
DECODE_BAR_US = {256: 0.1, 1024: 0.1}
ADMISSION_BAR_MS = {"cold": 0.4, "hit": 0.2, "freed_hit": 0.2}


class Ours:
    """The same workloads as `peers/vllm_scheduler.py`."""

    def _scheduler(self, num_blocks: int) -> Scheduler:
        return Scheduler(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_device_blocks=num_blocks,
                max_num_seqs=1024,
                max_num_batched_tokens=BUDGET,
                max_model_len=65_536,
            )
        )

    def decode(self, running: int, steps: int, num_blocks: int) -> float:
        scheduler = self._scheduler(num_blocks)
        rng = random.Random(0)
        for _ in range(running):
            scheduler.add_request([rng.randrange(1000, 150_000) for _ in range(100)], max_tokens=60_000)
        tokens = np.full(running, 7, np.int64)
        while (batch := scheduler.schedule()) is not None and batch.num_decodes < running:
            scheduler.update(np.full(len(batch.sample_rows), 7, np.int64))
        scheduler.update(tokens)
        for _ in range(100):
            scheduler.schedule()
            scheduler.update(tokens)
        times = []
        for _ in range(steps // CHUNK):
            start = time.thread_time()
            for _ in range(CHUNK):
                scheduler.schedule()
                scheduler.update(tokens)
            times.append((time.thread_time() - start) / CHUNK)
        return statistics.median(times)

    def admission(self, tokens: int, repeats: int, num_blocks: int) -> dict[str, list[float]]:
        scheduler = self._scheduler(num_blocks)
        rng = random.Random(0)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        sampled = {count: np.full(count, 7, np.int64) for count in (1, 2)}

        def admit(prompt: list[int]) -> tuple[int, float, int]:
            start = time.thread_time()
            handle = scheduler.add_request(prompt, max_tokens=1000)
            batch = scheduler.schedule()
            assert batch is not None
            scheduler.update(sampled[len(batch.sample_rows)])
            return handle, time.thread_time() - start, batch.num_tokens

        for _ in range(repeats):
            prompt = [rng.randrange(1000, 150_000) for _ in range(tokens)]
            first, seconds, computed = admit(prompt)
            assert computed == tokens
            times["cold"].append(seconds)
            second, seconds, computed = admit(prompt)
            assert computed <= BLOCK_SIZE + 1
            times["hit"].append(seconds)
            scheduler.abort([first, second])
            scheduler.release([first, second])
            third, seconds, computed = admit(prompt)
            assert computed <= BLOCK_SIZE
            times["freed_hit"].append(seconds)
            scheduler.abort([third])
            scheduler.release([third])
        return times


class Peer:
    """vLLM's scheduler in its own environment, over a pipe."""

    def __init__(self, python: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(PEER_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.description: dict[str, str] = self._read()
        except RuntimeError:
            self.close()
            raise

    def run(self, **job: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, "block_size": BLOCK_SIZE}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise RuntimeError(lines[-1] if lines else "it ended without a word")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def find_peer(argument: str | None) -> tuple[Peer | None, str]:
    named = argument or os.environ.get("HARDPOINT_VLLM_PYTHON")
    python = Path(named) if named else ROOT / ".peers" / "vllm" / "bin" / "python"
    if not python.exists():
        return None, f"no Python at {python}; install the peer with `make peers`, or give --vllm-python"
    try:
        peer = Peer(python)
    except RuntimeError as error:
        return None, f"vLLM does not start with {python}: {error}"
    return peer, f"vLLM {peer.description['version']}"


def measure(peer: Peer | None, rounds: int) -> dict[str, Any]:
    ours = Ours()
    samples: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def admissions(tokens: int, num_blocks: int, repeats: int) -> None:
        key = (f"{tokens}", f"{num_blocks}")
        for kind, seconds in ours.admission(tokens, repeats, num_blocks).items():
            samples["admission", *key, kind, "ours"].append(statistics.median(seconds))
        if peer is not None:
            result = peer.run(kind="admission", tokens=tokens, repeats=max(3, repeats // 3), num_blocks=num_blocks)
            for kind, seconds in result.items():
                samples["admission", *key, kind, "vllm"].append(statistics.median(seconds))

    for _ in range(rounds):
        for running in RUNNING:
            seconds = ours.decode(running, 1000, POOL)
            samples["decode", f"{running}", f"{POOL}", "ours"].append(seconds)
            if peer is not None:
                steps = max(20, 20_000 // running)
                seconds = peer.run(kind="decode", running=running, steps=min(steps, 400), num_blocks=POOL)
                samples["decode", f"{running}", f"{POOL}", "vllm"].append(seconds)
        for tokens in PROMPTS:
            admissions(tokens, POOL, 9)
        for pool in POOLS:
            if pool != POOL:
                samples["decode", "256", f"{pool}", "ours"].append(ours.decode(256, 300, pool))
                admissions(PROMPTS[-1], pool, 9)
    medians: dict[str, Any] = {}
    for (*path, last), values in samples.items():
        node = medians
        for part in path:
            node = node.setdefault(part, {})
        node[last] = statistics.median(values)
    return medians


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for running, bar in DECODE_BAR_US.items():
        value = results["decode"][f"{running}"][f"{POOL}"]["ours"] * 1e6 / running
        found.append({"bar": f"decode of {running}, µs per request", "limit": bar, "value": value})
    for pool in POOLS:
        for kind, bar in ADMISSION_BAR_MS.items():
            value = results["admission"][f"{PROMPTS[-1]}"][f"{pool}"][kind]["ours"] * 1e3
            found.append(
                {"bar": f"admission of {PROMPTS[-1]:,}, {kind}, {pool:,} blocks, ms", "limit": bar, "value": value}
            )
    value = results["decode"]["256"][f"{POOLS[-1]}"]["ours"] * 1e6 / 256
    found.append({"bar": f"decode of 256, {POOLS[-1]:,} blocks, µs per request", "limit": 0.1, "value": value})
    return [{**bar, "met": bar["value"] <= bar["limit"]} for bar in found]


def ratio(pair: dict[str, float]) -> str:
    return f"{pair['vllm'] / pair['ours']:8.0f}x" if "vllm" in pair else "not measured"


def peer_value(pair: dict[str, float], scale: float) -> str:
    return f"{pair['vllm'] * scale:10.3f}" if "vllm" in pair else "         -"


def show(results: dict[str, Any], found_bars: list[dict[str, Any]]) -> None:
    print("\nSteady decode, one step (µs; per request in brackets)")
    for running in RUNNING:
        pair = results["decode"][f"{running}"][f"{POOL}"]
        each = pair["ours"] * 1e6 / running
        print(
            f"  {running:5} running   ours {pair['ours'] * 1e6:9.2f} ({each:.4f})   vllm {peer_value(pair, 1e6)}   {ratio(pair)}"
        )
    print("\nAdmission of one prompt (ms)")
    for tokens in PROMPTS:
        for kind, pair in results["admission"][f"{tokens}"][f"{POOL}"].items():
            print(
                f"  {tokens:6,} tokens, {kind:9}   ours {pair['ours'] * 1e3:8.4f}   vllm {peer_value(pair, 1e3)}   {ratio(pair)}"
            )
    print(f"\nPool size: admission of {PROMPTS[-1]:,} tokens (ms), and a decode step of 256 (µs)")
    for pool in POOLS:
        row = results["admission"][f"{PROMPTS[-1]}"][f"{pool}"]
        ours = "  ".join(f"{kind} {row[kind]['ours'] * 1e3:.4f}" for kind in KINDS)
        theirs = "  ".join(peer_value(row[kind], 1e3).strip() for kind in KINDS)
        print(
            f"  {pool:9,} blocks   {ours}  decode {results['decode']['256'][f'{pool}']['ours'] * 1e6:.2f}   vllm {theirs}"
        )
    print("\nBars")
    for bar in found_bars:
        print(f"  {'met   ' if bar['met'] else 'MISSED'}  {bar['bar']}: {bar['value']:.4f} (at most {bar['limit']})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM (or HARDPOINT_VLLM_PYTHON)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    peer, description = find_peer(arguments.vllm_python)
    print(f"peer: {description}" if peer else f"peer not measured: {description}")
    machine = report.machine(("hardpoint", "numpy"))
    print(f"machine: {machine['cpu']}, {machine['cores']} cores")
    results = measure(peer, arguments.rounds)
    if peer is not None:
        peer.close()
    found_bars = bars(results)
    show(results, found_bars)
    if arguments.json:
        document = {
            "command": report.command(),
            "machine": machine,
            "rounds": arguments.rounds,
            "peer": peer.description if peer else {"not_measured": description},
            "unit": "seconds of processor time, medians of rounds",
            "results": results,
            "bars": found_bars,
        }
        report.write_json(arguments.json, document)
        print(f"\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
