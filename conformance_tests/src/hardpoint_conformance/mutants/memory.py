"""Faults of memory: of the driver, and of the allocator above it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces import (
    DEFAULT,
    WEIGHTS,
    Capabilities,
    Device,
    DType,
    LiveRanges,
    MemoryReport,
    MemoryStats,
    Policy,
    SleepPlan,
    SleepTier,
)
from hardpoint.interfaces.errors import (
    BackupCorrupt,
    DeviceOutOfMemory,
    ForeignMemory,
    ForkedProcess,
    InvalidAllocation,
    MemoryAsleep,
    MemoryBusy,
    MemoryFault,
    UnknownTag,
)
from hardpoint.memory import DriverStatus, DriverTable, VirtualAllocator
from hardpoint_conformance.interposed import Call, InterposedDriver, Replacement
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.derived import Faults, Methods, derived
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    from torch import Tensor, nn

_FAULTS = Faults("allocator")
MUTANTS = _FAULTS.mutants
fault = _FAULTS.fault

Replacements = Mapping[str, Replacement]


def driver_fault(sentence: str, *killed_by: str) -> Callable[[Callable[[DriverTable], Replacements]], object]:
    """Declare a fault of the driver by a function that gives entries for the correct driver; allocators are made over it too."""

    def declare(replacements: Callable[[DriverTable], Replacements]) -> object:
        def apply(target: Target) -> Target:
            below = target.descriptor.driver
            if below is None:
                raise ValueError(f"the backend {target.name} has no memory driver to put a fault into")

            def driver(device: Device) -> DriverTable:
                correct = below(device)
                return InterposedDriver(correct, replacements(correct))

            @cache
            def allocator() -> Any:
                def make(self: Any, device: Device) -> None:
                    memory = target.descriptor.capabilities(device).memory
                    VirtualAllocator.__init__(
                        self, driver(device), device=device.index, torch_device=device.torch_device, capabilities=memory
                    )

                return derived(target.descriptor.allocator(), {"__init__": make})

            return target.with_descriptor(driver=driver, allocator=allocator)

        MUTANTS.append(Mutant(replacements.__name__, sentence, killed_by, apply))
        return replacements

    return declare


# The driver


@driver_fault("Released memory is not given back to the device.", "driver.memory.returns@1")
def release_does_nothing(driver: DriverTable) -> Replacements:
    return {"release": lambda call, handle, size: DriverStatus.OK}


@driver_fault("A failing `create` prints what is wrong instead of leaving that to its caller.", "driver.output.none@1")
def create_prints(driver: DriverTable) -> Replacements:
    def create(call: Call, size: int, handle: object) -> int:
        status = call(size, handle)
        if status != DriverStatus.OK:
            os.write(2, b"acme: out of memory\n")
        return status

    return {"create": create}


@driver_fault("Copies to the device lose their last byte.", "driver.copy.exact@1")
def copy_to_device_loses_tail(driver: DriverTable) -> Replacements:
    return {"copy_to_device": lambda call, address, host, size, stream: call(address, host, size - 1, stream)}


@driver_fault(
    "Copies to the host lose their last 64 bytes.",
    "driver.copy.exact@1",
    "alloc.bytes.chunks@1",
    "alloc.model.any-sequence@1",
    "stress.memory.any-order@1",
)
def copy_to_host_loses_tail(driver: DriverTable) -> Replacements:
    return {"copy_to_host": lambda call, host, address, size, stream: call(host, address, max(size - 64, 0), stream)}


@driver_fault("A fill sets half of what it was asked to.", "driver.fill.exact@1")
def fill_sets_half(driver: DriverTable) -> Replacements:
    return {"fill": lambda call, address, value, size, stream: call(address, value, size // 2, stream)}


@driver_fault("A fill sets zeros, whatever the value.", "driver.fill.exact@1")
def fill_ignores_value(driver: DriverTable) -> Replacements:
    return {"fill": lambda call, address, value, size, stream: call(address, 0, size, stream)}


@driver_fault("Out of memory is answered with a handle of nothing, and OK.", "driver.memory.out-of-memory@1")
def out_of_memory_returns_handle(driver: DriverTable) -> Replacements:
    def create(call: Call, size: int, handle: Any) -> int:
        status = call(size, handle)
        if status != DriverStatus.OUT_OF_MEMORY:
            return status
        handle[0] = 1 << 40
        return DriverStatus.OK

    return {"create": create}


@driver_fault("Too little memory is reported as a failure of unknown kind.", "driver.memory.out-of-memory@1")
def out_of_memory_has_other_status(driver: DriverTable) -> Replacements:
    def create(call: Call, size: int, handle: Any) -> int:
        status = call(size, handle)
        return DriverStatus.FAILED if status == DriverStatus.OUT_OF_MEMORY else status

    return {"create": create}


@driver_fault(
    "After an error, the next creation fails with it once more.",
    "driver.errors.nothing-changed@1",
)
def error_kept_for_next_call(driver: DriverTable) -> Replacements:
    failed: list[int] = []

    def create(call: Call, size: int, handle: Any) -> int:
        if failed:
            return failed.pop()
        status = call(size, handle)
        if status:
            failed.append(status)
        return status

    return {"create": create}


@driver_fault(
    "Memory that is mapped again has lost its bytes.", "driver.unmap.keeps-bytes@1", "driver.map.own-memory@1"
)
def remapped_memory_is_empty(driver: DriverTable) -> Replacements:
    def unmap(call: Call, address: int, size: int) -> int:
        stream = driver.stream_create()
        driver.fill(address, 0, size, stream)
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
        return call(address, size)

    return {"unmap": unmap}


@driver_fault(
    "New memory holds old bytes although the driver says that it is zero.",
    "driver.create.fresh@1",
    "alloc.policy.zero@1",
)
def fresh_memory_not_zero(driver: DriverTable) -> Replacements:
    mapped: set[int] = set()

    def map_(call: Call, address: int, size: int, handle: int) -> int:
        status = call(address, size, handle)
        if status == DriverStatus.OK and handle not in mapped:
            mapped.add(handle)
            stream = driver.stream_create()
            driver.fill(address, 0xA5, size, stream)
            driver.stream_synchronize(stream)
            driver.stream_destroy(stream)
        return status

    return {"map": map_}


@driver_fault("Reserved ranges begin at no multiple of the granularity.", "driver.reserve.aligned@1")
def reservation_misaligned(driver: DriverTable) -> Replacements:
    def reserve(call: Call, size: int, hint: int, address: Any) -> int:
        status = call(2 * size, hint, address)
        address[0] += 512
        return status

    return {"reserve": reserve, "release_address": lambda call, address, size: call(address - 512, 2 * size)}


@driver_fault("The same range is reserved for everybody.", "driver.reserve.aligned@1", "driver.reserve.hint@1")
def reservations_overlap(driver: DriverTable) -> Replacements:
    first: list[int] = []

    def reserve(call: Call, size: int, hint: int, address: Any) -> int:
        status = call(size, hint, address)
        if status == DriverStatus.OK:
            first.append(address[0])
            address[0] = first[0]
        return status

    return {"reserve": reserve}


@driver_fault("Free memory is what it was at the first question, for ever.", "driver.memory.counted@1")
def memory_info_constant(driver: DriverTable) -> Replacements:
    seen: list[int] = []

    def memory_info(call: Call, free: Any, total: Any) -> int:
        status = call(free, total)
        seen.append(free[0])
        free[0] = seen[0]
        return status

    return {"memory_info": memory_info}


@driver_fault("More memory is free than there is.", "driver.facts.device@1")
def more_free_than_total(driver: DriverTable) -> Replacements:
    def memory_info(call: Call, free: Any, total: Any) -> int:
        status = call(free, total)
        free[0] += total[0]
        return status

    return {"memory_info": memory_info}


@driver_fault("The granularity is no power of two, and does not divide the recommended one.", "driver.geometry.sane@1")
def granularity_odd(driver: DriverTable) -> Replacements:
    def geometry(call: Call, found: Any) -> int:
        status = call(found)
        found[0].granularity = found[0].granularity + 512
        return status

    return {"geometry": geometry}


@driver_fault("The driver has no devices, while one of them is open.", "driver.facts.device@1")
def device_count_zero(driver: DriverTable) -> Replacements:
    def device_count(call: Call, count: Any) -> int:
        count[0] = 0
        return DriverStatus.OK

    return {"device_count": device_count}


class _Engines:
    """Copies and fills of a driver by threads beside the caller's.

    Args:
        threads: how many take the work in turn.
        delay: seconds that each fill takes longer, of those that `device_synchronize` does not wait for where there are such.
        by_stream: the work of a stream is one thread's, of those.
        waits_for_all: `device_synchronize` waits for all streams, not for the first alone.
    """

    def __init__(
        self, threads: int = 1, *, delay: float = 0.0, by_stream: bool = False, waits_for_all: bool = True
    ) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(threads)]
        self._delay, self._by_stream, self._waits_for_all = delay, by_stream, waits_for_all
        self._given: list[tuple[int, Future[int]]] = []

    def entries(self) -> Replacements:
        return {
            "fill": partial(self._queued, self._delay),
            "copy_to_host": partial(self._queued, 0.0),
            "copy_to_device": partial(self._queued, 0.0),
            "stream_synchronize": self._stream,
            "device_synchronize": self._device,
        }

    def _queued(self, delay: float, call: Call, *arguments: Any) -> int:
        stream = arguments[-1]
        # On a machine with much else to do all streams could be done when the first one is.
        seconds = delay if self._waits_for_all or not self._is_first(stream) else 0.0

        def work() -> int:
            time.sleep(seconds)
            return call(*arguments)

        number = stream if self._by_stream else len(self._given)
        thread = self._threads[number % len(self._threads)]
        self._given.append((stream, thread.submit(work)))
        return DriverStatus.OK

    def _is_first(self, stream: int) -> bool:
        return not self._given or stream == self._given[0][0]

    def _stream(self, call: Call, stream: int) -> int:
        for given, work in list(self._given):
            if given == stream:
                work.result()
        return call(stream)

    def _device(self, call: Call) -> int:
        for given, work in list(self._given):
            if self._waits_for_all or self._is_first(given):
                work.result()
        return call()


@driver_fault("Two threads share the work of a stream.", "driver.streams.order@1")
def stream_has_two_threads(driver: DriverTable) -> Replacements:
    return _Engines(2).entries()


@driver_fault(
    "The device is taken to be idle when its first stream is.", "driver.streams.device@1", "alloc.streams.in-flight@1"
)
def device_waits_for_one_stream(driver: DriverTable) -> Replacements:
    return _Engines(16, delay=0.1, by_stream=True, waits_for_all=False).entries()


@driver_fault(
    "A stream is said to be synchronised while its copies are under way.",
    "driver.copy.exact@1",
    "driver.streams.order@1",
)
def stream_does_not_wait(driver: DriverTable) -> Replacements:
    return {**_Engines(delay=0.01).entries(), "stream_synchronize": lambda call, stream: call(stream)}


@driver_fault(
    "Copies are still under way when they return, and the flags say that they are not.",
    "driver.flags.host-accessible@1",
)
def copies_do_not_block(driver: DriverTable) -> Replacements:
    return _Engines(delay=0.01).entries()


@driver_fault("Of memory of several units the first alone is copied.", "driver.map.several-units@1")
def first_unit_copied(driver: DriverTable) -> Replacements:
    def copy_to_host(call: Call, host: int, address: int, size: int, stream: int) -> int:
        return call(host, address, min(size, driver.geometry().granularity), stream)

    return {"copy_to_host": copy_to_host}


@driver_fault("Copies to the device pass through one place, whoever makes them.", "driver.threads.concurrent@1")
def threads_share_a_buffer(driver: DriverTable) -> Replacements:
    last: dict[str, int] = {}

    def copy_to_device(call: Call, address: int, host: int, size: int, stream: int) -> int:
        last["host"] = host
        time.sleep(0.002)
        return call(address, last["host"], size, stream)

    return {"copy_to_device": copy_to_device}


_written: list[int] = []


@driver_fault("What was written last to any device is read from all of them.", "driver.devices.apart@1")
def devices_mixed(driver: DriverTable) -> Replacements:
    def copy_to_device(call: Call, address: int, host: int, size: int, stream: int) -> int:
        _written.append(address)
        return call(address, host, size, stream)

    def copy_to_host(call: Call, host: int, address: int, size: int, stream: int) -> int:
        return call(host, _written[-1], size, stream)

    return {"copy_to_device": copy_to_device, "copy_to_host": copy_to_host}


@_FAULTS.target_fault("The driver's table has no entry that fills memory.", "driver.table.complete@1")
def entry_missing(target: Target) -> Target:
    below = target.descriptor.driver
    assert below is not None, "the backend has no memory driver to put a fault into"

    def driver(device: Device) -> DriverTable:
        made = InterposedDriver(below(device))
        made._table.fill = type(made._table.fill)()
        return made

    return target.with_descriptor(driver=driver)


@driver_fault("The driver prints what it does.", "alloc.fault.typed@1")
def driver_prints(driver: DriverTable) -> Replacements:
    def create(call: Call, size: int, handle: Any) -> int:
        os.write(2, b"create\n")
        return call(size, handle)

    return {"create": create}


@driver_fault("The device ends with its first `close`, however often it was opened.", "driver.open.pairs@1")
def first_close_ends_device(driver: DriverTable) -> Replacements:
    opened: list[int] = []

    def open_(call: Call) -> int:
        opened.append(1)
        return call()

    def close(call: Call) -> int:
        while len(opened) > 1:
            opened.pop()
            call()
        return call()

    return {"open": open_, "close": close}


@driver_fault("Memory can be created only by the thread that opened the device.", "driver.threads.fresh@1")
def bound_to_opening_thread(driver: DriverTable) -> Replacements:
    threads: set[int] = set()

    def open_(call: Call) -> int:
        threads.add(threading.get_ident())
        return call()

    def create(call: Call, size: int, handle: Any) -> int:
        return call(size, handle) if threading.get_ident() in threads else DriverStatus.INVALID

    return {"open": open_, "create": create}


@driver_fault("Addresses can be reserved only for as much as the device has.", "driver.reserve.no-memory@1")
def reservation_limited_to_memory(driver: DriverTable) -> Replacements:
    def reserve(call: Call, size: int, hint: int, address: Any) -> int:
        return call(size, hint, address) if size <= driver.memory_info()[1] else DriverStatus.OUT_OF_MEMORY

    return {"reserve": reserve}


@driver_fault("A name is written one byte beyond its buffer.", "driver.facts.strings@1")
def name_overruns_buffer(driver: DriverTable) -> Replacements:
    return {"device_name": lambda call, name, size: call(name, size + 1)}


@driver_fault("A call that fails sets its result.", "driver.errors.nothing-changed@1")
def failed_call_sets_result(driver: DriverTable) -> Replacements:
    def create(call: Call, size: int, handle: Any) -> int:
        status = call(size, handle)
        if status != DriverStatus.OK:
            handle[0] = 1 << 40
        return status

    return {"create": create}


@driver_fault("Memory whose creation failed within the driver stays in its budget.", "driver.errors.own-failure@1")
def failed_creation_keeps_budget(driver: DriverTable) -> Replacements:
    used = [0]

    def create(call: Call, size: int, handle: Any) -> int:
        if size > driver.memory_info()[1] - used[0]:
            return DriverStatus.OUT_OF_MEMORY
        used[0] += size
        return call(size, handle)

    def release(call: Call, handle: int, size: int) -> int:
        used[0] -= size
        return call(handle, size)

    return {"create": create, "release": release}


@driver_fault("A descriptor stays open for each handle that is released.", "driver.memory.descriptors@1")
def release_keeps_descriptor(driver: DriverTable) -> Replacements:
    def release(call: Call, handle: int, size: int) -> int:
        os.open(os.devnull, os.O_RDONLY)
        return call(handle, size)

    return {"release": release}


@driver_fault(
    "A reservation takes memory at its first address alone.", "driver.map.any-order@1", "driver.map.several-units@1"
)
def second_piece_refused(driver: DriverTable) -> Replacements:
    starts: set[int] = set()

    def reserve(call: Call, size: int, hint: int, address: Any) -> int:
        status = call(size, hint, address)
        if status == DriverStatus.OK:
            starts.add(address[0])
        return status

    def map_(call: Call, address: int, size: int, handle: int) -> int:
        return call(address, size, handle) if address in starts else DriverStatus.INVALID

    return {"reserve": reserve, "map": map_}


@driver_fault(
    "Handles are mapped in the order in which they were created, whichever is asked for.", "driver.map.any-order@1"
)
def handles_mapped_in_order_of_creation(driver: DriverTable) -> Replacements:
    unmapped: dict[int, int] = {}
    mapped: dict[int, int] = {}

    def create(call: Call, size: int, handle: Any) -> int:
        status = call(size, handle)
        if status == DriverStatus.OK:
            unmapped[handle[0]] = size
        return status

    def map_(call: Call, address: int, size: int, handle: int) -> int:
        oldest = min(one for one, own in unmapped.items() if own == size)
        status = call(address, size, oldest)
        if status == DriverStatus.OK:
            del unmapped[oldest]
            mapped[address] = oldest
        return status

    def unmap(call: Call, address: int, size: int) -> int:
        status = call(address, size)
        if status == DriverStatus.OK:
            unmapped[mapped.pop(address)] = size
        return status

    return {"create": create, "map": map_, "unmap": unmap}


# Sleep


@fault("A sleep gives nothing back, and reports that it did.", "alloc.memory.returned@1")
def sleep_frees_nothing(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        policies = dict.fromkeys(self.stats().tags, Policy.RESIDENT)
        report: MemoryReport = base.sleep(self, replace(plan, policies=policies))
        return replace(report, unmapped=self.stats().allocated)

    return {"sleep": sleep}


@fault("Discarded memory stays on the device during a sleep.", "alloc.policy.discard@1")
def discarded_memory_stays(base: Any) -> Methods:
    return _other_policy(base, {Policy.DISCARD: Policy.RESIDENT})


@fault("A second sleep of what is asleep drops its backups.", "alloc.state.repeated@1")
def second_sleep_discards(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        asleep = sorted(self.stats().asleep)
        report: MemoryReport = base.sleep(self, plan)
        if asleep:
            self.discard_backup(asleep)
        return report

    return {"sleep": sleep}


@fault("A sleep of one tag puts all tags to sleep.", "alloc.tags.apart@1", "stress.memory.threads@1")
def sleep_takes_all_tags(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        known = self.stats().tags
        tags = None if plan.tags is not None and plan.tags <= set(known) else plan.tags
        report: MemoryReport = base.sleep(self, replace(plan, tags=tags))
        return report

    return {"sleep": sleep}


@fault("What a sleep says of a tag's policy is taken for the next tag.", "alloc.policy.plan@1")
def policies_mixed_up(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        tags = sorted(self.stats().tags)
        following = dict(zip(tags, tags[1:] + tags[:1], strict=True))
        policies = {following.get(tag, tag): policy for tag, policy in plan.policies.items()}
        report: MemoryReport = base.sleep(self, replace(plan, policies=policies))
        return report

    return {"sleep": sleep}


@fault("With an unknown tag, the known ones are put to sleep before the error.", "alloc.tags.unknown@1")
def unknown_tag_does_half(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        try:
            report: MemoryReport = base.sleep(self, plan)
            return report
        except UnknownTag:
            base.sleep(self, replace(plan, tags=(plan.tags or frozenset()) & set(self.stats().tags)))
            raise

    return {"sleep": sleep}


@fault("An unknown tag is ignored.", "alloc.tags.unknown@1")
def unknown_tag_ignored(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        if plan.tags is not None:
            plan = replace(plan, tags=plan.tags & set(self.stats().tags))
        report: MemoryReport = base.sleep(self, plan)
        return report

    return {"sleep": sleep}


@fault("`verify` is ignored, and stale backups are kept.", "alloc.backup.stale@1")
def verify_ignored(base: Any) -> Methods:
    return _other_plan(base, lambda plan: replace(plan, verify=False))


@fault("Clean backups of kept tags are copied anew.", "alloc.backup.kept@1")
def keep_ignored(base: Any) -> Methods:
    return _other_plan(base, lambda plan: replace(plan, keep=frozenset()))


@fault("Backups of all tags are kept, also of those whose writers say nothing.", "alloc.backup.unannounced@1")
def all_tags_kept(base: Any) -> Methods:
    return _other_plan(base, lambda plan: replace(plan, keep=frozenset({"weights", "kv_cache", "default", "buffers"})))


@fault("Live ranges are taken one byte too early.", "alloc.live.ranges@1")
def live_ranges_shifted(base: Any) -> Methods:
    def shifted(live: LiveRanges) -> LiveRanges:
        return replace(live, ranges=[(max(first - 1, 0), size) for first, size in live.ranges])

    return _other_plan(base, lambda plan: replace(plan, live=tuple(map(shifted, plan.live))))


@fault("Errors of the progress callback are lost.", "alloc.progress.cancels@1")
def progress_errors_lost(base: Any) -> Methods:
    def quiet(plan: SleepPlan) -> SleepPlan:
        asked = plan.progress
        if asked is None:
            return plan

        def progress(done: int, total: int) -> None:
            with suppress(Exception):
                asked(done, total)

        return replace(plan, progress=progress)

    return _other_plan(base, quiet)


def _other_plan(base: Any, change: Callable[[SleepPlan], SleepPlan]) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        report: MemoryReport = base.sleep(self, change(plan))
        return report

    return {"sleep": sleep}


@fault("Live ranges are passed over where one of them lies beyond the end of its tensor.", "alloc.live.bounds@1")
def live_ranges_passed_over(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        report: MemoryReport
        try:
            report = base.sleep(self, plan)
        except InvalidAllocation:
            report = base.sleep(self, replace(plan, live=()))
        return report

    return {"sleep": sleep}


@fault("Progress is told as what is left to do.", "alloc.progress.monotonic@1")
def progress_counts_down(base: Any) -> Methods:
    def turned(plan: SleepPlan) -> SleepPlan:
        asked = plan.progress
        return plan if asked is None else replace(plan, progress=lambda done, total: asked(total - done, total))

    return _other_plan(base, turned)


@fault("A sleep within a sleep is an error of no type.", "alloc.state.busy@1")
def busy_untyped(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        try:
            report: MemoryReport = base.sleep(self, plan)
        except MemoryBusy as error:
            raise RuntimeError("a lock is held") from error
        return report

    return {"sleep": sleep}


@fault("Reports say that nothing was preserved.", "alloc.report.truthful@1")
def report_understates(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        report: MemoryReport = base.sleep(self, plan)
        return replace(report, preserved=0, tiers={})

    return {"sleep": sleep}


@fault(
    "A sleep of one allocator puts all allocators of the process to sleep.",
    "alloc.engines.independent@1",
    "stress.memory.co-tenant@1",
)
def allocators_sleep_together(base: Any) -> Methods:
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def init(self: Any, device: Device) -> None:
        base.__init__(self, device)
        made.add(self)

    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        for other in made - {self}:
            with suppress(MemoryFault):
                base.sleep(other, plan)
        report: MemoryReport = base.sleep(self, plan)
        return report

    return {"__init__": init, "sleep": sleep}


@fault("The host budget of a sleep is ignored.", "alloc.budget.refused@1")
def host_budget_ignored(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        report: MemoryReport = base.sleep(self, replace(plan, host_budget=None))
        return report

    return {"sleep": sleep}


@fault("Backups that were to go to the disk stay in the host's memory.", "alloc.disk.no-host@1")
def disk_tier_is_host(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        report: MemoryReport = base.sleep(self, replace(plan, tier=SleepTier.HOST))
        return report

    return {"sleep": sleep}


@fault(
    "Kept backups are served although their memory was written since.",
    "alloc.backup.fresh@1",
    "alloc.source.callback@1",
)
def backup_stale_after_update(base: Any) -> Methods:
    return {"mark_written": lambda self, tags: None}


@fault("Memory of the policy zero keeps its bytes over a sleep.", "alloc.policy.zero@1")
def zero_policy_keeps_bytes(base: Any) -> Methods:
    return _other_policy(base, {Policy.ZERO: Policy.PRESERVE})


@fault("Memory to be rebuilt is zero after wake when nobody rebuilds it.", "alloc.rebuild.missing@1")
def rebuild_policy_is_zero(base: Any) -> Methods:
    return _other_policy(base, {Policy.REBUILD: Policy.ZERO})


@fault("Preserved memory wakes with undefined bytes.", "alloc.bytes.preserved@1", "stress.memory.torch-cache@1")
def preserved_memory_lost(base: Any) -> Methods:
    return _other_policy(base, {Policy.PRESERVE: Policy.DISCARD})


@fault("Resident memory is put to sleep like any other.", "alloc.policy.mixed@1")
def resident_memory_sleeps(base: Any) -> Methods:
    return _other_policy(base, {Policy.RESIDENT: Policy.PRESERVE})


def _other_policy(base: Any, changed: Mapping[Policy, Policy]) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        made: Tensor = base.empty(self, shape, dtype, tag, changed.get(policy, policy), max_rows)
        return made

    return {"empty": empty}


# Wake


@fault("A wake restores all but the last bytes of a tensor.", "alloc.bytes.preserved@1")
def wake_loses_tail(base: Any) -> Methods:
    def change(tensor: Tensor) -> None:
        tensor.view(-1)[-1:].zero_()

    return _after_wake(base, change)


@fault("Memory wakes at another address.", "alloc.address.stable@1", "alloc.tensor.views@1")
def wake_at_another_address(base: Any) -> Methods:
    def change(tensor: Tensor) -> None:
        tensor.data = tensor.clone()

    return _after_wake(base, change)


def _after_wake(base: Any, change: Callable[[Tensor], None]) -> Methods:
    """Change every tensor that is alive after a wake."""

    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        made: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        vars(self).setdefault("_made", []).append((tag, weakref.ref(made)))
        return made

    def wake(self: Any, tags: Sequence[str] | None = None) -> MemoryReport:
        before = self.stats().asleep
        report: MemoryReport = base.wake(self, tags)
        woken = before - self.stats().asleep
        for tag, kept in vars(self).get("_made", []):
            tensor = kept()
            if tensor is not None and tag in woken and tensor.numel():
                change(tensor)
        return report

    return {"empty": empty, "wake": wake}


@fault("A wake of one tag wakes all.", "alloc.tags.apart@1")
def wake_takes_all_tags(base: Any) -> Methods:
    def wake(self: Any, tags: Sequence[str] | None = None) -> MemoryReport:
        if tags is not None and set(tags) <= set(self.stats().tags):
            tags = None
        report: MemoryReport = base.wake(self, tags)
        return report

    return {"wake": wake}


@fault("A wake that fails drops the backups of what is asleep.", "alloc.disk.corrupt@1")
def failed_wake_drops_backups(base: Any) -> Methods:
    def wake(self: Any, tags: Sequence[str] | None = None) -> MemoryReport:
        try:
            report: MemoryReport = base.wake(self, tags)
            return report
        except MemoryFault:
            self.discard_backup(sorted(self.stats().asleep))
            raise

    return {"wake": wake}


@fault(
    "A corrupt backup is taken for undefined memory, and the wake succeeds.",
    "alloc.disk.corrupt@1",
    "alloc.source.changed@1",
)
def corrupt_backup_served(base: Any) -> Methods:
    def wake(self: Any, tags: Sequence[str] | None = None) -> MemoryReport:
        try:
            report: MemoryReport = base.wake(self, tags)
        except BackupCorrupt:
            self.discard_backup(sorted(self.stats().asleep))
            report = base.wake(self, tags)
        return report

    return {"wake": wake}


@fault("A backup is read as zeros.", "alloc.backup.read@1")
def backup_read_as_zeros(base: Any) -> Methods:
    def read_backup(self: Any, tensor: Tensor) -> Tensor:
        found: Tensor = base.read_backup(self, tensor)
        return found.zero_()

    return {"read_backup": read_backup}


@fault("Discarding the backups of one tag discards all.", "alloc.backup.discarded@1")
def all_backups_discarded(base: Any) -> Methods:
    def discard_backup(self: Any, tags: Sequence[str]) -> None:
        base.discard_backup(self, tags)
        base.discard_backup(self, sorted(self.stats().asleep))

    return {"discard_backup": discard_backup}


@fault("A callback runs once for each tensor that it was declared for.", "alloc.rebuild.once@1")
def callback_runs_for_each_tensor(base: Any) -> Methods:
    def declare_source(self: Any, tensor: Tensor, source: Any) -> None:
        base.declare_source(self, tensor, (lambda: source()) if callable(source) else source)

    return {"declare_source": declare_source}


# Accounting and sizes


@fault("The books count every allocation twice.", "alloc.books.agree@1")
def books_count_twice(base: Any) -> Methods:
    def stats(self: Any) -> MemoryStats:
        found: MemoryStats = base.stats(self)
        tags = {name: replace(tag, allocated=2 * tag.allocated) for name, tag in found.tags.items()}
        return replace(found, tags=tags)

    return {"stats": stats}


@fault("The books do not say that a tag is asleep.", "alloc.tags.apart@1")
def books_hide_sleep(base: Any) -> Methods:
    def stats(self: Any) -> MemoryStats:
        found: MemoryStats = base.stats(self)
        return replace(found, asleep=frozenset())

    return {"stats": stats}


@fault("A descriptor stays open for each allocation.", "alloc.free.descriptors@1")
def allocation_keeps_descriptor(base: Any) -> Methods:
    def empty(self: Any, *arguments: Any, **named: Any) -> Tensor:
        os.open(os.devnull, os.O_RDONLY)
        tensor: Tensor = base.empty(self, *arguments, **named)
        return tensor

    return {"empty": empty}


@fault(
    "Freed memory stays in use: the allocator keeps every tensor.",
    "alloc.free.returns@1",
    "alloc.tensor.last-view@1",
    "alloc.state.free-asleep@1",
    "alloc.gc.within@1",
    "stress.memory.cycles@1",
)
def freed_memory_kept(base: Any) -> Methods:
    kept: list[Tensor] = []

    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        kept.append(base.empty(self, shape, dtype, tag, policy, max_rows))
        return kept[-1].view(kept[-1].shape)

    return {"empty": empty}


@fault("Tensors begin at odd addresses.", "alloc.sizes.aligned@1")
def tensors_misaligned(base: Any) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        if max_rows is not None or not prod(shape):
            made: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        else:
            made = base.empty(self, (prod(shape) + 1,), dtype, tag, policy)[1:].view(tuple(shape))
        return made

    return {"empty": empty}


@fault("New tensors share the memory of the last one of their size.", "alloc.sizes.aligned@1")
def tensors_overlap(base: Any) -> Methods:
    made: dict[Any, Tensor] = {}

    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        key = (id(self), tuple(shape), dtype, tag, policy)
        if key not in made or max_rows is not None:
            made[key] = base.empty(self, shape, dtype, tag, policy, max_rows)
        return made[key].view(made[key].shape)

    return {"empty": empty}


@fault("A negative extent gives an empty tensor.", "alloc.sizes.none@1")
def negative_extent_accepted(base: Any) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        made: Tensor = base.empty(self, [max(extent, 0) for extent in shape], dtype, tag, policy, max_rows)
        return made

    return {"empty": empty}


@fault("A resize loses the last of the rows that stay.", "alloc.elastic.keeps@1")
def resize_loses_row(base: Any) -> Methods:
    def resize(self: Any, tensor: Tensor, rows: int) -> Tensor:
        stay = min(rows, tensor.shape[0])
        made: Tensor = base.resize(self, tensor, rows)
        made[stay - 1].zero_()
        return made

    return {"resize": resize}


@fault("A resize that is not possible leaves the tensor as it is, without an error.", "alloc.elastic.bounds@1")
def resize_refused_silently(base: Any) -> Methods:
    def resize(self: Any, tensor: Tensor, rows: int) -> Tensor:
        try:
            made: Tensor = base.resize(self, tensor, rows)
        except InvalidAllocation:
            return tensor
        return made

    return {"resize": resize}


@fault("A foreign tensor's source is accepted.", "alloc.tensor.foreign@1")
def foreign_memory_accepted(base: Any) -> Methods:
    def declare_source(self: Any, tensor: Tensor, source: Any) -> None:
        with suppress(ForeignMemory):
            base.declare_source(self, tensor, source)

    return {"declare_source": declare_source}


@fault("Adopted modules keep their parameters where they were.", "alloc.module.adopted@1")
def adopt_does_nothing(base: Any) -> Methods:
    return {"adopt": lambda self, module, tag="weights": None}


@fault("The allocator's claims are not the descriptor's.", "alloc.claims.same@1")
def allocator_claims_differ(base: Any) -> Methods:
    return {"capabilities": lambda self: Capabilities.none().memory}


@fault("`materialise` gives tied parameters memory of their own.", "alloc.module.materialised@1")
def materialise_breaks_ties(base: Any) -> Methods:
    def materialise(self: Any, module: nn.Module, tag: str = WEIGHTS) -> None:
        for child in module.children():
            base.materialise(self, child, tag)
        base.materialise(self, module, tag)

    return {"materialise": materialise}


@fault("A closed allocator goes on as before.", "alloc.close.refuses@1")
def close_does_nothing(base: Any) -> Methods:
    return {"close": lambda self: None}


@fault("Within `pool` everything has the default tag.", "alloc.torch-pool.caught@1", "alloc.torch-pool.threads@1")
def pool_ignores_tag(base: Any) -> Methods:
    return {"pool": lambda self, tag, policy=Policy.PRESERVE: base.pool(self, DEFAULT, policy)}


@fault("Too little memory is a RuntimeError.", "alloc.sizes.huge@1")
def out_of_memory_untyped(base: Any) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        try:
            made: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        except DeviceOutOfMemory as error:
            raise RuntimeError("out of memory") from error
        return made

    return {"empty": empty}


@fault("Shrinking an elastic tensor keeps its memory.", "alloc.elastic.returns@1")
def shrinking_keeps_memory(base: Any) -> Methods:
    def resize(self: Any, tensor: Tensor, rows: int) -> Tensor:
        if 0 < rows < tensor.shape[0]:
            return tensor[:rows]
        made: Tensor = base.resize(self, tensor, rows)
        return made

    return {"resize": resize}


@fault("Declared sources are forgotten, and their bytes copied.", "alloc.source.read-again@1")
def sources_forgotten(base: Any) -> Methods:
    return {"declare_source": lambda self, tensor, source: None}


@fault("Resizing sleeping memory does nothing, without an error.", "alloc.elastic.asleep@1")
def resize_asleep_ignored(base: Any) -> Methods:
    def resize(self: Any, tensor: Tensor, rows: int) -> Tensor:
        try:
            made: Tensor = base.resize(self, tensor, rows)
        except MemoryAsleep:
            return tensor
        return made

    return {"resize": resize}


@fault("While anything is asleep, no memory is handed out.", "alloc.state.allocate-asleep@1")
def no_memory_while_asleep(base: Any) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        if self.stats().asleep:
            raise MemoryAsleep("the allocator is asleep")
        made: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        return made

    return {"empty": empty}


@fault("Tensors of bfloat16 are float16.", "alloc.tensor.dtypes@1")
def bfloat16_is_float16(base: Any) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        dtype = DType.FLOAT16 if dtype is DType.BFLOAT16 else dtype
        made: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        return made

    return {"empty": empty}


@fault("Errors of a callback are lost, and its memory is as it is.", "alloc.rebuild.failed@1")
def callback_errors_lost(base: Any) -> Methods:
    def declare_source(self: Any, tensor: Tensor, source: Any) -> None:
        def quiet() -> None:
            with suppress(Exception):
                source()

        base.declare_source(self, tensor, quiet if callable(source) else source)

    return {"declare_source": declare_source}


@fault("The device is said to have a quirk that its driver has not found.", "alloc.memory.quirks@1")
def quirk_made_up(base: Any) -> Methods:
    return {"memory_info": lambda self: replace(base.memory_info(self), quirks=("stale_pages",))}


@fault("A closed allocator puts what lives to sleep.", "alloc.tensor.outlives@1")
def close_puts_to_sleep(base: Any) -> Methods:
    def close(self: Any) -> None:
        with suppress(MemoryFault):
            base.sleep(self, SleepPlan())
        base.close(self)

    return {"close": close}


@fault("An operation is refused while one of another thread is under way.", "stress.memory.operations@1")
def operations_refused_side_by_side(base: Any) -> Methods:
    under_way = threading.Lock()

    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        if not under_way.acquire(blocking=False):
            raise MemoryBusy("another operation is under way")
        try:
            report: MemoryReport = base.sleep(self, plan)
            time.sleep(0.005)
        finally:
            under_way.release()
        return report

    return {"sleep": sleep}


@fault("A forked child is given memory.", "stress.memory.fork@1")
def child_given_memory(base: Any) -> Methods:
    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        try:
            made: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        except ForkedProcess:
            import torch

            made = torch.empty(tuple(shape), dtype=dtype.to_torch())
        return made

    return {"empty": empty}


@fault("A sleep holds the interpreter's lock.", "stress.memory.heartbeat@1")
def sleep_holds_the_lock(base: Any) -> Methods:
    def sleep(self: Any, plan: SleepPlan) -> MemoryReport:
        report: MemoryReport = base.sleep(self, plan)
        ctypes.PyDLL(None).usleep(int(5e4 + 15e6 * report.seconds["total"]))
        return report

    return {"sleep": sleep}
