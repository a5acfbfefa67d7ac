"""The measurement itself, the same code in every system's process, so that no system is timed in a way of its own.

A system's script calls `run(build)`. The one argument of the process is a job file (JSON, written by `cpu_engine.py`);
the answer is one line of JSON, the last on stdout. Standard library only: it runs in environments that share nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class System(Protocol):
    """One engine, loaded and ready."""

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
        """Submit all prompts at once; return exactly `output_tokens[i]` greedy token ids for `prompts[i]`."""


Build = Callable[[dict[str, Any]], System]


def run(import_system: Callable[[], Build], packages: Sequence[str]) -> None:
    """Measure one system and print the answer.

    Args:
        import_system: imports everything that the engine needs and returns its constructor, which takes the job's
            `options`. The two steps are timed apart: `import_s` and `load_s` (both in a fresh process). A job that `serves` is answered
            line by line, see `_serve`.
        packages: distributions whose versions belong beside the numbers.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with stdout_to_stderr() as answer:
        started = time.perf_counter()
        build = import_system()
        imported = time.perf_counter()
        system = build(job["options"])
        loaded = time.perf_counter()
        result: dict[str, Any] = {"import_s": imported - started, "load_s": loaded - imported}
        if job.get("serves"):
            _serve(system, job["workload"], result, answer)
        else:
            result.update(_measure(system, job["workload"]))
        result["peak_rss_mb"] = _peak_rss_bytes() / 1e6
        result["versions"] = versions(packages)
        result["details"] = getattr(system, "details", {})
        print(json.dumps(result), file=answer, flush=True)
    # Engines with worker processes and device runtimes can hang or crash while the interpreter unwinds them, after the
    # answer is out; the parent removes the process group.
    os._exit(0)


def _measure(system: System, workload: dict[str, Any]) -> dict[str, Any]:
    _warm_up(system, workload)
    first_token_ms = [_first_token_ms(system, prompt) for prompt in workload["first_token"]["prompts"]]
    single = workload["single_stream"]
    rates = [_stream(system, pair, single["output_tokens"]) for pair in single["prompt_pairs"]]
    rate, first_tokens = _many(system, workload["mixed"])
    return {
        "first_token_ms": first_token_ms,
        "single_stream_tokens_per_s": rates,
        "mixed_tokens_per_s": [rate],
        "mixed_first_tokens": first_tokens,
    }


def _serve(system: System, workload: dict[str, Any], start: dict[str, float], answer: Any) -> None:
    """Say how the start went, then measure what each line on stdin names, one number a line, until there are no more.

    So several systems stay loaded and take turns at every measurement. Prompts are taken in order, and from the first again after the last.
    """
    _warm_up(system, workload)
    print(json.dumps(start), file=answer, flush=True)
    first_prompts = itertools.cycle(workload["first_token"]["prompts"])
    pairs, tokens = (
        itertools.cycle(workload["single_stream"]["prompt_pairs"]),
        workload["single_stream"]["output_tokens"],
    )
    measures: dict[str, Callable[[], float]] = {
        "first_token_ms": lambda: _first_token_ms(system, next(first_prompts)),
        "single_stream_tokens_per_s": lambda: _stream(system, next(pairs), tokens),
        "mixed_tokens_per_s": lambda: _many(system, workload["mixed"])[0],
    }
    for line in sys.stdin:
        print(json.dumps(measures[line.strip()]()), file=answer, flush=True)


def _warm_up(system: System, workload: dict[str, Any]) -> None:
    for submission in workload["warm_up"]:
        _timed(system, submission["prompts"], submission["output_tokens"])


def _first_token_ms(system: System, prompt: Sequence[int]) -> float:
    return _timed(system, [prompt], [1])[0] * 1e3


def _stream(system: System, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return tokens per second after the first.

    The prefill is taken out by measuring it alone on another prompt of the same length: the same definition for systems that report no
    time of the first token.
    """
    until_first, _ = _timed(system, [prompts[0]], [1])
    whole, _ = _timed(system, [prompts[1]], [tokens])
    return (tokens - 1) / (whole - until_first)


def _many(system: System, mixed: dict[str, Any]) -> tuple[float, list[int]]:
    seconds, outputs = _timed(system, mixed["prompts"], mixed["output_tokens"])
    return sum(mixed["output_tokens"]) / seconds, [output[0] for output in outputs]


def _timed(
    system: System, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]
) -> tuple[float, list[list[int]]]:
    """Return seconds and outputs of one submission.

    Raises:
        RuntimeError: the system produced another number of tokens than asked, so that its time means nothing.
    """
    gc.collect()
    started = time.perf_counter()
    outputs = system.generate(prompts, output_tokens)
    seconds = time.perf_counter() - started
    lengths = [len(output) for output in outputs]
    if lengths != list(output_tokens):
        raise RuntimeError(f"asked for {list(output_tokens)} tokens, got {lengths}")
    return seconds, outputs


def _peak_rss_bytes() -> int:
    """Return the high-water marks of this process and its descendants, added up."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    total, pending = 0, [os.getpid()]
    while pending:
        process = pending.pop()
        pending += children.get(process, [])
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) << 10
    return total


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def stdout_to_stderr() -> Any:
    """Give what libraries print, from Python or C, to stderr; yield a file on the real stdout for the answer."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        yield answer
