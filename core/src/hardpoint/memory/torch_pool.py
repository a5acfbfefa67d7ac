"""Torch's own allocations from Hardpoint's memory, on devices for which torch has a pluggable allocator.

Torch asks a plain C symbol of the driver's library for segments (`include/hardpoint/torch_allocator.h`) and cuts tensors from them by
its caching allocator, separately for each of its memory pools. A segment has one tag and one policy, hence one torch pool for
each of these. What torch calls its functions differs by device: a backend passes them in.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hardpoint import _native
from hardpoint.interfaces.allocator import MemoryReport, Policy, SleepPlan
from hardpoint.interfaces.capabilities import MemoryCapabilities
from hardpoint.interfaces.errors import CapabilityRefused, MemoryBusy
from hardpoint.memory.driver_table import DriverTable
from hardpoint.memory.pool import VirtualPool, native_policy
from hardpoint.memory.virtual import VirtualAllocator

_EXPANDABLE = re.compile(r"(?<!\w)expandable_segments:(\w+)")


@dataclass(frozen=True)
class TorchPoolFunctions:
    """Torch's functions for one kind of device.

    Attributes:
        symbols: the driver library's functions for torch: allocate, free.
        allocator: torch's pluggable allocator over a library's two functions (path, allocate, free).
        pool: a new pool of torch over a pluggable allocator, for the device with an index.
        use: a context in which this thread's allocations on the device with an index come from a pool.
        segments: torch's description of a pool's segments: `address`, and `active_size`, the bytes of tensors in it.
        empty_cache: let torch give back what no tensor uses.
        check: raise CapabilityRefused where torch's build or settings do not allow pools (see `refuse_expandable_segments`).
    """

    symbols: tuple[str, str]
    allocator: Callable[[str, str, str], Any]
    pool: Callable[[Any, int], Any]
    use: Callable[[Any, int], AbstractContextManager[None]]
    segments: Callable[[Any], Sequence[Mapping[str, Any]]]
    empty_cache: Callable[[], None]
    check: Callable[[], None]


def torch_has_library(name: str) -> bool:
    """Return whether the installed torch comes with a library of this file name; torch is not imported."""
    torch = find_spec("torch")
    return any((Path(folder) / "lib" / name).exists() for folder in (torch and torch.submodule_search_locations) or ())


def refuse_expandable_segments(variables: Sequence[str], in_force: bool | None = None) -> None:
    """Raise CapabilityRefused when torch is set to expandable segments, which it maps by itself, past every pluggable allocator.

    Args:
        variables: the environment variables that torch reads its allocator settings from, the one that counts most first.
        in_force: what torch says of the setting; None where it cannot be asked.
    """
    asked = {name: os.environ[name] for name in variables if _expandable(os.environ.get(name, ""))}
    called = _settings_of_calls()
    if in_force is None:
        in_force = bool(asked) if _expandable(called) is None else _expandable(called)
    if not in_force:
        return
    found = [f"{name}={value}" for name, value in asked.items()] or [
        f"set by a call: {called or 'expandable_segments:True'}"
    ]
    raise CapabilityRefused(
        "torch cannot allocate from a pool while expandable segments are on",
        [f"torch's allocator settings have them ({', '.join(found)})"],
        hint=f"Set {next(iter(asked), variables[0])} to expandable_segments:False, or leave the setting out",
    )


def _expandable(settings: str) -> bool | None:
    """Return the value of the setting, the last one where there are several; None when there is none."""
    values = _EXPANDABLE.findall(re.sub(r"\s", "", settings))
    return values[-1] == "True" if values else None


def _settings_of_calls() -> str:
    """Return the settings that torch was given last, by its environment or a call; "" for a torch that does not tell."""
    import torch

    settings: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return settings() if settings else ""


class _TorchObjects:
    """Torch's allocators and pools, process-wide as their state in torch is.

    A pool uses its allocator without owning it, and a pool's end is torch's call to a device that may be gone or broken when the
    interpreter ends; torch aborts the process then. So allocators are never destroyed, and neither are pools that still exist
    at that time: the process returns their memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._allocators: dict[tuple[str, str, str], Any] = {}
        self._pools: dict[int, Any] = {}
        atexit.register(self._outlive_the_interpreter)

    def allocator(self, driver: DriverTable, functions: TorchPoolFunctions) -> Any:
        """Return torch's allocator over a driver library, which is connected to the core when it is first asked for."""
        key = (str(driver.module), *functions.symbols)
        with self._lock:
            if key not in self._allocators:
                install = ctypes.CDLL(key[0]).hp_torch_install
                install.argtypes, install.restype = [ctypes.c_void_p], None
                install(_native.torch_functions())
                self._allocators[key] = functions.allocator(*key)
            return self._allocators[key]

    def keep(self, pool: Any) -> Any:
        """Keep a pool alive until it is dropped, and return it."""
        with self._lock:
            self._pools[id(pool)] = pool
        return pool

    def drop(self, pool: Any) -> None:
        """Let a pool end with its last reference."""
        with self._lock:
            self._pools.pop(id(pool), None)

    def _outlive_the_interpreter(self) -> None:
        for kept in [*self._pools.values(), *self._allocators.values()]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_torch_objects = _TorchObjects()


@dataclass(eq=False)
class _Block:
    """One `with` block: the memory it is for, and torch's pool; `in_torch` is what to undo while the block is in effect."""

    pools: TorchPools
    key: tuple[str, Policy]
    torch_pool: Any
    thread: int = field(default_factory=threading.get_ident)
    in_torch: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        tag, policy = self.key
        with ExitStack() as undo:
            _native.enter_torch_pool(self.pools.memory.native, self.pools.device, tag, native_policy(policy))
            undo.callback(_native.leave_torch_pool, self.pools.device)
            undo.enter_context(self.pools.functions.use(self.torch_pool, self.pools.device))
            self.in_torch = undo.pop_all()

    def suspend(self) -> None:
        self.in_torch.close()


class _Thread(threading.local):
    """The blocks that this thread is in, outermost first: torch's pools are in effect by thread and device, for all engines."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    def innermost(self, device: int) -> _Block | None:
        return next((block for block in reversed(self.blocks) if block.pools.device == device), None)


_thread = _Thread()


class TorchPools:
    """Torch's pools over one engine's memory on one device.

    Blocks may be nested, re-entered, and entered by several threads at a time; the innermost one counts. Torch itself cannot enter a
    pool that is entered, nor, in older versions, nest: an outer block is suspended while an inner one is in effect, and a
    torch pool that is in use is left alone in favour of another one for the same tag and policy.
    """

    def __init__(self, memory: VirtualPool, device: int, functions: TorchPoolFunctions) -> None:
        """Connect nothing yet: torch is asked when a block is entered.

        Args:
            memory: where the segments come from.
            device: the device's index as torch counts.
            functions: torch's functions for the device.
        """
        self.memory = memory
        self.device = device
        self.functions = functions
        # Guards the next two. Held while memory goes to sleep, so that no block begins on segments that are going; re-entrant,
        # because a sleep calls the caller's progress callback.
        self._gate = threading.RLock()
        self._idle: dict[tuple[str, Policy], list[Any]] = {}
        self._open: list[_Block] = []

    @contextmanager
    def enter(self, tag: str, policy: Policy) -> Iterator[None]:
        """Let torch's allocations of this thread on the device come from the memory, with a tag and a policy.

        Raises:
            CapabilityRefused: torch's build or settings do not allow it.
            MemoryBusy: within a block of another kind of device with the same index, or when another thread leaves the block.
        """
        self.functions.check()
        outer = _thread.innermost(self.device)
        if outer is not None and outer.pools.functions.symbols != self.functions.symbols:
            raise MemoryBusy(
                f"a pool on device {self.device} was entered within one of another kind of device",
                found="torch's allocations are told apart by the device's index alone",
                hint="Leave the outer pool first",
            )
        block = self._open_block(tag, policy)
        self._put_in_effect(block, instead_of=outer)
        _thread.blocks.append(block)
        try:
            yield
        finally:
            self._leave(block)

    @contextmanager
    def quiet(self, tags: frozenset[str] | None) -> Iterator[None]:
        """Hold off new blocks and give unused segments back, for the time of a sleep; raises MemoryBusy while a block of the tags is open.

        Torch would cut new tensors from the sleeping segments of an open block.
        """
        with self._gate:
            busy = sorted({block.key[0] for block in self._open if tags is None or block.key[0] in tags})
            if busy:
                raise MemoryBusy(
                    f"cannot sleep while torch allocates from a pool of the tag '{busy[0]}'",
                    found="a `with pool(...)` block is open",
                    hint="Leave it first",
                )
            self.trim()
            yield

    def trim(self) -> None:
        """Give back the segments that hold no tensor, of torch pools that no block uses.

        Torch keeps them for later tensors, and gives them back only at the end of their pool, which is therefore replaced. A segment
        of a replaced pool that holds a tensor goes back when that is gone and torch's cache is emptied, as `trim` does.
        """
        self._drop_idle(lambda pool: any(segment["active_size"] == 0 for segment in self.functions.segments(pool)))

    def close(self) -> None:
        """Give back all segments that hold no tensor."""
        self._drop_idle(lambda pool: True)

    def _drop_idle(self, wanted: Callable[[Any], bool]) -> None:
        with self._gate:
            used_before = bool(self._idle)
            self._idle = {key: self._kept(pools, wanted) for key, pools in self._idle.items()}
        if used_before:
            self.functions.empty_cache()

    def _kept(self, pools: Sequence[Any], wanted: Callable[[Any], bool]) -> list[Any]:
        kept = []
        for pool in pools:
            if wanted(pool):
                _torch_objects.drop(pool)
            else:
                kept.append(pool)
        return kept

    def _open_block(self, tag: str, policy: Policy) -> _Block:
        with self._gate:
            block = _Block(self, (tag, policy), self._take(tag, policy))
            self._open.append(block)
            return block

    def _take(self, tag: str, policy: Policy) -> Any:
        """Return a torch pool that no block uses and whose segments are awake."""
        idle = self._idle.get((tag, policy), [])
        for position, pool in enumerate(idle):
            if not any(self.memory.is_asleep(segment["address"]) for segment in self.functions.segments(pool)):
                return idle.pop(position)
        allocator = _torch_objects.allocator(self.memory.driver, self.functions)
        return _torch_objects.keep(self.functions.pool(allocator, self.device))

    def _put_in_effect(self, block: _Block, *, instead_of: _Block | None) -> None:
        if instead_of is not None:
            instead_of.suspend()
        try:
            block.begin()
        except BaseException:
            # Torch may have counted the pool as used: it is neither used again nor dropped.
            with self._gate:
                self._open.remove(block)
            if instead_of is not None:
                instead_of.begin()
            raise

    def _leave(self, block: _Block) -> None:
        if block.thread != threading.get_ident():
            raise MemoryBusy(
                f"the pool '{block.key[0]}' was left by another thread than entered it",
                found="torch's pools are in effect by thread",
                hint="Use `with` in one thread",
            )
        in_effect = _thread.innermost(self.device) is block
        _thread.blocks.remove(block)
        try:
            block.suspend()
        finally:
            with self._gate:
                self._open.remove(block)
                self._idle.setdefault(block.key, []).append(block.torch_pool)
            outer = _thread.innermost(self.device)
            if in_effect and outer is not None:
                outer.begin()


class TorchPoolAllocator(VirtualAllocator, partial=True):
    """A `VirtualAllocator` for a device for which torch has a pluggable allocator: `pool` catches every torch allocation.

    Torch cuts small tensors from common segments, which sleep, and are counted, as a whole. Before a sleep, segments without
    tensors are given back.
    """

    def __init__(
        self,
        driver: DriverTable,
        *,
        device: int,
        torch_device: str,
        capabilities: MemoryCapabilities,
        functions: TorchPoolFunctions,
    ) -> None:
        """Open the device; raises DriverError. `functions` are torch's for this kind of device."""
        super().__init__(driver, device=device, torch_device=torch_device, capabilities=capabilities)
        self._torch_pools = TorchPools(self._pool, device, functions)

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Return a context in which this thread's torch allocations on the device come from this memory.

        Entering it raises CapabilityRefused where torch's build or settings do not allow it. See `TorchPools`.
        """
        return self._torch_pools.enter(tag, policy)

    def sleep(self, plan: SleepPlan) -> MemoryReport:
        """Give device memory back as planned; raises MemoryBusy while a `pool` block of a tag of the plan is open."""
        with self._torch_pools.quiet(plan.tags):
            return super().sleep(plan)

    def vendor_trim(self) -> None:
        """Give back what torch holds for later tensors; see `TorchPools.trim`."""
        self._torch_pools.trim()

    def close(self) -> None:
        """Give everything back that nobody uses, and refuse new memory."""
        self._torch_pools.close()
        super().close()
