"""The C functions that torch calls for memory, called as torch does, over every vendor's simulated driver; no torch is needed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from hardpoint import _native
from hardpoint.interfaces import Policy, SleepPlan
from hardpoint.memory import VirtualPool
from hardpoint.memory.driver_table import DriverTable
from hardpoint_simulators import Simulator

MIB = 1 << 20
CREATE = {"cuda": ("cuMemCreate", 2), "rocm": ("hipMemCreate", 2), "ascend": ("aclrtMallocPhysical", 207001)}
NO_STREAM = None


class Torch:
    """What torch does with a driver library: it looks the two functions up, and calls them."""

    def __init__(self, vendor: str, module: str) -> None:
        library = ctypes.CDLL(module)
        self._malloc: Callable[..., int | None] = library[f"hp_{vendor}_malloc"]
        self._malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]  # type: ignore[attr-defined]
        self._malloc.restype = ctypes.c_void_p  # type: ignore[attr-defined]
        self._free: Callable[..., None] = library[f"hp_{vendor}_free"]
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]  # type: ignore[attr-defined]
        self._free.restype = None  # type: ignore[attr-defined]
        library.hp_torch_install.argtypes = [ctypes.c_void_p]
        library.hp_torch_install.restype = None
        library.hp_torch_install(_native.torch_functions())

    def malloc(self, size: int, device: int = 0) -> int | None:
        return self._malloc(size, device, NO_STREAM)

    def free(self, address: int, size: int = 0, device: int = 0) -> None:
        self._free(address, size, device, NO_STREAM)


class Machine:
    """One vendor's simulated device, our engine's memory on it, and torch's way in."""

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor
        self.simulator = Simulator(vendor)  # type: ignore[arg-type]
        self.driver: DriverTable = import_module(f"hardpoint_{vendor}.allocator").driver_table(0)
        self.memory = VirtualPool(self.driver)
        self.torch = Torch(vendor, str(self.driver.module))
        self.used_before = self.simulator.used()

    def enter(self, tag: str, policy: Policy = Policy.PRESERVE, device: int = 0) -> None:
        _native.enter_torch_pool(self.memory.native, device, tag, policy)

    def allocated(self, tag: str) -> int:
        books = self.memory.stats().tags.get(tag)
        return books.allocated if books else 0

    def fail_create(self, times: int) -> None:
        call, code = CREATE[self.vendor]
        self.simulator.fail(call, code=code, times=times)


@pytest.fixture(params=sorted(CREATE))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    vendor: str = request.param
    monkeypatch.setenv(f"HARDPOINT_{vendor.upper()}_DRIVER", str(Simulator(vendor).path))  # type: ignore[arg-type]
    made = Machine(vendor)
    yield made
    made.simulator.clear_faults()
    for device in (0, 1):
        for _ in range(3):
            _native.leave_torch_pool(device)
    made.memory.close()


def take(machine: Machine, mib: int = 2, device: int = 0) -> int:
    address = machine.torch.malloc(mib * MIB, device)
    assert address is not None
    return address


def test_without_a_pool_there_is_no_memory(machine: Machine) -> None:
    assert machine.torch.malloc(2 * MIB) is None


def test_memory_has_the_tag_and_policy_of_the_block_and_goes_back(machine: Machine) -> None:
    machine.enter("weights")
    weights = take(machine, 4)
    _native.leave_torch_pool(0)
    machine.enter("kv_cache", Policy.DISCARD)
    cache = take(machine, 6)
    assert (machine.allocated("weights"), machine.allocated("kv_cache")) == (4 * MIB, 6 * MIB)
    report = machine.memory.sleep(SleepPlan())
    assert (report.preserved, report.discarded) == (4 * MIB, 6 * MIB)
    assert machine.simulator.used() == machine.used_before
    machine.memory.wake()
    for address in (weights, cache):
        machine.torch.free(address)
    assert machine.memory.stats().allocated == 0
    assert machine.simulator.used() == machine.used_before


def test_sizes_that_are_no_sizes_give_null(machine: Machine) -> None:
    machine.enter("weights")
    assert machine.torch.malloc(0) is None
    assert machine.torch.malloc(-1) is None
    assert machine.torch.malloc(1 << 62) is None


def test_failing_creation_gives_null_and_the_next_call_works(machine: Machine) -> None:
    machine.enter("weights")
    machine.fail_create(times=1)
    assert machine.torch.malloc(2 * MIB) is None
    assert machine.simulator.used() == machine.used_before
    machine.torch.free(take(machine))


def test_more_than_the_device_has_gives_null(machine: Machine) -> None:
    machine.enter("weights")
    assert machine.torch.malloc(machine.simulator.capacity + 2 * MIB) is None


def test_free_of_null_twice_or_of_foreign_memory_does_nothing(machine: Machine) -> None:
    machine.enter("weights")
    kept, freed = take(machine), take(machine)
    machine.torch.free(0)
    machine.torch.free(freed)
    machine.torch.free(freed)
    machine.torch.free(kept + 512)
    assert machine.allocated("weights") == 2 * MIB
    machine.torch.free(kept)


def test_memory_may_be_freed_while_asleep(machine: Machine) -> None:
    machine.enter("weights")
    kept, freed = take(machine, 2), take(machine, 4)
    machine.memory.write(kept, b"kept")
    machine.memory.sleep(SleepPlan())
    machine.torch.free(freed)
    machine.memory.wake()
    assert machine.memory.read(kept, 4) == b"kept"
    assert machine.simulator.used() - machine.used_before == 2 * MIB
    machine.torch.free(kept)


def test_innermost_block_of_the_device_counts(machine: Machine) -> None:
    machine.enter("outer")
    machine.enter("inner")
    addresses = [take(machine, 2)]
    _native.leave_torch_pool(0)
    addresses.append(take(machine, 4))
    assert (machine.allocated("inner"), machine.allocated("outer")) == (2 * MIB, 4 * MIB)
    for address in addresses:
        machine.torch.free(address)


def test_blocks_of_two_devices_are_left_in_any_order(machine: Machine) -> None:
    machine.enter("first", device=0)
    machine.enter("second", device=1)
    _native.leave_torch_pool(0)
    assert machine.torch.malloc(2 * MIB, 0) is None
    address = take(machine, device=1)
    assert machine.allocated("second") == 2 * MIB
    _native.leave_torch_pool(1)
    assert machine.torch.malloc(2 * MIB, 1) is None
    machine.torch.free(address)


def test_threads_have_their_own_blocks(machine: Machine) -> None:
    meet = threading.Barrier(3)
    problems: list[BaseException] = []

    def allocate(tag: str, mib: int) -> None:
        try:
            for _ in range(20):
                machine.enter(tag)
                meet.wait(240)
                address = take(machine, mib)
                meet.wait(240)
                assert machine.allocated(tag) == mib * MIB
                meet.wait(240)
                machine.torch.free(address)
                _native.leave_torch_pool(0)
        except BaseException as problem:
            problems.append(problem)
            meet.abort()

    threads = [threading.Thread(target=allocate, args=one) for one in (("a", 2), ("b", 4), ("c", 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert machine.simulator.used() == machine.used_before


def test_two_engines_have_their_own_memory(machine: Machine) -> None:
    other = VirtualPool(machine.driver)
    machine.enter("weights")
    _native.enter_torch_pool(other.native, 0, "weights", Policy.PRESERVE)
    address = take(machine)
    assert (machine.allocated("weights"), other.stats().allocated) == (0, 2 * MIB)
    other.close()
    machine.torch.free(address)
    assert other.stats().allocated == 0
