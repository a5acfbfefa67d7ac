"""Runs seeds of a generator in forked children, so that a crash, a hang or a hunger for memory is the failure of one seed."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.interfaces.errors import HardpointError
from tests.leaks import FILES_IN_MEMORY, MEMORY
from tests.warm_processes import freeze

SECONDS = 10
"""Most processor time that a case may take."""
PATIENCE = 240
"""Seconds after which a case counts as hanging, on a machine that may be busy."""
GROWTH_MIB = 256
"""Most memory that a case may take beyond what its process had."""
_ADDRESSES = 8 << 30
"""Bytes of addresses that a child may take more: what would take the machine's memory fails in the child."""
_BATCH = 2000
RIGHT, _PREPARED = "right", "prepared"

Case = Callable[[int, Path], None]
"""Does what a seed says, in an empty folder; raises a HardpointError where that is refused."""
Prepare = Callable[[Path], Case]
"""Called once in each child, with a folder for its own."""


@dataclass
class Outcome:
    """What became of the seeds: how many ended how, and the failures, each with the command that repeats it."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(kind: str, prepare: Prepare, first: int, count: int) -> Outcome:
    """Run seeds from `first` on."""
    outcome, seed, end = Outcome(), first, first + count
    freeze()
    while seed < end:
        seed = _run_batch(kind, prepare, seed, min(seed + _BATCH, end), outcome)
    return outcome


def _run_batch(kind: str, prepare: Prepare, first: int, end: int, outcome: Outcome) -> int:
    """Run seeds in one child, and return the seed to go on from: the end, or what comes after the one that ended the child."""
    seed = first
    # To make a small file on a disk takes longer than to refuse it.
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    named = tempfile.TemporaryDirectory(prefix=FILES_IN_MEMORY, dir=place)
    with named as folder, open(Path(folder) / "errors", "w+b") as errors:
        child, reports = _fork(lambda report: _child(prepare, first, end, Path(folder), errors.fileno(), report))
        if next(reports, (0, "")) != (first, _PREPARED):
            os.waitpid(child, 0)
            errors.seek(0)
            raise RuntimeError(f"the cases could not be prepared: {errors.read()[-4000:].decode(errors='replace')}")
        for seed, text in reports:
            if text.startswith("!"):
                outcome.failures.append(f"python -m tests.fuzz {kind} {seed}\n{text[1:]}")
            else:
                outcome.counts[text] += 1
            seed += 1
        _, status = os.waitpid(child, 0)
        if seed < end or status:
            errors.seek(0)
            said = errors.read()[-4000:].decode(errors="replace")
            how = (
                f"signal {status & 127}" if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"
            )
            outcome.failures.append(f"python -m tests.fuzz {kind} {seed}\nthe process ended with {how}\n{said}")
            seed += 1
    return seed


def _child(prepare: Prepare, first: int, end: int, folder: Path, errors: int, report: Any) -> None:
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
    faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _ADDRESSES, hard))
    own = folder / "own"
    own.mkdir()
    case = prepare(own)
    report(first, _PREPARED)
    for seed in range(first, end):
        place = folder / str(seed)
        place.mkdir()
        with suppress(OSError):  # a kernel may be built without it
            Path("/proc/self/clear_refs").write_text("5")  # what earlier cases took at most is forgotten (proc(5))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            case(seed, place)
            result = RIGHT
        except HardpointError as error:
            result = type(error).__name__
            try:
                str(error).encode()
            except UnicodeEncodeError:
                result = f"!the error's text cannot be written: {str(error)!r}"
        except BaseException:
            result = "!" + traceback.format_exc(limit=-8)
        faulthandler.cancel_dump_traceback_later()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        taken = time.process_time() - start
        if grown > GROWTH_MIB or taken > SECONDS:
            result = f"!it took {grown} MiB and {taken:.1f} s of the processor"
        report(seed, result)


def _fork(work: Callable[[Callable[[int, str], None]], None]) -> tuple[int, Iterator[tuple[int, str]]]:
    """Start a child, and return its process id and what it reports."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, _reports(reading)
    status = 70
    try:
        os.close(reading)

        def report(seed: int, text: str) -> None:
            data = text.encode(errors="backslashreplace")[-30000:]
            os.write(writing, struct.pack("<qI", seed, len(data)) + data)

        work(report)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reports(reading: int) -> Iterator[tuple[int, str]]:
    with open(reading, "rb") as pipe:
        while len(head := pipe.read(12)) == 12:
            seed, length = struct.unpack("<qI", head)
            yield seed, pipe.read(length).decode()
