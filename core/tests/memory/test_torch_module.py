"""Torch's functions for a device by the names in its module, over stand-ins for the module and for torch's build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from hardpoint.interfaces.errors import CapabilityRefused, DriverError
from hardpoint.memory import TorchPoolFunctions, check_torch_build

NAME = "torch_stand_in.device"
SETTINGS = ("PYTORCH_TEST_ALLOC_CONF", "PYTORCH_TEST_OLD_ALLOC_CONF")
SEGMENTS = {0x1000: (0, 0), 0x2000: (0, 300), 0x3000: (1, 300), 0x4000: (0, 300)}
"""Addresses, each with the id of its pool."""


@dataclass(frozen=True)
class Allocator:
    """The stand-in's pluggable allocator."""

    library: str
    malloc: str
    free: str

    def allocator(self) -> Allocator:
        return self


@dataclass(eq=False)
class Machine:
    """What the stand-in's functions note."""

    device: int = 0
    pools: list[tuple[int, Allocator]] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    emptied: int = 0
    started: bool = True
    synchronized: list[int] = field(default_factory=list)
    broken: bool = False
    allocator: str = "native"

    @contextmanager
    def use_device(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def pool(self, allocator: Allocator) -> Machine:
        self.pools.append((self.device, allocator))
        return self

    @contextmanager
    def use_pool(self, pool: Machine, device: int) -> Iterator[None]:
        self.entered.append(device)
        yield

    @property
    def id(self) -> tuple[int, int]:
        return 0, 300

    def snapshot(self) -> None:
        pytest.fail("torch gives back references of the id that it does not own")

    def empty_cache(self) -> None:
        self.emptied += 1

    def synchronize(self, device: int) -> None:
        if self.broken:
            raise RuntimeError("the device is lost\nand more")
        self.synchronized.append(device)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The modules, as torch would come with them."""
    noted = Machine()
    memory: Any = ModuleType(f"{NAME}.memory")
    memory.TestPluggableAllocator, memory.MemPool, memory.use_mem_pool = Allocator, noted.pool, noted.use_pool
    memory._snapshot = lambda: {"segments": [{"segment_pool_id": one, "address": at} for at, one in SEGMENTS.items()]}
    device: Any = ModuleType(NAME)
    device.device, device.empty_cache, device.memory = noted.use_device, noted.empty_cache, memory
    device.synchronize, device.is_initialized = noted.synchronize, lambda: noted.started
    device.get_allocator_backend = lambda: noted.allocator
    for module in (ModuleType(NAME.split(".")[0]), device, memory):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.version, "test", "1.0", raising=False)
    return noted


def functions(name: str = NAME) -> TorchPoolFunctions:
    return TorchPoolFunctions.of_module(
        name, backend="test", pluggable_allocator="TestPluggableAllocator", check=lambda: None
    )


def check(version: str = "test") -> None:
    check_torch_build(NAME, backend="ours", platform="Test", version=version, variables=SETTINGS)


def test_module_is_not_imported_before_a_function_is_called() -> None:
    late = functions("torch_stand_in_that_is_missing")
    with pytest.raises(ModuleNotFoundError):
        late.empty_cache()


def test_pool_is_made_over_the_drivers_symbols_on_its_device(machine: Machine) -> None:
    made = functions()
    made.pool(made.allocator("driver.so", *made.symbols), 3)
    assert machine.pools == [(3, Allocator("driver.so", "hp_test_malloc", "hp_test_free"))]
    assert machine.device == 0


def test_pool_is_used_described_and_emptied_by_the_modules_functions(machine: Machine) -> None:
    made = functions()
    with made.use(machine, 2):
        assert machine.entered == [2]
    assert [one["address"] for one in made.segments(machine)] == [0x2000, 0x4000]
    made.empty_cache()
    assert machine.emptied == 1


def test_torchs_work_is_waited_for_once_torch_has_started_the_device(machine: Machine) -> None:
    functions("torch_stand_in_that_is_missing").synchronize(1)
    machine.started = False
    functions().synchronize(2)
    assert machine.synchronized == []
    machine.started = True
    functions().synchronize(3)
    assert machine.synchronized == [3]


def test_device_that_torch_cannot_wait_for_is_a_driver_error(machine: Machine) -> None:
    machine.broken = True
    with pytest.raises(DriverError, match="the device is lost"):
        functions().synchronize(0)


def test_build_with_native_allocator_is_accepted(machine: Machine) -> None:
    check()


def test_build_without_the_platform_is_refused(machine: Machine) -> None:
    with pytest.raises(CapabilityRefused, match="is built without Test"):
        check(version="absent")


def test_allocator_without_pools_is_refused_and_the_settings_named(machine: Machine) -> None:
    machine.allocator = "async"
    with pytest.raises(CapabilityRefused, match="allocator is 'async', which has no pools") as caught:
        check()
    assert " and ".join(SETTINGS) in str(caught.value)
