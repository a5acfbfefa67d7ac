"""What tests hold against each other to see that nothing was left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")
FILES_IN_MEMORY = "files-of-tests-"
"""How folders begin in which tests that run side by side have files, and which are nobody's shared memory."""


@dataclass(frozen=True)
class Belongings:
    """What this process holds of the system, as far as executors touch it."""

    files: frozenset[str]
    children: frozenset[str]
    shared: frozenset[str]
    ports: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        """Look at this process."""
        gc.collect()
        children: set[str] = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                children.update((task / "children").read_text().split())
        files = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                files[fd] = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
        listening = {
            line.split()[1]
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in files.values()
        }
        return cls(
            frozenset(f"{fd} {target}" for fd, target in files.items()),
            frozenset(children),
            frozenset(name for name in os.listdir(MEMORY) if not name.startswith(FILES_IN_MEMORY)),
            frozenset(listening),
        )

    def new_since(self, before: Belongings) -> list[str]:
        """Return what was not there before."""
        shared = {name for name in self.shared - before.shared if _is_abandoned(name)}
        return sorted(
            (self.files - before.files) | (self.children - before.children) | shared | (self.ports - before.ports)
        )


def is_mapped(name: str, pids: Iterable[int | str]) -> bool:
    """Whether one of the processes uses shared memory of this name."""
    path = str(MEMORY / name)
    for pid in pids:
        with contextlib.suppress(OSError):
            if path in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace"):
                return True
    return False


def _is_abandoned(name: str) -> bool:
    """Whether shared memory is still there after a while and no process uses it: other programs have some, too."""
    if name.startswith("__KMP_REGISTERED_LIB_"):
        return False  # of the OpenMP runtime of each process, which does not keep it mapped, and leaves it when it is killed
    for _ in range(50):
        time.sleep(0.2)
        everyone = (process.name for process in Path("/proc").glob("[0-9]*"))
        if is_mapped(name, everyone) or not (MEMORY / name).exists():
            return False
    return True
