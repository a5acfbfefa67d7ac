"""Torch's pools by tag and policy, over a stand-in for torch that keeps torch's rules: one pool per thread, no pool entered twice."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.interfaces import Policy
from hardpoint.interfaces.errors import CapabilityRefused, MemoryBusy
from hardpoint.memory import TorchPoolFunctions, VirtualPool, include_dir
from hardpoint.memory.torch_graph_pool import TorchGraphPool
from hardpoint.memory.torch_pool import TorchPools
from hardpoint_cpu.driver import driver_table

MIB = 1 << 20
SYMBOLS = ("hp_test_malloc", "hp_test_free")


@dataclass(eq=False)
class Pool:
    """A pool of the stand-in: the addresses that it holds, each with the bytes in use, and the sizes of all."""

    entered: bool = False
    held: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


class Torch:
    """The stand-in: allocates from the pool that the thread is in, by the C functions of a library."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._malloc, self._free = loaded.hp_test_malloc, loaded.hp_test_free
        self._malloc.argtypes, self._malloc.restype = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._active = threading.local()
        self.pools: list[Pool] = []
        self.refuses = False

    def functions(self, symbols: tuple[str, str] = SYMBOLS) -> TorchPoolFunctions:
        return TorchPoolFunctions(
            symbols=symbols,
            allocator=lambda path, malloc, free: (path, malloc, free),
            pool=self._new_pool,
            use=self._use,
            segments=lambda pool: [
                {"address": one, "active_size": size, "total_size": pool.sizes[one]} for one, size in pool.held.items()
            ],
            empty_cache=lambda: None,
            synchronize=lambda device: None,
            check=lambda: None,
        )

    def _new_pool(self, allocator: Any, device: int) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    @contextmanager
    def _use(self, pool: Pool, device: int) -> Iterator[None]:
        if self.refuses or pool.entered or getattr(self._active, "pool", None) is not None:
            raise RuntimeError("a pool is entered already")
        pool.entered, self._active.pool = True, pool
        try:
            yield
        finally:
            pool.entered, self._active.pool = False, None

    def allocate(self, mib: int = 2) -> int:
        address: int = self._malloc(mib * MIB, 0, None)
        self._active.pool.held[address] = self._active.pool.sizes[address] = mib * MIB
        return address


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver's library as far as torch is concerned."""
    output = tmp_path_factory.mktemp("library") / "driver.so"
    source = '#include "hardpoint/torch_allocator.h"\nHP_TORCH_ALLOCATOR(test)\n'
    command = ["cc", "-shared", "-fPIC", f"-I{include_dir()}", "-o", str(output), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return output


@pytest.fixture
def torch(library: Path) -> Torch:
    return Torch(library)


@pytest.fixture
def memory(library: Path) -> Any:
    pool = VirtualPool(driver_table(options={"budget": 256 * MIB}))
    return SimpleNamespace(driver=SimpleNamespace(module=library), native=pool.native, stats=pool.stats)


@pytest.fixture
def pools(memory: Any, torch: Torch) -> TorchPools:
    return TorchPools(memory.driver, memory.native, 0, torch.functions())


def allocated(memory: Any) -> dict[str, int]:
    return {tag: books.allocated // MIB for tag, books in memory.stats().tags.items() if books.allocated}


def test_one_torch_pool_serves_a_tag_and_policy(pools: TorchPools, torch: Torch, memory: Any) -> None:
    for tag, policy in [("a", Policy.PRESERVE), ("a", Policy.DISCARD), ("b", Policy.PRESERVE), ("a", Policy.PRESERVE)]:
        with pools.context(tag, policy):
            torch.allocate()
    assert len(torch.pools) == 3
    assert allocated(memory) == {"a": 6, "b": 2}


def test_blocks_nest_although_torch_does_not(pools: TorchPools, torch: Torch, memory: Any) -> None:
    outer, inner = pools.context("outer", Policy.PRESERVE), pools.context("inner", Policy.PRESERVE)
    with outer:
        with inner, outer:
            torch.allocate(2)
        torch.allocate(4)
        with inner:
            torch.allocate(6)
    assert allocated(memory) == {"outer": 6, "inner": 6}


def test_blocks_left_in_another_order_end_apart(pools: TorchPools, torch: Torch, memory: Any) -> None:
    first, second = pools.context("first", Policy.PRESERVE), pools.context("second", Policy.PRESERVE)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.allocate(2)
    second.__exit__(None, None, None)
    assert allocated(memory) == {"second": 2}
    assert not any(pool.entered for pool in torch.pools)


def test_leaving_what_was_not_entered_is_refused(pools: TorchPools) -> None:
    with pytest.raises(MemoryBusy, match="has not entered it"):
        pools.context("a", Policy.PRESERVE).__exit__(None, None, None)


def test_pool_of_another_kind_of_device_with_the_same_index_is_refused(
    pools: TorchPools, torch: Torch, memory: Any
) -> None:
    other = TorchPools(memory.driver, memory.native, 0, torch.functions(("hp_other_malloc", "hp_other_free")))
    with pools.context("a", Policy.PRESERVE):
        with pytest.raises(MemoryBusy, match="another kind of device"):
            other.context("a", Policy.PRESERVE).__enter__()
        torch.allocate(2)
    assert allocated(memory) == {"a": 2}


def test_block_that_torch_refuses_leaves_the_outer_one_in_effect(pools: TorchPools, torch: Torch, memory: Any) -> None:
    inner = pools.context("inner", Policy.PRESERVE)
    with inner:
        pass
    with pools.context("outer", Policy.PRESERVE):
        broken = torch.pools[0]
        broken.entered = True
        with pytest.raises(RuntimeError, match="entered already"):
            inner.__enter__()
        torch.allocate(2)
        with inner:
            torch.allocate(4)
    assert allocated(memory) == {"outer": 2, "inner": 4}
    assert broken.held == {}


def test_what_torch_cannot_do_is_refused_before_anything_is_done(memory: Any, torch: Torch) -> None:
    def refuse() -> None:
        raise CapabilityRefused("no", ["torch is not built for it"])

    pools = TorchPools(memory.driver, memory.native, 0, replace(torch.functions(), check=refuse))
    with pytest.raises(CapabilityRefused):
        pools.context("a", Policy.PRESERVE).__enter__()
    assert torch.pools == []


def test_trim_replaces_pools_with_a_segment_that_holds_no_tensor(pools: TorchPools, torch: Torch, memory: Any) -> None:
    context = pools.context("a", Policy.PRESERVE)
    with context:
        address = torch.allocate()
    pools.trim()
    with context:
        pass
    assert len(torch.pools) == 1
    torch.pools[0].held[address] = 0
    pools.trim()
    with context:
        pass
    assert len(torch.pools) == 2


def test_sleep_is_refused_while_a_block_of_its_tags_is_open(pools: TorchPools) -> None:
    with pools.context("a", Policy.PRESERVE):
        with pytest.raises(MemoryBusy, match="'a'"), pools.quiet(None):
            pass
        with pools.quiet(frozenset({"b"})):
            pass
    with pools.quiet(None):
        pass


def test_graph_pool_keeps_what_no_tensor_uses_until_it_is_closed(pools: TorchPools, torch: Torch, memory: Any) -> None:
    graphs = TorchGraphPool(pools, "graphs")
    with graphs.allocating():
        first = torch.allocate(4)
    torch.pools[0].held[first] = 0  # its tensor is gone; what was captured uses it still
    pools.trim()
    with pools.context("graphs", Policy.PRESERVE):
        torch.allocate()
    assert len(torch.pools) == 2, "others of the tag have a pool of their own"
    assert allocated(memory) == {"graphs": 6}
    assert graphs.mapped_bytes() == 4 * MIB
    dropped = weakref.ref(torch.pools[0])
    torch.pools[0] = Pool()
    graphs.close()
    graphs.close()
    gc.collect()
    assert dropped() is None
    assert graphs.mapped_bytes() == 0


def test_capture_takes_segments_by_itself_and_holds_off_sleep(pools: TorchPools, torch: Torch, memory: Any) -> None:
    graphs = TorchGraphPool(pools, "graphs")
    with graphs.capturing():
        assert not torch.pools[0].entered
        torch._active.pool = torch.pools[0]  # as torch's capture does
        torch.allocate(8)
        torch._active.pool = None
        with pytest.raises(MemoryBusy), pools.quiet(frozenset({"graphs"})):
            pass
    assert allocated(memory) == {"graphs": 8}
    with pools.quiet(None):
        pass


def test_graph_pool_is_refused_where_torch_has_no_pools(pools: TorchPools) -> None:
    def refuse() -> None:
        raise CapabilityRefused("no pools", ["the build has none"])

    pools.functions = replace(pools.functions, check=refuse)
    with pytest.raises(CapabilityRefused, match="the build has none"):
        TorchGraphPool(pools, "graphs")
