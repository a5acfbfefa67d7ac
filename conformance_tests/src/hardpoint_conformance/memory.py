"""A backend's memory as tests use it: blocks of bytes, by tensors of its allocator or by addresses of its memory driver.

A clause about memory is proved in every way in which a backend's memory can be reached here: `tensors`, where the installed torch can
address the device, and `pool`, the core's engine over the backend's driver, which needs no torch for the device.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hardpoint.interfaces import (
    DType,
    FileExtent,
    LiveRanges,
    MemoryCapabilities,
    MemoryInfo,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.memory import ALL_CLAIMS, DriverTable, TensorAllocator, VirtualPool
from hardpoint_conformance import fork_server
from hardpoint_conformance.claims import plain_tier
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.outcomes import OWN_ALLOCATOR
from hardpoint_conformance.target import MUTANT_VARIABLE, Target

WAYS = ("tensors", "pool")
UNIT_WITHOUT_DRIVER = 2 << 20
PROCESS = Path("/proc/self")

Ranges = Sequence[tuple[int, int]]
Source = Sequence[FileExtent] | Callable[[], None]


def content(size: int, seed: int = 0) -> bytes:
    """Return bytes that tell their seed and their place."""
    first = seed * 7919 + 1
    words = np.arange(first, first + -(-size // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:size].tobytes()


def obstacle(target: Target, way: str) -> str:
    """Return why a backend's memory cannot be reached in a way here; "" when it can."""
    if way == "pool":
        return "" if target.descriptor.driver is not None else OWN_ALLOCATOR
    if target.simulated and target.device.torch_device != "cpu":  # torch addresses the host's memory, whoever gives it
        return "torch cannot address a simulated device"
    import torch

    try:
        torch.empty(1, device=target.device.torch_device)
    except Exception as error:  # torch without the device raises whatever it likes
        return f"this torch cannot use {target.device.torch_device} ({type(error).__name__})"
    return ""


def require(target: Target, way: str) -> None:
    """End a test visibly where a backend's memory cannot be reached in a way here; where it cannot be in any, the test fails."""
    reason = obstacle(target, way)
    if not reason:
        return
    import pytest  # not in the programs that tests start

    if all(obstacle(target, other) for other in WAYS):
        pytest.fail(f"the backend's memory cannot be reached at all: {reason}")
    pytest.skip(reason if reason == OWN_ALLOCATOR else f"not testable here: {reason}")


def driver_of(target: Target) -> DriverTable:
    """Return a backend's memory driver; where it has none, end the test visibly."""
    require(target, "pool")
    driver = target.driver()
    assert driver is not None, "the descriptor has a driver, and gives none"
    return driver


@dataclass(eq=False)
class Block:
    """An allocation."""

    address: int
    size: int
    tag: str
    tensor: Any = field(default=None, repr=False)


class Memory(ABC):
    """A backend's memory. Errors are those of the contract.

    A plan's tier host, which is the default, stands for the one that the backend claims where that is another.

    Attributes:
        claims: what the backend claims of it.
        unit: bytes in which tests count: the driver's granularity.
        blocks: those that live.
    """

    way: str
    unit: int

    def __init__(self, claims: MemoryCapabilities) -> None:
        self.claims = claims
        self.blocks: list[Block] = []

    @property
    @abstractmethod
    def _engine(self) -> TensorAllocator | VirtualPool:
        """What keeps the books."""

    @abstractmethod
    def allocate(self, size: int, tag: str = "weights", policy: Policy = Policy.PRESERVE, capacity: int = 0) -> Block:
        """Return memory; with a capacity, in bytes, it is elastic."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """Give memory back."""

    @abstractmethod
    def write(self, block: Block, data: bytes, at: int = 0) -> None:
        """Write as a program on the device does; nobody is told but by `mark_written`."""

    @abstractmethod
    def read(self, block: Block, size: int | None = None, at: int = 0) -> bytes:
        """Return bytes of awake memory; without a size, all."""

    @abstractmethod
    def resize(self, block: Block, size: int) -> None:
        """Grow or shrink elastic memory."""

    @abstractmethod
    def declare_source(self, block: Block, source: Source) -> None:
        """Say where bytes come from."""

    @abstractmethod
    def sleep(self, plan: SleepPlan | None = None, live: Mapping[Block, Ranges] | None = None) -> MemoryReport:
        """Put memory to sleep; the default plan copies all that is to be preserved to the host."""

    def begin_sleep(self, plan: SleepPlan | None = None) -> MemoryTransaction:
        """Prepare a sleep."""
        return self._engine.begin_sleep(self._planned(plan))

    def begin_wake(self, tags: Sequence[str] | None = None) -> MemoryTransaction:
        """Prepare a wake; of all memory without tags."""
        return self._engine.begin_wake(tags)

    @abstractmethod
    def read_backup(self, block: Block) -> bytes:
        """Return the bytes of sleeping memory."""

    def filled(self, data: bytes, tag: str = "weights", policy: Policy = Policy.PRESERVE, capacity: int = 0) -> Block:
        """Allocate and write."""
        block = self.allocate(len(data), tag, policy, capacity)
        self.write(block, data)
        return block

    def wake(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Wake memory; all of it without tags."""
        return self._engine.wake(tags)

    def mark_written(self, *tags: str) -> None:
        """Say that memory was written."""
        self._engine.mark_written(tags)

    def discard_backup(self, *tags: str) -> None:
        """Drop backups."""
        self._engine.discard_backup(tags)

    def prepare_sleep(self, plan: SleepPlan) -> None:
        """Take the host memory for a sleep ahead of it."""
        self._engine.prepare_sleep(self._planned(plan))

    def stats(self) -> MemoryStats:
        """Return the books."""
        return self._engine.stats()

    def memory_info(self) -> MemoryInfo:
        """Return the device's memory."""
        return self._engine.memory_info()

    def mapped(self) -> int:
        """Return the device bytes that are mapped, all tags together."""
        return sum(tag.mapped for tag in self.stats().tags.values())

    def close(self) -> None:
        """Hand out nothing more."""
        self._engine.close()

    @abstractmethod
    def end(self) -> None:
        """Free what a test left, close, and check that nothing stays behind."""

    def _planned(self, plan: SleepPlan | None, live: Mapping[Block, Ranges] | None = None) -> SleepPlan:
        plan = plan or SleepPlan()
        given = tuple(LiveRanges(block.address, ranges) for block, ranges in (live or {}).items())
        return replace(plan, live=given, tier=plain_tier(self.claims) if plan.tier is SleepTier.HOST else plan.tier)


class TensorMemory(Memory):
    """Tensors of the backend's allocator."""

    way = "tensors"

    def __init__(self, target: Target) -> None:
        super().__init__(target.claims.memory)
        self.allocator = target.allocator()
        self.unit = granularity(target)

    @property
    def _engine(self) -> TensorAllocator:
        return self.allocator

    def allocate(self, size: int, tag: str = "weights", policy: Policy = Policy.PRESERVE, capacity: int = 0) -> Block:
        tensor = self.allocator.empty((size,), DType.UINT8, tag, policy, capacity or None)
        block = Block(tensor.data_ptr(), size, tag, tensor)
        self.blocks.append(block)
        return block

    def free(self, block: Block) -> None:
        self.blocks.remove(block)
        block.tensor = None

    def write(self, block: Block, data: bytes, at: int = 0) -> None:
        import torch

        block.tensor[at : at + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read(self, block: Block, size: int | None = None, at: int = 0) -> bytes:
        end = block.size if size is None else at + size
        return bytes(block.tensor[at:end].cpu().numpy().tobytes())

    def resize(self, block: Block, size: int) -> None:
        block.tensor = self.allocator.resize(block.tensor, size)
        block.size = size

    def declare_source(self, block: Block, source: Source) -> None:
        self.allocator.declare_source(block.tensor, source)

    def sleep(self, plan: SleepPlan | None = None, live: Mapping[Block, Ranges] | None = None) -> MemoryReport:
        return self.allocator.sleep(self._planned(plan, live))

    def read_backup(self, block: Block) -> bytes:
        return bytes(self.allocator.read_backup(block.tensor).numpy().tobytes())

    def end(self) -> None:
        for block in self.blocks:
            block.tensor = None
        self.blocks.clear()
        if self.stats().allocated:
            gc.collect()
        if self.stats().allocated and self.claims.torch_pool is TorchPoolScope.ALL and 1 in self.claims.sleep_levels:
            # Torch keeps segments without tensors for later ones; a sleep gives them back.
            self.sleep()
            self.wake()
        assert self.stats().allocated == 0, "memory is left in the books"
        self.close()


class PoolMemory(Memory):
    """Addresses of the backend's memory driver, by the core's engine.

    Attributes:
        table: the driver.
    """

    way = "pool"

    def __init__(
        self, driver: DriverTable, claims: MemoryCapabilities = ALL_CLAIMS, engine: type[VirtualPool] = VirtualPool
    ) -> None:
        super().__init__(claims)
        self.table = driver
        self.pool = engine(driver, claims)
        self.unit = driver.geometry().granularity

    @property
    def driver(self) -> InterposedDriver:
        """The driver, where its calls are seen."""
        assert isinstance(self.table, InterposedDriver), "the driver's calls are not seen"
        return self.table

    @property
    def _engine(self) -> VirtualPool:
        return self.pool

    def allocate(
        self,
        size: int,
        tag: str = "weights",
        policy: Policy = Policy.PRESERVE,
        capacity: int = 0,
        *,
        shared: bool = False,
    ) -> Block:
        block = Block(self.pool.allocate(size, tag, policy, capacity, shared=shared), size, tag)
        self.blocks.append(block)
        return block

    def free(self, block: Block) -> None:
        self.pool.free(block.address)
        self.blocks.remove(block)

    def write(self, block: Block, data: bytes, at: int = 0) -> None:
        buffer = bytearray(data)
        with on_stream(self.table) as stream:
            self.table.copy_to_device(block.address + at, address_of(buffer), len(data), stream)
            self.table.stream_synchronize(stream)

    def read(self, block: Block, size: int | None = None, at: int = 0) -> bytes:
        return self.pool.read(block.address + at, block.size - at if size is None else size)

    def resize(self, block: Block, size: int) -> None:
        self.pool.resize(block.address, size)
        block.size = size

    def declare_source(self, block: Block, source: Source) -> None:
        self.pool.declare_source(block.address, block.size, source)

    def sleep(self, plan: SleepPlan | None = None, live: Mapping[Block, Ranges] | None = None) -> MemoryReport:
        return self.pool.sleep(self._planned(plan, live))

    def read_backup(self, block: Block) -> bytes:
        return self.pool.read_backup(block.address, block.size)

    def end(self) -> None:
        self.driver.disarm()
        for block in list(self.blocks):
            self.free(block)
        assert self.stats().allocated == 0, "memory is left in the books"
        self.close()
        del self.pool
        if any(self.driver.held().values()):
            gc.collect()
        assert_holds_nothing(self.driver)


def granularity(target: Target) -> int:
    """Return the granularity of a backend's driver, or what stands for it where there is none."""
    driver = target.driver()
    if driver is None:
        return UNIT_WITHOUT_DRIVER
    driver.open()
    try:
        return driver.geometry().granularity
    finally:
        driver.close()


def open_memory(target: Target, way: str, *, seen: bool = True) -> Memory:
    """Return a backend's memory.

    Args:
        seen: by driver: its calls are seen, and can be made to fail.
    """
    if way == "tensors":
        return TensorMemory(target)
    driver = driver_of(target)
    return PoolMemory(InterposedDriver(driver) if seen else driver, target.claims.memory, target.engine or VirtualPool)


def assert_holds_nothing(driver: InterposedDriver) -> None:
    """Assert that nothing of a driver is held, and that nobody broke its rules."""
    assert driver.errors == []
    assert driver.broken_rules() == []
    held = driver.held()
    assert held == dict.fromkeys(held, 0), "left at the driver"


@contextmanager
def on_stream(driver: DriverTable) -> Iterator[int]:
    """Make a stream for a while."""
    stream = driver.stream_create()
    try:
        yield stream
    finally:
        driver.stream_destroy(stream)


def address_of(buffer: bytearray) -> int:
    """Return where a buffer's bytes are, for as long as it lives and keeps its size."""
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for what happens in the background; return whether it did."""
    patience = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > patience:
            return False
        time.sleep(0.002)
    return True


def differences(before: Mapping[str, int], after: Mapping[str, int], but: Sequence[str] = ()) -> dict[str, int]:
    """Return by how much counts differ, without those named."""
    names = (before.keys() | after.keys()) - set(but)
    changed = {name: after.get(name, 0) - before.get(name, 0) for name in sorted(names)}
    return {name: count for name, count in changed.items() if count}


def process_counts() -> dict[str, int]:
    """Return the process's open files and mappings, where the system tells."""
    counts = {}
    if (PROCESS / "fd").exists():
        counts["files"] = len(os.listdir(PROCESS / "fd"))
    if (PROCESS / "maps").exists():
        counts["mappings"] = len((PROCESS / "maps").read_text().splitlines())
    return counts


def files_below(directory: Path) -> dict[Path, int]:
    """Return the sizes of the files in a folder and those below it, largest first; files may come and go meanwhile."""
    sizes: dict[Path, int] = {}
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):
            if file.is_file():
                sizes[file] = file.stat().st_size
    return dict(sorted(sizes.items(), key=lambda one: -one[1]))


_PRELUDE = """
import gc
gc.disable()  # what is imported stays, and is left out of collections, at the end most of all
import os, sys, threading, time
from hardpoint.interfaces import Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import *
from hardpoint_conformance.memory import content, open_memory
from hardpoint_conformance.target import Target
gc.freeze()
gc.enable()
target = Target.find(sys.argv[1], int(sys.argv[2]))
memory = open_memory(target, sys.argv[3], seen=False)  # calls that outlive the interpreter cannot be
directory = sys.argv[4]
unit = memory.unit
"""


def run_program(
    target: Target, way: str, program: str, directory: Path, time_limit: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter, with the backend's `memory` open, its `unit`, and a `directory` for backups.

    What needs torch is a fork of a process that has imported it, where there is one; it ends as every interpreter does.
    """
    arguments = [target.record.name, str(target.device.index), way, str(directory)]
    command = [_PRELUDE + textwrap.dedent(program), *arguments]
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = fork_server.here() if way == "tensors" or MUTANT_VARIABLE in os.environ else None  # mutants import torch
    if server is None:
        command = [sys.executable, "-c", *command]
        return subprocess.run(command, capture_output=True, text=True, timeout=time_limit, env=environment, check=False)
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = (Path(folder) / name for name in ("stdout", "stderr"))
        for file in (stdout, stderr):
            file.write_bytes(b"")
        process = server.start(fork_server.PROGRAM, command, Path.cwd(), stdout, stderr, environment, os.getpgrp())
        try:
            code = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, code, stdout.read_text("utf-8"), stderr.read_text("utf-8"))
