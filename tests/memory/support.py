"""What the tests of the memory engine share: a pool that remembers what is in it, and programs run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from hardpoint.interfaces import Policy
from hardpoint.memory import DriverTable, VirtualPool

ROOT = Path(__file__).parents[2]


def content(size: int, seed: int = 0) -> bytes:
    """Return bytes that tell their seed and their place."""
    words = np.arange(-(-size // 8), dtype=np.uint64)
    return ((words + np.uint64(seed * 7919 + 1)) * np.uint64(0x9E3779B97F4A7C15)).tobytes()[:size]


class TrackedPool(VirtualPool):
    """A pool that knows its allocations, so that a test's end can free what the test left."""

    def __init__(self, driver: DriverTable) -> None:
        super().__init__(driver)
        self.living: set[int] = set()

    @property
    def unit(self) -> int:
        """The driver's granularity, bytes."""
        return self.driver.geometry().granularity

    def allocate(
        self,
        size: int,
        tag: str = "weights",
        policy: Policy = Policy.PRESERVE,
        capacity: int = 0,
        *,
        shared: bool = False,
    ) -> int:
        address = super().allocate(size, tag, policy, capacity, shared=shared)
        self.living.add(address)
        return address

    def filled(
        self, data: bytes, tag: str = "weights", policy: Policy = Policy.PRESERVE, *, shared: bool = False
    ) -> int:
        """Allocate and write."""
        address = self.allocate(len(data), tag, policy, shared=shared)
        self.write(address, data)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self.living.discard(address)

    def free_all(self) -> None:
        """Free what is left and close."""
        for address in sorted(self.living):
            self.free(address)
        self.close()


def differences(before: Mapping[str, int], after: Mapping[str, int], but: Iterable[str] = ()) -> dict[str, int]:
    """Return by how much counts differ, without those named."""
    names = (before.keys() | after.keys()) - set(but)
    changed = {name: after.get(name, 0) - before.get(name, 0) for name in sorted(names)}
    return {name: count for name, count in changed.items() if count}


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what the engine does in the background; the test's own time limit ends it."""
    while not condition():
        time.sleep(0.001)


PRELUDE = """
import gc, os, signal, sys, threading, time
from hardpoint.interfaces import FileExtent, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import *
from hardpoint.memory import VirtualPool
from hardpoint_cpu.driver import DriverFaults, driver_table
"""


def run_program(
    program: str, *arguments: object, prelude: str = PRELUDE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter; `arguments` are its sys.argv[1:]."""
    source = prelude + textwrap.dedent(program)
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | environment, cwd=ROOT, check=False
    )


def runs_cleanly(program: str, *arguments: object, **environment: str) -> str:
    """Run a program, assert that it ends with status 0 and writes no error; return its output."""
    ended = run_program(program, *arguments, **environment)
    assert (ended.returncode, ended.stderr) == (0, ""), f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
