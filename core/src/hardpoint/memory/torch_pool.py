"""Torch's own allocations from Hardpoint's memory, on devices for which torch has a pluggable allocator.

Torch asks a plain C symbol of the driver's library for segments (`include/hardpoint/torch_allocator.h`) and cuts tensors from them by
its caching allocator, separately for each of its memory pools. A segment has one tag and one policy, hence one torch pool for
each of these. What torch calls its functions differs by device: a backend passes them in, or the names of them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint import _native
from hardpoint.interfaces.allocator import Policy, SleepPlan
from hardpoint.interfaces.capabilities import MemoryCapabilities, TorchPoolScope
from hardpoint.interfaces.errors import CapabilityRefused, DriverError, MemoryBusy
from hardpoint.memory.driver_table import DriverTable
from hardpoint.memory.torch_graph_pool import TorchGraphPool
from hardpoint.memory.virtual import VirtualAllocator

if TYPE_CHECKING:
    from torch import Tensor

_EXPANDABLE = re.compile(r"(?<!\w)expandable_segments:(\w+)")


@dataclass(frozen=True)
class TorchPoolFunctions:
    """Torch's functions for one kind of device.

    Attributes:
        symbols: the driver library's functions for torch: allocate, free.
        allocator: torch's pluggable allocator over a library's two functions (path, allocate, free).
        pool: a new pool of torch over a pluggable allocator, for the device with an index.
        use: a context in which this thread's allocations on the device with an index come from a pool.
        segments: torch's description of a pool's segments: `address`, `total_size`, and `active_size`, the bytes of tensors in it.
        empty_cache: let torch give back what no tensor uses.
        synchronize: wait for torch's work on the device with an index. Some builds queue operators on the host, where a driver does
            not see them.
        check: raise CapabilityRefused where torch's build or settings do not allow pools (see `refuse_expandable_segments`).
        settled: a context in which settings that do not go with pools are out of force (see `without_expandable_segments`).
    """

    symbols: tuple[str, str]
    allocator: Callable[[str, str, str], Any]
    pool: Callable[[Any, int], Any]
    use: Callable[[Any, int], AbstractContextManager[None]]
    segments: Callable[[Any], Sequence[Mapping[str, Any]]]
    empty_cache: Callable[[], None]
    synchronize: Callable[[int], None]
    check: Callable[[], None]
    settled: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of_module(
        cls,
        name: str,
        *,
        backend: str,
        pluggable_allocator: str,
        check: Callable[[], None],
        settled: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> TorchPoolFunctions:
        """Return the functions of torch's module for a device, which is imported when one of them is called.

        Args:
            name: the module. It has `device` and `empty_cache`, and its module `memory` has `MemPool`, `use_mem_pool`, `_snapshot` and
                the pluggable allocator.
            backend: the name that the driver's source gives HP_TORCH_ALLOCATOR.
            pluggable_allocator: name of the pluggable allocator's class.
            check, settled: see the attributes.
        """

        def memory() -> Any:
            return import_module(f"{name}.memory")

        def pool(allocator: Any, device: int) -> Any:
            with import_module(name).device(device):  # a pool is of the current device
                return memory().MemPool(allocator.allocator())

        def segments(pool: Any) -> list[Mapping[str, Any]]:
            # Of all pools: asked for one alone (`pool.snapshot()`), torch gives back references that it does not own, to the numbers
            # of the pool's id and to True, up to 2.13 at least (pytorch#196366). Numbers above 256 are freed twice then.
            return [one for one in memory()._snapshot()["segments"] if tuple(one["segment_pool_id"]) == tuple(pool.id)]

        return cls(
            symbols=(f"hp_{backend}_malloc", f"hp_{backend}_free"),
            allocator=lambda library, malloc, free: getattr(memory(), pluggable_allocator)(library, malloc, free),
            pool=pool,
            use=lambda pool, device: memory().use_mem_pool(pool, device),
            segments=segments,
            empty_cache=lambda: import_module(name).empty_cache(),
            synchronize=partial(_synchronize, name),
            check=check,
            settled=settled,
        )


def _synchronize(name: str, device: int) -> None:
    """Wait for torch's work on a device, if torch's module for it has been started; raises DriverError."""
    module = sys.modules.get(name)
    if module is None or not module.is_initialized():
        return
    try:
        module.synchronize(device)
    except RuntimeError as error:
        raise DriverError(f"{name}.synchronize", -1, str(error).splitlines()[0]) from error


def torch_has_library(name: str) -> bool:
    """Return whether the installed torch comes with a library of this file name; torch is not imported."""
    torch = find_spec("torch")
    return any((Path(folder) / "lib" / name).exists() for folder in (torch and torch.submodule_search_locations) or ())


def torch_platform_version(name: str) -> tuple[int, ...]:
    """Return the version of the platform that the installed torch is built with; () where it is built without. Torch is not imported.

    Args:
        name: of the platform in `torch.version`.
    """
    torch = find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        file = Path(folder) / "version.py"
        found = re.search(
            rf"^{name}\b[^=]*= *'([\d.]+)'", file.read_text("utf-8") if file.exists() else "", re.MULTILINE
        )
        if found:
            return tuple(map(int, found[1].strip(".").split(".")))
    return ()


def check_torch_build(name: str, *, backend: str, platform: str, version: str, variables: Sequence[str]) -> None:
    """Raise CapabilityRefused where torch is built without a platform, or its allocator for it is set to one without pools.

    Args:
        name: torch's module for the device, which tells the allocator in force.
        backend: name of our backend.
        platform: what torch is to be built for, as its users call it.
        version: the name in `torch.version` that is None in builds without the platform.
        variables: the environment variables that torch reads its allocator settings from.
    """
    import torch

    problem = f"torch cannot allocate from a pool of the backend '{backend}'"
    if getattr(torch.version, version, None) is None:
        raise CapabilityRefused(
            problem,
            [f"torch {torch.__version__} is built without {platform}"],
            hint=f"Install torch's build for {platform}",
        )
    device = import_module(name)
    allocator = device.get_allocator_backend()
    if allocator != "native":
        raise CapabilityRefused(
            problem,
            [f"torch's allocator is '{allocator}', which has no pools"],
            hint=f"Remove `backend:` from {' and '.join(variables)}",
        )


class _ExpandableSegments:
    """Torch's expandable segments, which it maps by itself, past every pluggable allocator. Process-wide, as the setting is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._users = 0
        self._settings: tuple[str, str] | None = None

    @contextmanager
    def off(self, in_force: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Have them switched off, if they are in force, until the last of those who need it leaves.

        Args:
            in_force: torch's description of its allocator's settings.
        """
        with self._lock:
            if not self._users and (settings := in_force())["expandable_segments"]:
                before = _given_last(settings)
                # A call puts options that it does not name back to their defaults; of those that it names twice, the last counts.
                wanted = [f"{before},expandable_segments:{value}".lstrip(",") for value in (False, True)]
                self._settings = wanted[0], before if _expandable(before) else wanted[1]
                _set(wanted[0])
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._settings is not None:
                    # Settings that somebody gave meanwhile stand.
                    if _given_last(in_force()) == self._settings[0]:
                        _set(self._settings[1])
                    self._settings = None


_expandable_segments = _ExpandableSegments()


def without_expandable_segments(name: str) -> AbstractContextManager[None]:
    """Return a context in which torch's allocator keeps every setting but expandable segments, which are off; afterwards on again.

    Other threads' allocations take plain segments meanwhile.

    Args:
        name: torch's module for the device, which tells the settings in force.
    """
    module = import_module(name)
    return _expandable_segments.off(lambda: module.memory._snapshot()["allocator_settings"])


def _given_last(settings: Mapping[str, Any]) -> str:
    """Return what torch was given last, by its environment or a call: the one text among its settings."""
    return next((value for value in settings.values() if isinstance(value, str)), "")


def _set(settings: str) -> None:
    import torch

    torch._C._accelerator_setAllocatorSettings(settings)


def refuse_expandable_segments(variables: Sequence[str]) -> None:
    """Raise CapabilityRefused when torch is set to expandable segments, and cannot be told otherwise without loss of other settings.

    Args:
        variables: the environment variables that torch reads its allocator settings from, the one that counts most first.
    """
    asked = {name: os.environ[name] for name in variables if _expandable(os.environ.get(name, ""))}
    called = _settings_of_calls()
    if not (bool(asked) if _expandable(called) is None else _expandable(called)):
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


class _Context(AbstractContextManager[None]):
    """What `pool` returns; it may be entered any number of times, by any thread.

    Attributes:
        torch_pool: the one to allocate from; None for whichever is free.
        is_routed: the thread's allocations go to the torch pool; else a capture sees to that.
    """

    def __init__(
        self, pools: TorchPools, key: tuple[str, Policy], torch_pool: Any = None, *, is_routed: bool = True
    ) -> None:
        self.key = key
        self.torch_pool = torch_pool
        self.is_routed = is_routed
        self._pools = pools

    def __enter__(self) -> None:
        self._pools.enter(self)

    def __exit__(self, *_: object) -> None:
        self._pools.leave(self)


@dataclass(eq=False)
class _Block:
    """One thread's stay in a context, with the torch pool for it; `in_torch` is what to undo while the block is in effect."""

    pools: TorchPools
    context: _Context
    torch_pool: Any
    in_torch: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        tag, policy = self.context.key
        with ExitStack() as undo:
            _native.enter_torch_pool(self.pools.memory, self.pools.device, tag, policy)
            undo.callback(_native.leave_torch_pool, self.pools.device)
            undo.enter_context(self.pools.functions.settled())
            if self.context.is_routed:
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

    def __init__(
        self, driver: DriverTable, memory: _native.MemoryPool, device: int, functions: TorchPoolFunctions
    ) -> None:
        """Connect nothing yet: torch is asked when a block is entered.

        Args:
            driver: the memory's, whose library torch is given.
            memory: where the segments come from.
            device: the device's index as torch counts.
            functions: torch's functions for the device.
        """
        self._driver = driver
        self.memory = memory
        self.device = device
        self.functions = functions
        # Guards the next two. Held while memory goes to sleep, so that no block begins on segments that are going; re-entrant,
        # because a sleep calls the caller's progress callback.
        self._gate = threading.RLock()
        self._idle: dict[tuple[str, Policy], list[Any]] = {}
        self._open: list[_Block] = []

    def context(
        self, tag: str, policy: Policy, torch_pool: Any = None, *, is_routed: bool = True
    ) -> AbstractContextManager[None]:
        """Return a context in which torch's allocations of the thread on the device come from the memory, with a tag and a policy.

        Args:
            torch_pool: one of `make`, which nobody else allocates from; None for one that is kept for later blocks.
            is_routed: False where a capture into the torch pool routes the allocations itself.
        """
        return _Context(self, (tag, policy), torch_pool, is_routed=is_routed)

    def enter(self, context: _Context) -> None:
        """Begin a block of this thread.

        Raises:
            CapabilityRefused: torch's build or settings do not allow it.
            MemoryBusy: within a block of another kind of device with the same index.
        """
        self.functions.check()
        outer = _thread.innermost(self.device)
        if outer is not None and outer.pools.functions.symbols != self.functions.symbols:
            raise MemoryBusy(
                f"a pool on device {self.device} was entered within one of another kind of device",
                found="torch's allocations are told apart by the device's index alone",
                hint="Leave the outer pool first",
            )
        block = self._open_block(context)
        self._put_in_effect(block, instead_of=outer)
        _thread.blocks.append(block)

    def leave(self, context: _Context) -> None:
        """End this thread's latest block of a context; raises MemoryBusy when it has none."""
        block = next((block for block in reversed(_thread.blocks) if block.context is context), None)
        if block is None:
            raise MemoryBusy(
                f"the pool '{context.key[0]}' was left by a thread that has not entered it",
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
                if context.torch_pool is None:
                    self._idle.setdefault(context.key, []).append(block.torch_pool)
            outer = _thread.innermost(self.device)
            if in_effect and outer is not None:
                outer.begin()

    @contextmanager
    def quiet(self, tags: frozenset[str] | None) -> Iterator[None]:
        """Hold off new blocks and give unused segments back, for the time of a sleep; raises MemoryBusy while a block of the tags is open.

        Torch would cut new tensors from the sleeping segments of an open block.
        """
        with self._gate:
            names = {block.context.key[0] for block in self._open}
            busy = sorted(names if tags is None else names & tags)
            if busy:
                raise MemoryBusy(
                    f"cannot sleep while torch allocates from a pool of the tag '{busy[0]}'",
                    found="a `with pool(...)` block is open",
                    hint="Leave it first",
                )
            self.trim()
            yield

    def synchronize(self) -> None:
        """Wait for torch's work on the device; raises DriverError."""
        self.functions.synchronize(self.device)

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

    def _open_block(self, context: _Context) -> _Block:
        with self._gate:
            block = _Block(self, context, context.torch_pool or self._take(context.key))
            self._open.append(block)
            return block

    def _take(self, key: tuple[str, Policy]) -> Any:
        """Return a torch pool that no block uses and whose segments are awake."""
        idle = self._idle.get(key, [])
        for position, pool in enumerate(idle):
            if not any(self.memory.is_asleep(segment["address"]) for segment in self.functions.segments(pool)):
                return idle.pop(position)
        return self.make()

    def make(self) -> Any:
        """Return a new torch pool over the memory, which lives until `end`."""
        allocator = _torch_objects.allocator(self._driver, self.functions)
        return _torch_objects.keep(self.functions.pool(allocator, self.device))

    def end(self, torch_pool: Any) -> None:
        """Let a pool of `make` go; its memory returns when nothing in torch uses it and torch's cache is emptied."""
        _torch_objects.drop(torch_pool)

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


class TorchPoolAllocator(VirtualAllocator, partial=True, beside=frozenset({"graph_pool", "trim"})):
    """A `VirtualAllocator` for a device for which torch has a pluggable allocator: `pool` catches every torch allocation.

    Torch cuts small tensors from common segments, which sleep, and are counted, as a whole. Before a sleep, segments without
    tensors are given back.

    Beside the contract it has a pool for captured work (`graph_pool`), which `hardpoint.worker.TorchGraphRunner` asks for,
    and `trim`.
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
        self._torch_pools = TorchPools(driver, self.native, device, functions)

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Return a context in which this thread's torch allocations on the device come from this memory.

        Entering it raises CapabilityRefused where torch's build or settings do not allow it. See `TorchPools`.
        """
        if self.capabilities().torch_pool is not TorchPoolScope.ALL:
            self._torch_pools.functions.check()  # knows the reason
            return super().pool(tag, policy)
        return self._torch_pools.context(tag, policy)

    @contextmanager
    def _quiet(self, plan: SleepPlan) -> Iterator[None]:
        """Give unused segments back and let no `pool` block begin; raises MemoryBusy while one of a tag of the plan is open.

        Blocks that begin between the phases of a sleep take none of its segments, since those count as asleep already.
        """
        with self._torch_pools.quiet(plan.tags):
            self._torch_pools.synchronize()
            yield

    def resize(self, tensor: Tensor, rows: int) -> Tensor:
        """Grow or shrink an elastic tensor along its first axis, in place, and return it in its new extent."""
        self._torch_pools.synchronize()
        return super().resize(tensor, rows)

    def graph_pool(self, tag: str) -> TorchGraphPool:
        """Return a new pool for captured work, with a tag that sleep preserves; raises CapabilityRefused as `pool` does."""
        return TorchGraphPool(self._torch_pools, tag)

    def trim(self) -> None:
        """Give back what torch holds for later tensors; see `TorchPools.trim`."""
        self._torch_pools.trim()

    def close(self) -> None:
        """Give everything back that nobody uses, and refuse new memory."""
        self._torch_pools.close()
        super().close()
