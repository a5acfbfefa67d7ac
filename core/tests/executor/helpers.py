"""What tests of executors share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hardpoint.executor import Executor
from hardpoint.interfaces import MemoryReport, SleepPlan, StepInput, StepOutput, WakePlan

REPORTED_WITHIN = 45.0
"""Seconds within which the end of a rank is an error of the call under way: below what calls may take, and enough on a loaded machine."""


def order(call: str, does: Any, rank: int | None = None, after: int = 0) -> dict[str, Any]:
    """Return what a fake worker is to do; see the fake backend."""
    return {"call": call, "does": does, "rank": rank, "after": after}


def run_step(executor: Executor, step: StepInput) -> StepOutput:
    """Submit a step and collect it."""
    executor.submit(step)
    return executor.collect()


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def sums(table: Any, rows: list[int], blocks: int) -> list[int]:
    """Return the tokens of a fake worker's step."""
    return [int(table[row, :blocks].sum()) for row in rows]


class RanksWithoutSteps(Executor):
    """Ranks that sleep and wake, and compute nothing here."""

    def submit(self, step: StepInput) -> None:
        raise AssertionError("nothing is computed here")

    def collect(self) -> StepOutput:
        raise AssertionError("nothing is computed here")

    def shutdown(self) -> None:
        pass

    def sleep(self, plan: SleepPlan) -> list[MemoryReport]:
        return self.change(plan)

    def wake(self, tags: Iterable[str] | None = None) -> list[MemoryReport]:
        return self.change(WakePlan(None if tags is None else frozenset(tags)))
