"""Sleep and wake on a device: bytes, addresses, memory given back, and what happens when there is none left."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from hardpoint.interfaces import MemoryReport, Policy, SleepTier
from hardpoint.interfaces.errors import BackupStale, DeviceOutOfMemory, InvalidAllocation, MemoryAsleep
from hardpoint.memory import DriverQuirks, VirtualPool
from hardpoint_conformance.fault_matrix import World

from .targets import DEVICE, DeviceTarget
from .vendor_tools import MIB, NoTool, Use, check_freed

SAMPLE = 4096


def fill(world: World, unit: int) -> None:
    """Allocate and write something of every policy, large and small."""
    world.add(5 * unit, "weights")
    world.add(3 * unit // 2, "weights")
    world.add(100_000, "weights", shared=True)
    world.add(20_000, "buffers", shared=True)
    world.add(4 * unit, "kv_cache", Policy.DISCARD)
    world.add(unit, "scratch", Policy.ZERO)
    world.add(unit, "resident", Policy.RESIDENT)


def returned(report: MemoryReport) -> float:
    """Return the driver's count of what came back, as a share of what was unmapped."""
    return (report.free_after - report.free_before) / report.unmapped


def addresses(world: World) -> list[int]:
    return [block.address for block in world.blocks]


def set_bytes(target: DeviceTarget, address: int, size: int) -> None:
    """Write to memory as programs on the device do, past the engine."""
    stream = target.table.stream_create()
    target.table.fill(address, 0x5A, size, stream)
    target.table.stream_synchronize(stream)
    target.table.stream_destroy(stream)


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
def test_every_policy_keeps_its_promise(target: DeviceTarget, world: World, tier: SleepTier) -> None:
    fill(world, target.unit)
    for _ in range(2):
        report = world.pool.sleep(world.plan(tier=tier))
        assert returned(report) > 0.9
        assert set(report.tiers) == {tier}
        assert [b.tag for b in world.blocks if not world.pool.is_asleep(b.address)] == ["resident"]
        for block in world.blocks:
            if block.tag in ("kv_cache", "scratch"):
                block.content = bytes(SAMPLE) if block.policy is Policy.ZERO else None
        awake = [block for block in world.blocks if block.policy is not Policy.ZERO]
        kept, world.blocks = world.blocks, awake
        assert list(world.faults_of_state()) == []
        world.blocks = kept
        with pytest.raises(MemoryAsleep):
            world.pool.read(world.blocks[0].address, SAMPLE)
        world.pool.wake()
        assert list(world.faults_of_state(dict.fromkeys(addresses(world), False))) == []


def test_vendors_tool_sees_what_a_sleep_gives_back_and_a_wake_takes(target: DeviceTarget, world: World) -> None:
    """Without a device the driver's own count stands for the tool, which shows that the test works."""

    def in_use() -> Use:
        if DEVICE and not target.simulated:
            return Use.now(target.backend)
        free, total = target.table.memory_info()
        return Use("the driver", [total - free])

    try:
        in_use()
    except NoTool as reason:
        pytest.skip(f"no tool of the vendor's can be asked: {reason}")
    world.add(4 * target.unit, "weights")
    most = 4096 * MIB if DEVICE else 512 * MIB
    world.add(min(most, target.free() // 2) // target.unit * target.unit, "kv_cache", Policy.DISCARD)
    world.forget("kv_cache")
    awake = in_use()
    report = world.pool.sleep(world.plan())
    assert report.unmapped > 256 * MIB
    check_freed(awake, report.unmapped, in_use)
    asleep = in_use()
    check_freed(asleep, -world.pool.wake().unmapped, in_use)
    assert list(world.faults_of_state()) == []


def test_rebuilt_memory_is_what_its_callback_writes(target: DeviceTarget, world: World) -> None:
    block = world.add(2 * target.unit, "derived", Policy.REBUILD)
    block.content = b"\x5a" * SAMPLE
    world.pool.declare_source(block.address, block.size, lambda: set_bytes(target, block.address, block.size))
    assert world.pool.sleep(world.plan()).preserved == 0
    world.pool.wake()
    assert list(world.faults_of_state()) == []


def test_tags_wake_one_by_one_with_their_bytes(target: DeviceTarget, world: World) -> None:
    fill(world, target.unit)
    world.pool.sleep(world.plan())
    world.forget("kv_cache", "scratch")
    partial = world.pool.wake(["weights"])
    assert partial.still_asleep == {"buffers", "kv_cache", "scratch"}
    expected = {block.address: block.tag in partial.still_asleep for block in world.blocks}
    assert list(world.faults_of_state(expected)) == []
    assert world.pool.wake().still_asleep == frozenset()
    assert list(world.faults_of_state(dict.fromkeys(addresses(world), False))) == []


def test_discarded_weights_leave_memory_that_can_be_written(target: DeviceTarget, world: World) -> None:
    block = world.add(4 * target.unit, "weights")
    report = world.pool.sleep(world.plan(policies={"weights": Policy.DISCARD}))
    assert (report.preserved, returned(report) > 0.9) == (0, True)
    world.pool.wake()
    assert block.content is not None
    for offset, content in ((0, block.content), (block.size - SAMPLE, block.content[::-1])):
        world.pool.write(block.address + offset, content)
    assert list(world.faults_of_state()) == []


def test_unchanged_weights_are_not_copied_again(target: DeviceTarget, world: World) -> None:
    block = world.add(4 * target.unit, "weights")
    plan = world.plan(keep=frozenset({"weights"}))
    assert world.pool.sleep(plan).preserved == block.size
    world.pool.wake()
    second = world.pool.sleep(plan)
    assert (second.preserved, second.skipped) == (0, block.size)
    assert returned(second) > 0.9
    world.pool.wake()
    assert list(world.faults_of_state()) == []
    assert block.content is not None
    block.content = block.content[::-1]
    world.pool.write(block.address, block.content)
    world.pool.write(block.address + block.size - SAMPLE, block.content[::-1])
    assert world.pool.sleep(plan).preserved == block.size
    world.pool.wake()
    assert list(world.faults_of_state()) == []


def test_write_past_the_engine_is_found_on_request(target: DeviceTarget, world: World) -> None:
    block = world.add(2 * target.unit, "weights")
    keep = frozenset({"weights"})
    world.pool.sleep(world.plan(keep=keep))
    world.pool.wake()
    assert world.pool.sleep(world.plan(keep=keep, verify=True)).skipped == block.size
    world.pool.wake()
    set_bytes(target, block.address, SAMPLE)
    with pytest.raises(BackupStale):
        world.pool.sleep(world.plan(keep=keep, verify=True))
    block.content = None


def test_elastic_memory_grows_and_shrinks_at_its_address(target: DeviceTarget, world: World) -> None:
    if DriverQuirks.ADDRESS_HOLDS_MEMORY in target.table.quirks():
        pytest.skip("this system gives memory back only with its addresses: elastic memory is refused")
    unit = target.unit
    address = world.pool.allocate(2 * unit, "kv_cache", Policy.PRESERVE, 16 * unit)
    content = bytes(range(256)) * 16
    world.pool.write(address, content)
    small = target.free()
    world.pool.resize(address, 12 * unit)
    assert small - target.free() >= 10 * unit - target.slack
    world.pool.write(address + 12 * unit - SAMPLE, content)
    world.pool.resize(address, 2 * unit)
    assert world.pool.read(address, SAMPLE) == content
    world.pool.sleep(world.plan())
    world.pool.wake()
    assert world.pool.read(address, SAMPLE) == content
    with pytest.raises(InvalidAllocation):
        world.pool.resize(address, 17 * unit)
    world.pool.free(address)


def test_two_engines_on_two_threads_sleep_and_wake(target: DeviceTarget, new_world: Callable[[], World]) -> None:
    worlds = [new_world(), new_world()]
    for world in worlds:
        world.add(3 * target.unit, "weights")

    def cycle(world: World) -> None:
        for _ in range(5):
            world.pool.sleep(world.plan())
            world.pool.wake()
            assert list(world.faults_of_state()) == []

    with ThreadPoolExecutor(2) as executor:
        for done in [executor.submit(cycle, world) for world in worlds]:
            done.result()


def test_memory_is_taken_and_freed_while_the_engine_sleeps_and_wakes(target: DeviceTarget, world: World) -> None:
    fill(world, target.unit)
    world.forget("kv_cache", "scratch")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            world.pool.free(world.pool.allocate(target.unit, "scratch"))

    with ThreadPoolExecutor(1) as executor:
        churning = executor.submit(churn)
        for _ in range(5):
            world.pool.sleep(world.plan(tags=frozenset({"weights", "kv_cache"})))
            world.pool.wake()
        stop.set()
        churning.result()
    assert list(world.faults_of_state()) == []


@dataclass
class Hoard:
    """All memory that a device would give."""

    pool: VirtualPool
    addresses: list[int] = field(default_factory=list)

    def take(self, unit: int, free: int) -> None:
        """Allocate until the driver refuses even one unit; raises its last DeviceOutOfMemory."""
        size = max(unit, free // 8 // unit * unit)
        while True:
            try:
                self.addresses.append(self.pool.allocate(size))
            except DeviceOutOfMemory:
                if size == unit:
                    raise
                size = max(unit, size // 2 // unit * unit)

    def give_back(self) -> None:
        """Free everything."""
        for address in self.addresses:
            self.pool.free(address)
        self.addresses.clear()


@pytest.fixture
def hoard(target: DeviceTarget) -> Hoard:
    return Hoard(VirtualPool(target.table))


def test_exhausted_device_is_out_of_memory_and_nothing_is_lost(
    target: DeviceTarget, world: World, hoard: Hoard
) -> None:
    world.add(2 * target.unit, "weights")
    before = target.free()
    with pytest.raises(DeviceOutOfMemory):
        hoard.take(target.unit, before)
    assert target.free() < before // 50 + 2 * target.unit  # drivers keep a reserve
    books = hoard.pool.stats()
    assert books.allocated == sum(tag.mapped for tag in books.tags.values())
    assert sum(tag.allocations for tag in books.tags.values()) == len(hoard.addresses)
    assert list(world.faults_of_state()) == []
    hoard.pool.free(hoard.addresses.pop())
    hoard.addresses.append(hoard.pool.allocate(target.unit))
    hoard.give_back()
    assert hoard.pool.books().reserved == 0
    hoard.pool.close()
    assert target.has_free(before)


def test_wake_without_room_stays_asleep_and_succeeds_once_there_is(
    target: DeviceTarget, world: World, hoard: Hoard
) -> None:
    for _ in range(4):
        world.add(8 * target.unit, "weights")
    world.pool.sleep(world.plan())
    with pytest.raises(DeviceOutOfMemory):
        hoard.take(target.unit, target.free())
    with pytest.raises(DeviceOutOfMemory):
        world.pool.wake()
    assert list(world.faults_of_state(dict.fromkeys(addresses(world), True))) == []
    hoard.give_back()
    hoard.pool.close()
    world.pool.wake()
    assert list(world.faults_of_state(dict.fromkeys(addresses(world), False))) == []


ENDING = """
import importlib, sys
from hardpoint.interfaces import SleepPlan
from hardpoint.memory import VirtualPool
backend, index, unit, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
pool = VirtualPool(importlib.import_module(f"hardpoint_{backend}.allocator").driver_table(index))
pool.write(pool.allocate(unit, "weights"), b"a")
pool.write(pool.allocate(unit, "kv_cache"), b"b")
pool.sleep(SleepPlan(tags=frozenset({"weights"})))
"""


def test_process_that_ends_half_asleep_ends_well_and_its_memory_returns(
    target: DeviceTarget, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not DEVICE and target.simulated:
        monkeypatch.setenv(f"HARDPOINT_{target.backend.upper()}_DRIVER", str(simulated_library(target.backend)))
    before = target.free()
    arguments = [target.backend, str(target.index), str(target.unit), str(tmp_path)]
    ended = subprocess.run([sys.executable, "-c", ENDING, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert target.has_free(before)


def simulated_library(backend: str) -> object:
    from hardpoint_simulators import library

    return library(backend)  # type: ignore[arg-type]
