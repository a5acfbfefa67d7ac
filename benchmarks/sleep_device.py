"""Sleep and wake of the memory engine on a device, beside the speed of pinned copies measured there in the same run.

    python benchmarks/sleep_device.py --backend cuda [--device 0] [--gib 8] [--rounds 5] [--model qwen3-0.6b] [--json FILE]

Works on any backend's memory driver, without torch; where the backend computes too, a whole engine sleeps and wakes at the end, with
the graphs that it captured, and must give the same tokens after every wake. The limit is what large copies between the device and
pinned host memory reach on one stream, best of several, in each direction. Held against it are the first sleep, with its host memory
pinned on the way and pinned before in the background (the time of pinning is shown apart), and later sleeps and wakes to the host;
without a copy: sleep of weights whose backup is kept, and of level 2; and the disk tier. After each wake that restores bytes, the
first, the last and random ones are compared. Bars are for real accelerators, and one that is not met ends the run with status 1: over
a simulated driver the figures mean nothing, and on the CPU `sleep.py` has its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from child import ChildFailed, run_script
from device_shapes import DECODERS
from report import REPOSITORY, Verdict, command, machine, median, verdict_table, write_json

from hardpoint.interfaces import WEIGHTS, MemoryReport, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import HardpointError
from hardpoint.memory import DriverFlags, DriverQuirks, DriverTable, VirtualPool

GIB = 1 << 30
TENSOR = 64 << 20
SAMPLE = 4096
KEEP = frozenset({WEIGHTS})
DISCARD = SleepPlan(policies={WEIGHTS: Policy.DISCARD})


def driver_table(backend: str, device: int) -> DriverTable:
    """Return the memory driver of a backend's device."""
    table: DriverTable = import_module(f"hardpoint_{backend}.allocator").driver_table(device)
    return table


class PinnedCopies:
    """Copies between the device and pinned host memory, in the driver's largest chunks, through its own entries."""

    def __init__(self, driver: DriverTable, size: int) -> None:
        self._driver = driver
        geometry = driver.geometry()
        self._chunk = min(geometry.max_chunk or size, size) // geometry.recommended * geometry.recommended
        self.size = size // self._chunk * self._chunk

    @contextmanager
    def _memory(self) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """Take the memory and a stream; yields the chunks' (address, host address), and the stream."""
        driver, chunk = self._driver, self._chunk
        with mmap.mmap(-1, self.size) as mapped:
            view = ctypes.c_char.from_buffer(mapped)
            host = ctypes.addressof(view)
            ctypes.memset(host, 1, self.size)
            driver.host_register(host, self.size)
            stream, address = driver.stream_create(), driver.reserve(self.size)
            offsets = range(0, self.size, chunk)
            handles = [driver.create(chunk) for _ in offsets]
            for offset, handle in zip(offsets, handles, strict=True):
                driver.map(address + offset, chunk, handle)
            yield [(address + offset, host + offset) for offset in offsets], stream
            driver.device_synchronize()
            for offset, handle in zip(offsets, handles, strict=True):
                driver.unmap(address + offset, chunk)
                driver.release(handle, chunk)
            driver.release_address(address, self.size)
            driver.stream_destroy(stream)
            driver.host_unregister(host, self.size)
            del view

    def measure(self, rounds: int) -> dict[str, float]:
        """Return the best bytes per second of `rounds` copies out of and into the device, after one to warm up."""
        best = {"out": 0.0, "in": 0.0}
        with self._memory() as (chunks, stream):
            for _ in range(rounds + 1):
                for way in best:
                    start = time.perf_counter()
                    for address, host in chunks:
                        if way == "out":
                            self._driver.copy_to_host(host, address, self._chunk, stream)
                        else:
                            self._driver.copy_to_device(address, host, self._chunk, stream)
                    self._driver.stream_synchronize(stream)
                    best[way] = max(best[way], self.size / (time.perf_counter() - start))
        return best


class Weights:
    """Filled weights on a device, every tensor with other bytes."""

    def __init__(self, driver: DriverTable, size: int) -> None:
        self.pool = VirtualPool(driver)
        self.size = size
        count = size // TENSOR
        self._content = memoryview(os.urandom(TENSOR + count * SAMPLE))
        self.addresses = [self.pool.allocate(TENSOR, WEIGHTS) for _ in range(count)]
        self.write()

    def write(self) -> None:
        """Give every tensor its bytes."""
        for index, address in enumerate(self.addresses):
            self.pool.write(address, self._expected(index, 0, TENSOR))

    def check(self) -> None:
        """Compare the first, the last and random bytes of every tensor; exits when some are others."""
        for index, address in enumerate(self.addresses):
            for offset in (0, TENSOR - SAMPLE, *(random.randrange(TENSOR - SAMPLE) for _ in range(4))):
                if self.pool.read(address + offset, SAMPLE) != self._expected(index, offset, SAMPLE):
                    sys.exit(f"tensor {index} has other bytes at {offset} after a wake")

    def close(self) -> None:
        """Give everything back."""
        for address in self.addresses:
            self.pool.free(address)
        self.pool.trim()
        self.pool.close()

    def _expected(self, index: int, offset: int, size: int) -> memoryview:
        start = index * SAMPLE + offset
        return self._content[start : start + size]


class Samples:
    """Seconds by name, and the share of unmapped memory that came back by the driver's count.

    That is not counted (`counted`) where the device's memory is the host's, which backups and everybody else take from.
    """

    def __init__(self, counted: bool) -> None:
        self._counted = counted
        self.seconds: dict[str, list[float]] = {}
        self.returned: list[float] = []

    def take(self, name: str, work: Callable[[], MemoryReport]) -> MemoryReport:
        """Time a sleep or wake as its caller sees it."""
        start = time.perf_counter()
        report = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        if "sleep" in name and self._counted:
            self.returned.append((report.free_after - report.free_before) / report.unmapped)
        return report


def measure_first_sleep(driver: DriverTable, size: int, samples: Samples, *, prepared: bool) -> None:
    """The first sleep of new weights, whose host memory is pinned before or on the way."""
    weights = Weights(driver, size)
    plan = SleepPlan(tier=SleepTier.HOST)
    if prepared:
        start = time.perf_counter()
        weights.pool.prepare_sleep(plan)
        while weights.pool.books().host_held < size:
            if time.perf_counter() - start > 600:
                sys.exit("host memory was not pinned within ten minutes")
            time.sleep(0.001)
        samples.seconds.setdefault("pinning in the background", []).append(time.perf_counter() - start)
    samples.take("first sleep, prepared" if prepared else "first sleep", lambda: weights.pool.sleep(plan))
    weights.pool.wake()
    weights.check()
    weights.close()


def measure_steady(weights: Weights, samples: Samples, rounds: int, directory: Path) -> dict[str, Any]:
    """Sleep and wake again and again: to the host, with kept backups, without weights, to the disk."""
    pool = weights.pool
    host, kept = SleepPlan(tier=SleepTier.HOST), SleepPlan(tier=SleepTier.HOST, keep=KEEP)
    disk = SleepPlan(tier=SleepTier.DISK, disk_directory=str(directory))

    def cycle(name: str, plan: SleepPlan, count: int = rounds) -> MemoryReport:
        for _ in range(count):
            report = samples.take(f"{name}: sleep", lambda: pool.sleep(plan))
            samples.take(f"{name}: wake", pool.wake)
            weights.check()
        return report

    pool.sleep(host)  # the first one pins host memory
    pool.wake()
    cycle("host", host)
    pool.sleep(kept)
    pool.wake()
    copied = cycle("kept", kept).preserved
    if copied:
        sys.exit(f"{copied} bytes were copied although their backup was kept")
    for _ in range(rounds):
        samples.take("level 2: sleep", lambda: pool.sleep(DISCARD))
        samples.take("level 2: wake", pool.wake)
        weights.write()
    return {"direct_io": cycle("disk", disk, min(rounds, 3)).direct_io}


def measure_engine(backend: str, device: int, simulated: bool, model: str, rounds: int) -> dict[str, Any]:
    """Let a whole engine sleep and wake with its graphs, in a process of its own; returns its answer, or why there is none."""
    descriptor = import_module(f"hardpoint_{backend}.descriptor").hardpoint_backend()
    if simulated:
        return {"not_run": "the driver is simulated, and computes nothing"}
    found = descriptor.probe()
    if found.reason:
        return {"not_run": found.reason}
    script = Path(__file__).parent / "peers" / "device_engine_sleep.py"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(DECODERS[model].config), encoding="utf-8")
        arguments = [backend, str(device), folder, str(rounds)]
        try:
            return {"model": model} | run_script(sys.executable, script, arguments, timeout_s=180)
        except ChildFailed as error:
            return {"error": str(error)}


def engine_verdicts(engine: dict[str, Any]) -> list[Verdict]:
    """Return the lines of the engine's sleep; on every device the tokens must be the same."""
    if "tokens" not in engine:
        return []
    what = f"engine ({engine['model']}, {'with' if engine['graphs'] else 'without'} graphs)"
    same, all_tokens = min(engine["same_tokens"]), engine["tokens"]
    return [
        Verdict(f"{what}: sleep, ms", median(engine["sleep_s"]) * 1e3, None, "", None, None),
        Verdict(f"{what}: wake, ms", median(engine["wake_s"]) * 1e3, None, "", None, None),
        Verdict(f"{what}: memory of graphs, MB", engine["graph_bytes"] / 1e6, None, "", None, None),
        Verdict(f"{what}: equal tokens after a wake", same, all_tokens, "before", "= 1.00", same == all_tokens),
    ]


def verdicts(samples: Samples, copies: dict[str, float], size: int, simulated: bool, held: bool) -> list[Verdict]:
    """Hold the results against the copies, and where `held` against the bars."""
    note = " (simulated)" if simulated else ""

    def judged(ok: bool) -> bool | None:
        return ok if held else None

    def rate(name: str, key: str, way: str, bar: float | None) -> Verdict:
        ours, limit = size / median(samples.seconds[key]), copies[way]
        met = None if bar is None else judged(ours >= bar * limit)
        words = None if bar is None else f"≥ {bar:.2f}"
        return Verdict(f"{name}, GB/s", ours / 1e9, limit / 1e9, f"pinned copy {way}{note}", words, met)

    def milliseconds(name: str, key: str, bar: float | None) -> Verdict:
        ours = median(samples.seconds[key]) * 1e3
        words = None if bar is None else f"< {bar:.0f}"
        return Verdict(
            f"{name}, ms", ours, bar, "bar" if bar else "", words, None if bar is None else judged(ours < bar)
        )

    found = [
        rate("first sleep, host memory pinned on the way", "first sleep", "out", None),
        rate("first sleep, pinned in the background", "first sleep, prepared", "out", 0.9),
        milliseconds("pinning in the background", "pinning in the background", None),
        rate("steady sleep to the host", "host: sleep", "out", 0.9),
        rate("steady wake from the host", "host: wake", "in", 0.85),
        milliseconds("sleep with a kept backup", "kept: sleep", 100),
        rate("wake from a kept backup", "kept: wake", "in", 0.85),
        milliseconds("level-2 sleep", "level 2: sleep", None),
        milliseconds("level-2 wake", "level 2: wake", None),
        rate("sleep to the disk", "disk: sleep", "out", None),
        rate("wake from the disk", "disk: wake", "in", None),
    ]
    if samples.returned:
        back, name = min(samples.returned), "memory back, of slept bytes (worst sleep)"
        found.append(Verdict(name, back, 1.0, f"driver's count{note}", "> 0.90", judged(back > 0.9)))
    return found


def fitting(size: int, driver: DriverTable) -> int:
    """Return as much of `size` as device and host have room for; exits when that is nothing."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = min(size, driver.memory_info()[0] * 8 // 10, available * 4 // 10) // TENSOR * TENSOR
    if not room:
        sys.exit(f"neither the device nor the host may be without {TENSOR >> 20} free MiB")
    return room


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, choices=("cuda", "rocm", "ascend", "cpu"))
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--gib", type=float, default=8.0, help="of weights; less where device or host have no room")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--model", choices=tuple(DECODERS), default="qwen3-0.6b", help="of the engine that sleeps at the end"
    )
    parser.add_argument("--directory", type=Path, help="for backups on disk; default: build/ of the checkout")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    about = machine(("hardpoint", f"hardpoint-{arguments.backend}", "hardpoint-simulators"))
    parent = arguments.directory or REPOSITORY / "build"
    parent.mkdir(parents=True, exist_ok=True)

    try:
        driver = driver_table(arguments.backend, arguments.device)
        driver.open()
    except HardpointError as error:
        sys.exit(str(error))
    asked = int(arguments.gib * GIB)
    size = fitting(asked, driver)
    device = {
        "backend": arguments.backend,
        "index": arguments.device,
        "name": driver.device_name(),
        "driver_version": driver.driver_version(),
        "total_memory": driver.memory_info()[1],
        "quirks": [quirk.name for quirk in driver.quirks()],
        "simulated": driver.simulated,
    }
    host_memory = DriverFlags.HOST_ACCESSIBLE in driver.flags or DriverQuirks.UNIFIED_MEMORY in driver.quirks()
    samples = Samples(counted=not host_memory)
    pinned = PinnedCopies(driver, min(size, GIB))
    before = pinned.measure(arguments.rounds)
    for prepared in (False, True):
        measure_first_sleep(driver, size, samples, prepared=prepared)
    weights = Weights(driver, size)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        disk = measure_steady(weights, samples, arguments.rounds, Path(directory))
    weights.close()
    after = pinned.measure(arguments.rounds)
    simulated = driver.simulated
    driver.close()
    engine = measure_engine(arguments.backend, arguments.device, simulated, arguments.model, arguments.rounds)
    copies = {way: max(before[way], after[way]) for way in before}

    held = arguments.backend != "cpu" and not simulated
    found = verdicts(samples, copies, size, simulated, held) + engine_verdicts(engine)
    print(command())
    warning = " SIMULATED DRIVER: ratios and times mean nothing." if simulated else ""
    print(f"{device['name']}, driver {device['driver_version']}, {size / GIB:g} GiB of weights.{warning}")
    if size < asked // TENSOR * TENSOR:
        print(f"{arguments.gib:g} GiB were asked for; device and host have no more room.")
    print(
        f"Medians of {arguments.rounds} rounds; pinned copies of {pinned.size / GIB:g} GiB, best of {2 * arguments.rounds}.\n"
    )
    print(verdict_table(found))
    if problem := engine.get("not_run") or engine.get("error"):
        print(f"\nThe sleep of an engine {'was not run' if 'not_run' in engine else 'FAILED'}: {problem}")
    if arguments.json:
        result = {
            "command": command(),
            "simulated": simulated,
            "machine": about,
            "device": device,
            "bytes": size,
            "pinned_copy_bytes_per_second": {"best": copies, "before": before, "after": after},
            "unit": "seconds",
            "seconds": samples.seconds,
            "memory_returned": samples.returned,
            "disk": disk,
            "engine": engine,
            "verdicts": [verdict.as_dict() for verdict in found],
        }
        write_json(arguments.json, result)
    if "error" in engine or any(verdict.met is False for verdict in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
