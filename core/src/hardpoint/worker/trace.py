"""What the host and the device do, recorded by torch's profiler."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hardpoint.interfaces.errors import InvalidRequest


class Trace:
    """One recording at a time.

    Args:
        rank: that the files are named after.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._running: tuple[Any, Path] | None = None

    def start(self, folder: str) -> None:
        """Begin to record; raises InvalidRequest where a recording goes on, or the folder cannot be written to."""
        if self._running is not None:
            raise InvalidRequest("a profile is being recorded already", hint="Call stop_profile first")
        file = Path(folder) / f"rank{self._rank}.{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            file.unlink()
        except OSError as error:
            raise InvalidRequest(f"profiles cannot be written to '{folder}'", found=str(error)) from error
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        profiler = torch.profiler.profile(activities=activities)
        with _compiler_left_out():
            profiler.start()
        self._running = profiler, file

    def stop(self) -> str:
        """Write what was recorded, and return the file's path; raises InvalidRequest where nothing is, or it cannot be written."""
        if self._running is None:
            raise InvalidRequest("no profile is being recorded", hint="Call start_profile first")
        (profiler, file), self._running = self._running, None
        profiler.stop()
        try:
            profiler.export_chrome_trace(str(file))
        except OSError as error:
            raise InvalidRequest(f"the profile cannot be written to '{file}'", found=str(error)) from error
        return str(file)

    def abandon(self) -> None:
        """Record no more, and write nothing."""
        if self._running is not None:
            self._running[0].stop()
            self._running = None


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """Have torch's profiler, which asks whether torch has its compiler, not import it thereby: a second in which no step would run."""
    lazy: set[str] = getattr(torch, "_lazy_modules", set())
    left_out = lazy & {"_inductor"}
    lazy -= left_out
    try:
        yield
    finally:
        lazy |= left_out
