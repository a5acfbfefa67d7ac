"""The behaviour of a vendor's memory driver over its simulated library.

`backends/<name>/tests/test_driver.py` derive from `DriverSuite` and supply a `DriverFacts`: what differs. Faults are
injected at the vendor's calls that an entry makes, each in turn; the simulator's books say whether anything changed,
and its list of broken rules must stay empty.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from hardpoint.interfaces.errors import BackendUnavailable, DeviceOutOfMemory, DriverError
from hardpoint.memory import driver_file
from hardpoint.memory.driver_table import DriverFlags, DriverQuirks, DriverTable
from hardpoint_conformance.device_memory import MAPPED, PREREQUISITES, DeviceMemory, in_fresh_thread
from hardpoint_simulators import Simulator, SimulatorStats

MIB = 1 << 20
SIZE = 2 * MIB

MAIN_DEVICE, OTHER_DEVICE = 1, 0
"""Tests use device 1 while the calling thread is on device 0, so that a driver that forgets either is found."""

UNOPENED_DEVICE, UNUSABLE_DEVICE = 3, 7
"""A table is made once per device and kept: these are for tests of its making that succeed, and that never do."""


@dataclass(frozen=True)
class DriverFacts:
    """What differs between vendors' drivers.

    Attributes:
        vendor: name of the backend and of its simulator.
        codes: the vendor's statuses by what they mean: "out_of_memory", "failed" (an error of earlier work),
            "invalid", "unsupported", "no_device".
        names: the vendor's name for "out_of_memory" and "failed", with which an error's text begins.
        dlpack_device: DLDeviceType of its tensors.
        create: the vendor's function behind `create`.
        count: the vendor's function that counts devices.
        required_symbol: the first symbol that is looked up.
        restoring: the vendor's function that gives the calling thread its device back. Where that fails, the entry's work
            is done and stands.
        silent: entries whose vendor calls return no status, and cannot fail.
        tolerated: other calls whose failure an entry hides, as (entry, call, which of its calls); the driver says why.
        granularity: of the simulated device, bytes.
        quirks: of the simulated device as it is.
        quirk_settings: the simulator's settings, and all quirks that must be found then.
    """

    vendor: Literal["cuda", "rocm", "ascend"]
    codes: Mapping[str, int]
    names: Mapping[str, str]
    dlpack_device: int
    create: str
    count: str
    required_symbol: str
    restoring: str
    silent: frozenset[str] = frozenset()
    tolerated: frozenset[tuple[str, str, int]] = frozenset()
    granularity: int = 2 * MIB
    quirks: DriverQuirks = field(default_factory=lambda: DriverQuirks(0))
    quirk_settings: Mapping[str, tuple[int, DriverQuirks]] = field(default_factory=dict)


class CallerDevice(ABC):
    """The calling thread's device, as other users of the vendor's library see it."""

    def __init__(self, simulator: Simulator) -> None:
        self.library = ctypes.CDLL(str(simulator.path))

    @abstractmethod
    def close(self) -> None:
        """Give back what `use` took."""

    @abstractmethod
    def use(self, device: int) -> None:
        """Make a device the calling thread's."""

    @abstractmethod
    def current(self) -> int:
        """Return what identifies the calling thread's device and context; 0 for none."""

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the vendor's library that must succeed."""
        assert self.library[name](*arguments) == 0, name


def failure_of(work: Callable[[], object]) -> DriverError | None:
    """Return the error that `work` on a fresh thread ends in; None when it succeeds."""
    try:
        in_fresh_thread(work)
    except DriverError as error:
        return error
    return None


def held(statistics: SimulatorStats) -> SimulatorStats:
    """Return the counts without those that only grow."""
    return replace(statistics, calls=0, violations=0, pageable_copies=0)


def raw_status(driver: DriverTable, entry: str, *arguments: object) -> int:
    """Return the status of an entry, which Python's face turns into exceptions."""
    table: Any = driver._table
    report = ctypes.create_string_buffer(1024)
    status: int = getattr(table, entry)(table.context, *arguments, ctypes.cast(report, _report_type(table, entry)))
    return status


def _report_type(table: Any, entry: str) -> Any:
    return getattr(table, entry).argtypes[-1]


class DriverSuite:
    """The tests. `facts`, `module` (the backend's `allocator`) and `caller` are the vendor's."""

    facts: DriverFacts
    backend: ModuleType
    descriptor: ModuleType
    caller_device: type[CallerDevice]

    @pytest.fixture
    def simulator(self) -> Iterator[Simulator]:
        simulator = Simulator(self.facts.vendor)
        simulator.reset()
        simulator.set("devices", 8)
        left_by_others = simulator.leaks()
        yield simulator
        simulator.clear_faults()
        assert simulator.violations() == []
        assert simulator.leaks() == left_by_others
        simulator.reset()

    @pytest.fixture
    def caller(self, simulator: Simulator) -> Iterator[CallerDevice]:
        caller = self.caller_device(simulator)
        yield caller
        caller.close()

    def table(self, simulator: Simulator, device: int = MAIN_DEVICE, **options: object) -> DriverTable:
        """Return the driver of a device."""
        module = driver_file(f"hardpoint_{self.facts.vendor}")
        return DriverTable(module, device=device, library=str(simulator.path), options=options)

    @pytest.fixture
    def driver(self, simulator: Simulator) -> Iterator[DriverTable]:
        driver = self.table(simulator)
        in_fresh_thread(driver.open)
        yield driver
        simulator.clear_faults()
        in_fresh_thread(driver.close)

    @pytest.fixture
    def memory(self, driver: DriverTable) -> Iterator[DeviceMemory]:
        memory = DeviceMemory(driver, SIZE)
        yield memory
        in_fresh_thread(memory.close)

    # Entries

    def test_simulation_is_labelled(self, driver: DriverTable) -> None:
        assert DriverFlags.SIMULATED in driver.flags

    def test_geometry_is_the_vendors(self, driver: DriverTable) -> None:
        geometry = driver.geometry()
        assert (geometry.granularity, geometry.recommended) == (self.facts.granularity, 2 * MIB)
        assert geometry.copy_threads == 2
        assert geometry.dlpack_device == self.facts.dlpack_device

    def test_recommended_granularity_is_reported(self, simulator: Simulator) -> None:
        simulator.set("recommended_granularity", 4 * MIB)
        driver = self.table(simulator)
        driver.open()
        assert (driver.geometry().granularity, driver.geometry().recommended) == (self.facts.granularity, 4 * MIB)
        driver.close()

    def test_information_is_the_devices(self, driver: DriverTable, simulator: Simulator) -> None:
        assert driver.device_count() == 8
        assert driver.device_name()
        assert driver.driver_version().split(".")[0].isdecimal()
        free, total = driver.memory_info()
        assert (free, total) == (simulator.capacity, simulator.capacity)
        handle = driver.create(SIZE)
        assert driver.memory_info() == (free - SIZE, total)
        driver.release(handle, SIZE)

    def test_bytes_written_are_read_back(self, memory: DeviceMemory, simulator: Simulator) -> None:
        simulator.set("strict_host", 1)  # nothing but copies may touch device memory
        content = os.urandom(SIZE)
        memory.do(*MAPPED, "stream_create")
        memory.write(content)
        memory.do("copy_to_device", "stream_synchronize")
        memory.write(bytes(SIZE))
        memory.do("copy_to_host", "stream_synchronize")
        assert memory.read() == content

    def test_fill_sets_every_byte(self, memory: DeviceMemory) -> None:
        memory.do(*MAPPED, "stream_create", "fill", "copy_to_host", "stream_synchronize")
        assert memory.read() == b"\x5a" * SIZE

    def test_handle_keeps_its_bytes_while_unmapped(self, memory: DeviceMemory) -> None:
        memory.do(*MAPPED, "stream_create", "fill", "device_synchronize", "unmap", "map")
        memory.do("copy_to_host", "stream_synchronize")
        assert memory.read() == b"\x5a" * SIZE

    def test_memory_returns_when_unmapped_and_released(self, memory: DeviceMemory, simulator: Simulator) -> None:
        memory.do(*MAPPED)
        assert simulator.used(MAIN_DEVICE) == SIZE
        memory.do("unmap", "release")
        assert simulator.used(MAIN_DEVICE) == 0

    def test_address_is_a_multiple_of_the_granularity(self, memory: DeviceMemory) -> None:
        memory.do("reserve")
        assert memory.address % memory.driver.geometry().granularity == 0

    def test_host_memory_is_pinned_and_unpinned(self, memory: DeviceMemory, simulator: Simulator) -> None:
        memory.do("host_register")
        assert (simulator.stats().host_ranges, simulator.stats().host_bytes) == (1, SIZE)
        memory.do("host_unregister")
        assert simulator.stats().host_ranges == 0

    def test_work_runs_when_its_stream_is_synchronised(self, memory: DeviceMemory, simulator: Simulator) -> None:
        simulator.set("deferred", 1)
        memory.do(*MAPPED, "stream_create", "host_register", "fill", "copy_to_host")
        assert simulator.stats().pending == 2
        assert memory.read() == bytes(SIZE)
        memory.do("stream_synchronize")
        assert simulator.stats().pending == 0
        assert memory.read() == b"\x5a" * SIZE

    def test_device_synchronize_waits_for_all_streams(
        self, memory: DeviceMemory, driver: DriverTable, simulator: Simulator
    ) -> None:
        simulator.set("deferred", 1)
        memory.do(*MAPPED, "host_register")
        streams = [driver.stream_create() for _ in range(3)]
        for stream in streams:
            driver.copy_to_host(memory.host, memory.address, SIZE, stream)
        assert simulator.stats().pending == 3
        driver.device_synchronize()
        assert simulator.stats().pending == 0
        for stream in streams:
            driver.stream_destroy(stream)

    def test_memory_comes_from_the_drivers_own_device(self, driver: DriverTable, simulator: Simulator) -> None:
        other = self.table(simulator, OTHER_DEVICE)
        other.open()
        handles = [driver.create(SIZE), other.create(2 * SIZE)]
        assert (simulator.used(MAIN_DEVICE), simulator.used(OTHER_DEVICE)) == (SIZE, 2 * SIZE)
        assert driver.memory_info()[0] == simulator.capacity - SIZE
        assert other.memory_info()[0] == simulator.capacity - 2 * SIZE
        driver.release(handles[0], SIZE)
        other.release(handles[1], 2 * SIZE)
        other.close()

    def test_bytes_of_two_devices_do_not_mix(self, memory: DeviceMemory, simulator: Simulator) -> None:
        other = self.table(simulator, OTHER_DEVICE)
        other.open()
        second = DeviceMemory(other, SIZE)
        memory.do(*MAPPED, "stream_create", "fill")
        second.do(*MAPPED, "stream_create")
        second.write(bytes(range(256)) * (SIZE // 256))
        second.do("copy_to_device", "stream_synchronize")
        memory.do("copy_to_host", "stream_synchronize")
        assert memory.read() == b"\x5a" * SIZE
        second.close()
        other.close()

    # The calling thread

    @pytest.mark.parametrize("entry", PREREQUISITES)
    def test_entry_works_on_a_fresh_thread(self, entry: str, memory: DeviceMemory) -> None:
        for step in (*PREREQUISITES[entry], entry):
            in_fresh_thread(lambda step=step: memory.do(step))  # type: ignore[misc]

    @pytest.mark.parametrize("entry", PREREQUISITES)
    def test_entry_leaves_the_callers_device_as_it_was(
        self, entry: str, memory: DeviceMemory, caller: CallerDevice
    ) -> None:
        in_fresh_thread(lambda: memory.do(*PREREQUISITES[entry]))

        def call() -> None:
            caller.use(OTHER_DEVICE)
            before = caller.current()
            memory.do(entry)
            assert caller.current() == before != 0

        in_fresh_thread(call)

    def test_open_and_close_leave_the_callers_device_as_it_was(
        self, simulator: Simulator, caller: CallerDevice
    ) -> None:
        driver = self.table(simulator)

        def call() -> None:
            caller.use(OTHER_DEVICE)
            before = caller.current()
            driver.open()
            assert caller.current() == before
            driver.close()
            assert caller.current() == before

        in_fresh_thread(call)

    def test_failed_entry_leaves_the_callers_device_as_it_was(
        self, driver: DriverTable, simulator: Simulator, caller: CallerDevice
    ) -> None:
        def call() -> None:
            caller.use(OTHER_DEVICE)
            before = caller.current()
            simulator.fail(self.facts.create, code=self.facts.codes["failed"])
            with pytest.raises(DriverError):
                driver.create(SIZE)
            assert caller.current() == before

        in_fresh_thread(call)

    def test_threads_work_side_by_side(self, driver: DriverTable) -> None:
        barrier = threading.Barrier(4)

        def work() -> None:
            memory = DeviceMemory(driver, SIZE)
            barrier.wait()
            for _ in range(25):
                memory.do(*MAPPED, "stream_create", "fill", "stream_synchronize", "device_synchronize", "unmap")
                memory.do("release", "release_address", "stream_destroy")
            memory.close()

        with ThreadPoolExecutor(4) as executor:
            for done in [executor.submit(work) for _ in range(4)]:
                done.result()

    # Failures

    @pytest.mark.parametrize("entry", PREREQUISITES)
    def test_failure_at_any_call_is_reported_and_changes_nothing(
        self, entry: str, driver: DriverTable, simulator: Simulator, caller: CallerDevice
    ) -> None:
        calls = in_fresh_thread(lambda: self.calls_of(entry, driver, simulator, caller))
        assert calls or entry in self.facts.silent
        for call, number in calls.items():
            for nth in range(1, number + 1):
                in_fresh_thread(partial(self.fail_once, entry, call, nth, driver, simulator, caller))

    def calls_of(self, entry: str, driver: DriverTable, simulator: Simulator, caller: CallerDevice) -> dict[str, int]:
        """Return the vendor's calls that an entry makes, with their numbers."""
        caller.use(OTHER_DEVICE)
        memory = DeviceMemory(driver, SIZE).do(*PREREQUISITES[entry])
        before = simulator.calls()
        memory.do(entry)
        made = {call: number - before.get(call, 0) for call, number in simulator.calls().items()}
        memory.close()
        return {call: number for call, number in made.items() if number}

    def fail_once(
        self, entry: str, call: str, nth: int, driver: DriverTable, simulator: Simulator, caller: CallerDevice
    ) -> None:
        """Let one call of an entry fail; check what it reports, that nothing changed, and that a retry works."""
        caller.use(OTHER_DEVICE)
        memory = DeviceMemory(driver, SIZE).do(*PREREQUISITES[entry])
        before = held(simulator.stats())
        simulator.fail(call, nth, self.facts.codes["failed"])
        if (call, nth) == (self.facts.restoring, 2) or (entry, call, nth) in self.facts.tolerated:
            memory.do(entry)
        else:
            with pytest.raises(DriverError) as caught:
                memory.do(entry)
            assert (caught.value.call, caught.value.code) == (call.partition("_v")[0], self.facts.codes["failed"])
            assert caught.value.text.startswith(self.facts.names["failed"])
            assert held(simulator.stats()) == before
            memory.do(entry)
        simulator.clear_faults()
        caller.use(OTHER_DEVICE)
        memory.close()

    def test_failure_at_any_call_of_open_takes_nothing(self, simulator: Simulator) -> None:
        driver = self.table(simulator)
        before = held(simulator.stats())
        for nth in count(1):
            simulator.fail("*", nth, self.facts.codes["failed"])
            error = failure_of(driver.open)
            simulator.clear_faults()
            if error is None:
                break
            assert error.code == self.facts.codes["failed"]
            assert held(simulator.stats()) == before
        driver.close()
        assert nth > 3

    def test_failure_at_any_call_of_making_the_table_is_reported(self, simulator: Simulator) -> None:
        for nth in count(1):
            simulator.fail("*", nth, self.facts.codes["failed"])
            error = failure_of(lambda: self.table(simulator, UNOPENED_DEVICE))
            simulator.clear_faults()
            if error is None:
                break
            assert error.code == self.facts.codes["failed"]
        assert nth > 2

    def test_status_says_what_a_code_means(self, driver: DriverTable, simulator: Simulator) -> None:
        expected = {"out_of_memory": 1, "invalid": 2, "unsupported": 3, "no_device": 5, "failed": 6}
        for meaning, status in expected.items():
            simulator.fail(self.facts.create, code=self.facts.codes[meaning])
            assert raw_status(driver, "create", SIZE, ctypes.byref(ctypes.c_uint64())) == status, meaning

    def test_exhausted_device_is_out_of_memory(self, driver: DriverTable, simulator: Simulator) -> None:
        simulator.capacity = 4 * MIB
        handles = [driver.create(SIZE), driver.create(SIZE)]
        with pytest.raises(DeviceOutOfMemory, match=self.facts.names["out_of_memory"]):
            driver.create(SIZE)
        driver.release(handles.pop(), SIZE)
        handles.append(driver.create(SIZE))
        for handle in handles:
            driver.release(handle, SIZE)

    def test_error_of_earlier_work_is_not_taken_for_missing_memory(
        self, driver: DriverTable, simulator: Simulator
    ) -> None:
        simulator.fail(self.facts.create, code=self.facts.codes["failed"])
        with pytest.raises(DriverError, match=self.facts.names["failed"]):
            driver.create(SIZE)

    def test_error_is_not_kept_for_a_later_call(self, driver: DriverTable, simulator: Simulator) -> None:
        simulator.fail(self.facts.create, code=self.facts.codes["failed"])
        with pytest.raises(DriverError):
            driver.create(SIZE)
        handle = driver.create(SIZE)
        driver.release(handle, SIZE)

    @pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB + 1])
    def test_size_that_is_no_multiple_is_refused_before_the_vendor_sees_it(
        self, size: int, driver: DriverTable, simulator: Simulator
    ) -> None:
        created = simulator.calls().get(self.facts.create, 0)
        for entry in (driver.create, driver.reserve):
            with pytest.raises(DriverError, match=rf"size {size} is not a positive multiple of the granularity"):
                entry(size)
        assert simulator.calls().get(self.facts.create, 0) == created

    def test_unaligned_mapping_is_refused_before_the_vendor_sees_it(self, memory: DeviceMemory) -> None:
        memory.do("reserve", "create")
        with pytest.raises(DriverError, match="is not a positive multiple of the granularity"):
            memory.driver.map(memory.address + 512, SIZE, memory.handles[0])
        with pytest.raises(DriverError, match="is not a positive multiple of the granularity"):
            memory.driver.unmap(memory.address, SIZE - 1)

    # Life

    def test_open_and_close_balance(self, simulator: Simulator) -> None:
        driver = self.table(simulator)
        before = simulator.stats().context_references
        driver.open()
        driver.open()
        driver.close()
        driver.release(driver.create(SIZE), SIZE)
        driver.close()
        assert simulator.stats().context_references == before
        with pytest.raises(DriverError, match="the driver is not open"):
            driver.close()
        assert simulator.stats().context_references == before

    def test_entry_of_a_driver_that_is_not_open_is_refused(self, simulator: Simulator) -> None:
        driver = self.table(simulator)
        for entry in (driver.geometry, driver.memory_info, driver.stream_create, driver.device_synchronize):
            with pytest.raises(DriverError, match="the driver is not open"):
                entry()

    def test_driver_can_be_opened_again(self, simulator: Simulator) -> None:
        driver = self.table(simulator)
        for _ in range(3):
            driver.open()
            driver.release(driver.create(SIZE), SIZE)
            driver.close()

    def test_equal_requests_share_a_table(self, simulator: Simulator) -> None:
        first, second = self.table(simulator), self.table(simulator)
        first.open()
        handle = second.create(SIZE)
        first.release(handle, SIZE)
        second.close()

    # Finding the library and the device

    def test_library_named_by_the_environment_is_used(
        self, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(self.descriptor.DRIVER_VARIABLE, str(simulator.path))
        assert self.backend.driver_table(MAIN_DEVICE).simulated

    def test_path_that_is_no_library_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        path = tmp_path / "none.so"
        with pytest.raises(BackendUnavailable, match=r"the library asked for cannot be loaded \(.*none\.so"):
            DriverTable(driver_file(f"hardpoint_{self.facts.vendor}"), device=0, library=str(path))

    def test_environment_that_names_no_library_is_an_error_that_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variable = self.descriptor.DRIVER_VARIABLE
        monkeypatch.setenv(variable, str(tmp_path / "none.so"))
        with pytest.raises(BackendUnavailable, match=f"{variable} cannot be loaded"):
            self.backend.driver_table(0)

    def test_missing_library_gives_the_same_reason_as_the_probe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(self.descriptor.DRIVER_VARIABLE, raising=False)
        reason = self.descriptor.probe().reason
        if not reason.startswith("no "):
            pytest.skip("the vendor's library is installed on this machine")
        # In a process of its own: the simulated library, once loaded, answers to the usual name too.
        program = (
            f"from hardpoint_{self.facts.vendor}.allocator import driver_table\n"
            "from hardpoint.interfaces.errors import BackendUnavailable\n"
            "try: driver_table(0)\n"
            "except BackendUnavailable as error: print(error.found)\n"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == reason

    def test_library_without_required_symbols_is_an_error_that_lists_them(self, tmp_path: Path) -> None:
        library = tmp_path / "driver.so"
        source = "int unrelated(void) { return 0; }"
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compiler, input=source, text=True, check=True)
        with pytest.raises(BackendUnavailable, match=rf"lacks {self.facts.required_symbol} and \d+ more"):
            DriverTable(driver_file(f"hardpoint_{self.facts.vendor}"), device=0, library=str(library))

    @pytest.mark.parametrize("index", [-1, 8, 1000])
    def test_device_that_does_not_exist_is_unavailable(self, index: int, simulator: Simulator) -> None:
        with pytest.raises(BackendUnavailable, match=rf"device {index} was asked for, and .* has 8"):
            self.table(simulator, index)

    def test_driver_without_a_device_is_unavailable(self, simulator: Simulator) -> None:
        simulator.fail(self.facts.count, code=self.facts.codes["no_device"])
        with pytest.raises(BackendUnavailable):
            self.table(simulator, UNUSABLE_DEVICE)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"unknown": 1}, "unknown option 'unknown'"),
            ({"": 1}, "option '=1' is not of the form key=value"),
            ({"a": "1;b"}, "option 'b' is not of the form key=value"),
            ({"a": "1;a=2"}, "option 'a' is given twice"),
        ],
    )
    def test_bad_option_is_an_error_that_names_it(
        self, options: dict[str, object], problem: str, simulator: Simulator
    ) -> None:
        with pytest.raises(DriverError, match=problem) as caught:
            self.table(simulator, UNUSABLE_DEVICE, **options)
        assert (caught.value.call, caught.value.code) == ("hp_driver_open", 0)

    def test_long_text_is_cut_between_characters(self, simulator: Simulator) -> None:
        with pytest.raises(DriverError, match=r"^driver call hp_driver_open failed.*unknown option 'é*é") as caught:
            self.table(simulator, UNUSABLE_DEVICE, **{"é" * 300: 1})
        assert len(caught.value.text.encode()) == 318

    # Quirks

    def test_device_as_it_is_has_the_quirks_that_are_known(self, driver: DriverTable, simulator: Simulator) -> None:
        before = held(simulator.stats())
        assert driver.quirks() == self.facts.quirks
        assert held(simulator.stats()) == before

    def test_quirks_are_found_by_probing(self, driver: DriverTable, simulator: Simulator) -> None:
        before = held(simulator.stats())
        for setting, (value, bits) in self.facts.quirk_settings.items():
            driver.close()  # what was found is remembered while it is open
            driver.open()
            usual = simulator.get(setting)  # type: ignore[arg-type]
            simulator.set(setting, value)  # type: ignore[arg-type]
            assert driver.quirks() == bits, setting
            assert driver.quirks() == bits, setting
            simulator.set(setting, usual)  # type: ignore[arg-type]
            assert held(simulator.stats()) == before, setting

    def test_failure_at_any_call_of_the_quirk_probe_is_reported_and_changes_nothing(
        self, driver: DriverTable, simulator: Simulator
    ) -> None:
        before = held(simulator.stats())
        calls_before = simulator.stats().calls
        in_fresh_thread(driver.quirks)
        for nth in range(1, simulator.stats().calls - calls_before + 1):
            simulator.fail("*", nth, self.facts.codes["failed"])
            error = failure_of(driver.quirks)
            simulator.clear_faults()
            assert error is None or error.code == self.facts.codes["failed"]
            assert held(simulator.stats()) == before, nth

    # Torch

    def test_torchs_allocator_symbols_call_what_the_core_installed(self, tmp_path: Path) -> None:
        vendor = self.facts.vendor
        # A copy is a library of its own, to which nothing was installed.
        library = ctypes.CDLL(str(shutil.copy(driver_file(f"hardpoint_{vendor}"), tmp_path / "copy.so")))
        malloc, free = library[f"hp_{vendor}_malloc"], library[f"hp_{vendor}_free"]
        malloc.restype = ctypes.c_void_p
        malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.restype = None
        assert malloc(512, 0, None) is None

        seen: list[tuple[object, ...]] = []

        def allocated(device: int, size: int) -> int:
            seen.append(("allocate", device, size))
            return 0x7000

        def freed(address: int) -> None:
            seen.append(("free", address))

        allocate = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int32, ctypes.c_size_t)(allocated)
        release = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(freed)

        class Functions(ctypes.Structure):
            _fields_ = [("struct_size", ctypes.c_size_t), ("allocate", type(allocate)), ("free", type(release))]

        functions = Functions(ctypes.sizeof(Functions), allocate, release)
        library.hp_torch_install(ctypes.byref(functions))
        assert malloc(512, 3, None) == 0x7000
        assert malloc(0, 3, None) is None
        free(0x7000, 512, 3, None)
        free(None, 0, 3, None)
        assert seen == [("allocate", 3, 512), ("free", 0x7000)]
