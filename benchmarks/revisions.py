"""This revision beside an older one on a CPU: first token, one stream, many requests, scheduler, and the way from import to ready.

    python benchmarks/revisions.py --baseline PYTHON [--rounds N] [--starts N] [--json FILE]

`--baseline` is the command that starts the Python of an environment in which the older revision is installed. Both have the demo model
loaded, each in a process of its own that is stopped (SIGSTOP) while the other is measured. They take turns at every single measurement,
the order reversed in each round, and the median of the ratios of neighbours is held against the bar, because a machine's speed drifts.
Rates and times are by the clock; the scheduler's are processor time of its one thread. A start is a fresh process: from its beginning to
an engine that is ready.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

REQUESTS = 64
MAX_MODEL_LEN = 1024
STREAM_TOKENS = 64
START = "from hardpoint import LLM; LLM('demo', threads={threads}, max_model_len=1024)"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""As in an installation: the first process of a revision compiles its modules, and those that are measured find them compiled."""


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Attributes:
        job: what a process is asked to measure.
        higher_is_better: direction of a gain; a ratio above 1 is one either way.
        bar: least ratio.
    """

    job: str
    label: str
    higher_is_better: bool
    bar: float


METRICS = (
    Metric("first_token", "first token of 512 (ms)", False, 0.98),
    Metric("stream", "1 stream (tok/s)", True, 0.98),
    Metric("mixed", f"{REQUESTS} mixed requests (tok/s)", True, 0.98),
    Metric("scheduler_step", "scheduler, step of 256 decodes (µs)", False, 1 / 1.1),
    Metric("scheduler_request", "scheduler, admission of 1,024 tokens (µs)", False, 1 / 1.1),
    Metric("start", "import to ready (s)", False, 1 / 0.6),
    Metric("start_cpu", "import to ready, processor time (s)", False, 1 / 0.6),
)


class Jobs:
    """What is measured, in the process of one revision."""

    def __init__(self, threads: int) -> None:
        from hardpoint import LLM

        self._llm = LLM("demo", threads=threads, max_model_len=MAX_MODEL_LEN, max_num_seqs=REQUESTS)
        self._draw = random.Random(20240901)

    def _prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(256, 49_000) for _ in range(length)]

    def _seconds(self, prompts: list[list[int]], counts: list[int]) -> float:
        from hardpoint import SamplingParams

        gc.collect()
        start = time.perf_counter()
        results = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - start
        assert [len(result.outputs[0].token_ids) for result in results] == counts
        return seconds

    def first_token(self) -> float:
        return self._seconds([self._prompt(512)], [1]) * 1e3

    def stream(self) -> float:
        until_first = self._seconds([self._prompt(32)], [1])
        return (STREAM_TOKENS - 1) / (self._seconds([self._prompt(32)], [STREAM_TOKENS]) - until_first)

    def mixed(self) -> float:
        return self._rate(mixed_lengths())

    def _rate(self, lengths: list[tuple[int, int]]) -> float:
        seconds = self._seconds([self._prompt(prompt) for prompt, _ in lengths], [count for _, count in lengths])
        return sum(count for _, count in lengths) / seconds

    def short(self) -> float:
        return self._rate(short_lengths())

    def scheduler_step(self) -> float:
        from scheduler import Ours

        return Ours().decode(256, 400, 100_000) * 1e6

    def scheduler_request(self) -> float:
        from scheduler import Ours

        return statistics.median(Ours().admission(1024, 20, 10_000)["cold"]) * 1e6


def mixed_lengths() -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of requests."""
    draw = random.Random(7)
    return [(draw.randint(32, 256), draw.randint(64, 128)) for _ in range(REQUESTS)]


def short_lengths() -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of requests of which more is in coming and going, for `benchmarks/serving.py`."""
    draw = random.Random(11)
    return [(draw.randint(16, 64), draw.randint(16, 32)) for _ in range(REQUESTS)]


def serve(threads: int) -> None:
    """Answer each job on stdin with a number, warmed up."""
    jobs = Jobs(threads)
    for job in ("first_token", "stream", "mixed"):
        getattr(jobs, job)()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(jobs, line.strip())()), flush=True)


class Revision:
    """A revision: its Python, and a process of it that is stopped between measurements."""

    def __init__(self, python: list[str], threads: int) -> None:
        self._python, self._threads = python, threads
        self._process = subprocess.Popen(
            [*python, str(Path(__file__).resolve()), "--serve", "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{shlex.join(self._python)} did not start an engine (status {self._process.wait()})")
        self._signal(signal.SIGSTOP)

    def measure(self, job: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        value: float = json.loads(self._process.stdout.readline())
        self._signal(signal.SIGSTOP)
        return value

    def start(self) -> dict[str, float]:
        """Start an engine in a fresh process; return seconds by the clock and of processor time."""
        begun = time.perf_counter()
        process = subprocess.Popen([*self._python, "-c", START.format(threads=self._threads)], env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{shlex.join(self._python)} could not start an engine")
        return {"start": seconds, "start_cpu": usage.ru_utime + usage.ru_stime}

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def _in_turn(
    rounds: int, measure: Callable[[str], dict[str, float]], samples: dict[str, dict[str, list[float]]]
) -> None:
    """Measure both revisions in each round, the first one of a round being the second one of the next."""
    for number in range(rounds):
        order = ("now", "baseline") if number % 2 else ("baseline", "now")
        for who in order:
            for job, value in measure(who).items():
                samples.setdefault(job, {}).setdefault(who, []).append(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", help="command that starts the Python of an environment with an older revision")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=9, help="rounds of fresh processes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.threads)
        return
    if not arguments.baseline:
        parser.error("--baseline is needed")

    revisions = {
        "baseline": Revision(shlex.split(arguments.baseline), arguments.threads),
        "now": Revision([sys.executable], arguments.threads),
    }
    samples: dict[str, dict[str, list[float]]] = {}
    try:
        for revision in revisions.values():
            revision.wait_ready()
        for metric in METRICS:
            if not metric.job.startswith("start"):
                job = metric.job
                _in_turn(arguments.rounds, lambda who, job=job: {job: revisions[who].measure(job)}, samples)
        _in_turn(arguments.starts, lambda who: revisions[who].start(), samples)
    finally:
        for revision in revisions.values():
            revision.close()

    rows, verdicts = [], []
    for metric in METRICS:
        if metric.job not in samples:
            continue
        now, before = samples[metric.job]["now"], samples[metric.job]["baseline"]
        ratios = [(a / b) if metric.higher_is_better else (b / a) for a, b in zip(now, before, strict=True)]
        ratio = statistics.median(ratios)
        met = ratio >= metric.bar
        verdicts.append(
            {"metric": metric.label, "now": report.median(now), "baseline": report.median(before), "ratio": ratio}
            | {
                "bar": metric.bar,
                "met": met,
                "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
            }
        )
        medians = [report.number(report.median(values)) for values in (now, before)]
        rows.append([metric.label, *medians, f"{ratio:.3f}", f"≥ {metric.bar:.3f}", "met" if met else "NOT MET"])
    print(report.table(["metric", "now", "baseline", "median ratio (above 1: better)", "bar", "verdict"], rows))
    print(f"Reproduce: {report.command()}")
    if arguments.json:
        document: dict[str, Any] = {
            "benchmark": "revisions",
            "command": "python benchmarks/revisions.py --baseline PYTHON",
            "machine": report.machine(("hardpoint", "hardpoint-cpu", "torch", "numpy")),
            "rounds": arguments.rounds,
            "starts": arguments.starts,
            "threads": arguments.threads,
            "verdicts": verdicts,
            "samples": samples,
        }
        report.write_json(arguments.json, document)


if __name__ == "__main__":
    main()
