"""The frame of every process that `device_engine.py` starts: a job file in, one line of JSON out, the last on stdout.

A system is made once and runs every case of its job, each `repeats` times after a run that is not counted. Cases that would begin
after `deadline_s` are left out, and one that has not ended `GRACE_S` later is given up, so that the answer has those before it.
Standard library only: it runs in environments that share nothing.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness import stdout_to_stderr, versions

GRACE_S = 30.0


class System(Protocol):
    """One engine, loaded and ready."""

    def begin(self, prompts: int, length: int, output_tokens: int) -> None:
        """A case with requests of this size follows."""

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict[str, Any]:
        """Submit all prompts at once; return `decode_window.window_of` of the run, with `first_tokens`, one id per request.

        Decoding is greedy and does not end before `output_tokens` tokens.
        """


def main(make: Callable[[dict[str, Any]], System], packages: Sequence[str]) -> None:
    """Run the job whose file is the process's argument, and print the answer."""
    started = time.monotonic()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with stdout_to_stderr() as answer:
        result: dict[str, Any] = {"versions": versions(packages), "cases": {}, "details": {}}

        def give_up() -> None:
            print(json.dumps(result), file=answer, flush=True)
            os._exit(0)

        watchdog = threading.Timer(job["deadline_s"] + GRACE_S, give_up)
        watchdog.daemon = True
        watchdog.start()
        system = make(job["options"])
        result |= {"ready_s": time.monotonic() - started, "details": getattr(system, "details", {})}
        for case in job["cases"]:
            if time.monotonic() - started > job["deadline_s"]:
                break
            result["cases"][case["name"]] = _runs(system, case, job, started + job["deadline_s"])
        watchdog.cancel()
        print(json.dumps(result), file=answer, flush=True)
    # Engines with threads and device runtimes can hang while the interpreter unwinds them, after the answer is out.
    os._exit(0)


def prompts_of(case: dict[str, Any], vocab: int, seed: int) -> list[list[int]]:
    """Return the prompts of a case: random tokens, the same for every system, and others for each run."""
    source = random.Random(f"{case['name']} {seed}")
    return [[source.randrange(vocab) for _ in range(case["length"])] for _ in range(case["prompts"])]


def _runs(system: System, case: dict[str, Any], job: dict[str, Any], end: float) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    try:
        system.begin(case["prompts"], case["length"], case["output_tokens"])
        for number in range(job["repeats"] + 1):
            gc.collect()
            begin = time.monotonic()
            runs.append(system.run(prompts_of(case, job["vocab"], number), case["output_tokens"]))
            if time.monotonic() + (time.monotonic() - begin) > end:
                break
    except Exception as error:
        if not runs:
            return {"error": f"{type(error).__name__}: {error}"}
    # The first one starts what starts late; where there is no time for another, it is better than none, and says so.
    return {"runs": runs[1:] or runs, "cold": len(runs) == 1}
