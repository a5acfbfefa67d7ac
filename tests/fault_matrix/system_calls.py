"""System calls of the memory engine and of the CPU's driver that fail: maps of memory, and all of the disk tier.

They fail in a process of their own, into which `system_calls.cpp` is preloaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from hardpoint.memory import DriverTable
from hardpoint_conformance.fault_matrix import OPERATIONS, FaultTarget, Row, run_target

_SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARY = "HARDPOINT_TEST_FAILING_CALLS"


class SystemCallTarget(FaultTarget):
    """The CPU's driver and the disk store over a system whose calls fail."""

    name = "cpu (system calls)"
    units = 2
    # Advice, and what takes memory and files away: it is in the books of the driver, or goes with the folder.
    tolerates = ("madvise", "munmap", "unlink", "rmdir", "open", "flock", "fstatfs")

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def table(self) -> DriverTable:
        from hardpoint_cpu.driver import driver_table

        self._table = driver_table(options={"budget": 1 << 30})
        return self._table

    def calls(self) -> dict[str, int]:
        text = ctypes.create_string_buffer(4096)
        self._library.hp_calls_made(text, ctypes.c_ulong(len(text)))
        return {name: int(count) for name, count in map(str.split, text.value.decode().splitlines())}

    def fail(self, call: str, nth: int) -> None:
        self._fail(call, nth)

    def fail_calls(self, *numbers: int) -> None:
        self._fail("", *numbers)

    def _fail(self, call: str, *numbers: int) -> None:
        array = (ctypes.c_long * len(numbers))(*numbers)
        self._library.hp_calls_fail(call.encode(), array, ctypes.c_long(len(numbers)))

    def disarm(self) -> bool:
        left: int = self._library.hp_calls_disarm()
        return left == 0

    def held(self) -> Mapping[str, int]:
        free, total = self._table.memory_info()
        return {"used": total - free}

    def finish(self) -> None:
        pass


def run_system_calls(operations: Sequence[str], pairs: int = 0) -> list[Row]:
    """Run operations, by name, in a process whose system calls fail; `pairs` as `run_target`. Needs a C++ compiler."""
    library = str(Path(_built().name) / "system_calls.so")
    command = [sys.executable, "-m", "tests.fault_matrix.system_calls", str(pairs), *operations]
    environment = {**os.environ, "LD_PRELOAD": library, _LIBRARY: library}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines()]


@cache
def _built() -> tempfile.TemporaryDirectory[str]:
    """Compile the library, once for all runs, into a folder that goes with this process."""
    folder = tempfile.TemporaryDirectory()
    compiler, library = os.environ.get("CXX", "c++"), Path(folder.name) / "system_calls.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-o", library, _SOURCE, "-ldl"], check=True)
    return folder


def main() -> None:
    """Print the rows, one a line."""
    pairs, *names = sys.argv[1:]
    operations = tuple(operation for operation in OPERATIONS if operation.name in names)
    for row in run_target(SystemCallTarget(os.environ[_LIBRARY]), operations, int(pairs)):
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
