"""Sleep and wake of the memory engine beside the limits of this machine, measured in the same run.

    python benchmarks/sleep.py [--json FILE] [--gib 2] [--rounds 5] [--directory DIR]

On the CPU: weights of `--gib` GiB in 64 MiB tensors. Tier host is held against a plain copy with non-temporal stores by the same
number of threads, plus unmapping (or mapping) the same bytes in one call; tier disk against direct I/O of the same bytes. Ours
and the limit take turns, after a warm-up of all memory involved (and, before whatever takes fresh memory, of the system's free
pages: a virtual machine's host takes those back within seconds, and gives them again at a fraction of the speed); each ratio is
taken within a round and the median of the rounds is shown. No peer does this on a CPU: vLLM's sleep mode is a no-op there, and
torch_memory_saver needs an accelerator.

Bookkeeping: one block through the engine against the bare calls of the same library (the simulated CUDA driver), and a sleep of
10,000 allocations over a driver that does nothing. Memory: what the operating system says of this process.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import REPOSITORY, Verdict, command, machine, median, verdict_table, write_json

from hardpoint.interfaces import KV_CACHE, WEIGHTS, FileExtent, MemoryReport, Policy, SleepPlan, SleepTier
from hardpoint.memory import DriverTable, VirtualPool

GIB = 1 << 30
TENSOR = 64 << 20
DISK_PAUSE = 1.0  # seconds
KEEP = frozenset({WEIGHTS})
NATIVE = Path(__file__).with_name("native")


def compiled(name: str) -> Path:
    """Compile one of the native files for this machine and return the library."""
    build = REPOSITORY / "build" / "benchmarks"
    build.mkdir(parents=True, exist_ok=True)
    library = build / f"{name}.so"
    compiler = os.environ.get("CXX", "g++")
    include = REPOSITORY / "core" / "include"
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", f"-I{include}"]
    subprocess.run([compiler, *flags, str(NATIVE / f"{name}.cpp"), "-o", str(library), "-ldl"], check=True)
    return library


class Limits:
    """The native limits, as typed calls that return seconds."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(compiled("limits")))
        self._library.limits_memory.restype = ctypes.c_void_p

    def memory(self, size: int) -> int:
        """Return the address of fresh memory in huge pages."""
        address: int = self._library.limits_memory(ctypes.c_size_t(size))
        return address

    def free(self, address: int, size: int) -> None:
        """Give memory back."""
        self._library.limits_free(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def warm_free_pages(self, size: int) -> None:
        """Touch so much fresh memory and give it back: what is taken next is memory that the machine really has."""
        address = self.memory(size)
        ctypes.memset(address, 1, size)
        self.free(address, size)

    def seconds(self, name: str, *arguments: object) -> float:
        """Call a function; raises OSError when it failed."""
        function = self._library[f"limits_{name}"]
        function.restype = ctypes.c_double
        seconds: float = function(*arguments)
        if seconds < 0:
            raise OSError(f"limits_{name} failed")
        return seconds


def pointer(address: int) -> ctypes.c_void_p:
    """Return an address as an argument."""
    return ctypes.c_void_p(address)


def resident() -> int:
    """Return the bytes of this process in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS")


def timed(work: Callable[[], MemoryReport]) -> float:
    """Return the seconds of a sleep or wake, as its caller sees them."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Weights:
    """Filled weights in a pool of the CPU driver."""

    def __init__(self, size: int) -> None:
        from hardpoint_cpu.driver import driver_table

        self.pool = VirtualPool(driver_table())
        self.size = size
        block = os.urandom(TENSOR)
        self.addresses = [self.pool.allocate(TENSOR, WEIGHTS) for _ in range(size // TENSOR)]
        for address in self.addresses:
            self.pool.write(address, block)

    def free(self) -> None:
        """Give everything back."""
        for address in self.addresses:
            self.pool.free(address)
        self.pool.close()


def measure_copies(limits: Limits, weights: Weights, rounds: int, threads: int) -> dict[str, Any]:
    """Sleep to the host and wake, in turn with the plain copy."""
    size = weights.size
    data, backup = limits.memory(size), limits.memory(size)
    arguments = (pointer(data), pointer(backup), ctypes.c_size_t(size), ctypes.c_int(threads))
    plan = SleepPlan(tier=SleepTier.HOST)
    samples: dict[str, list[float]] = {name: [] for name in ("sleep", "wake", "copy_out", "copy_in")}
    for round_ in range(rounds + 1):
        turn: dict[str, float] = {}
        limits.warm_free_pages(size)
        turn["copy_in"] = limits.seconds("copy_in", *arguments)
        turn["copy_out"] = limits.seconds("copy_out", *arguments)
        turn["sleep"] = timed(lambda: weights.pool.sleep(plan))
        limits.warm_free_pages(size)
        turn["wake"] = timed(weights.pool.wake)
        if round_:  # the first one meets memory that this machine has never used
            for name, seconds in turn.items():
                samples[name].append(seconds)
    limits.free(data, size)
    limits.free(backup, size)
    weights.pool.trim()
    return samples


def measure_disk(limits: Limits, weights: Weights, rounds: int, directory: Path) -> dict[str, Any]:
    """Sleep to the disk and wake, in turn with direct I/O by the number of threads that is best for it.

    Who goes first changes from round to round, and each write waits until the disk is quiet: what one wrote and removed slows the
    next. Reads follow their write at once: a pause would give the free pages back to a virtual machine's host.
    """
    size = weights.size
    data = limits.memory(size)
    ctypes.memset(data, 1, size)
    path = str(directory / "limit.bin").encode()
    plan = SleepPlan(tier=SleepTier.DISK, disk_directory=str(directory))
    samples: dict[str, Any] = {name: [] for name in ("sleep", "wake", "write", "read")}
    samples["direct_io"] = True

    def settle() -> None:
        os.sync()
        time.sleep(DISK_PAUSE)

    def limit(name: str, threads: int) -> float:
        if name == "write":
            settle()
        limits.warm_free_pages(size)
        return limits.seconds(name, path, pointer(data), ctypes.c_size_t(size), ctypes.c_int(threads))

    def best(name: str) -> int:
        return min((1, 2, 3), key=lambda threads: median([limit(name, threads) for _ in range(3)]))

    def write_and_read() -> None:
        samples["write"].append(limit("write", writers))
        samples["read"].append(limit("read", readers))
        os.unlink(path)

    def sleep_and_wake() -> None:
        settle()
        start = time.perf_counter()
        report = weights.pool.sleep(plan)
        samples["sleep"].append(time.perf_counter() - start)
        samples["direct_io"] = samples["direct_io"] and report.direct_io
        limits.warm_free_pages(size)
        samples["wake"].append(timed(weights.pool.wake))

    writers, readers = best("write"), best("read")
    samples["threads"] = {"write": writers, "read": readers}
    os.unlink(path)
    weights.pool.sleep(plan)
    weights.pool.wake()
    for round_ in range(2 * rounds):
        for turn in (write_and_read, sleep_and_wake)[:: 1 if round_ % 2 else -1]:
            turn()
    limits.free(data, size)
    return samples


def measure_without_copies(weights: Weights, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Sleep that copies nothing: discarded, kept on the host, kept on disk, and read again from their source."""
    samples: dict[str, list[float]] = {name: [] for name in ("level 2", "kept on host", "kept on disk", "source")}
    pool, size = weights.pool, weights.size
    source = directory / "weights.bin"
    with source.open("wb") as file:
        for address in weights.addresses:
            file.write(pool.read(address, TENSOR))
    for name, tier in (("kept on host", SleepTier.HOST), ("kept on disk", SleepTier.DISK)):
        plan = SleepPlan(tier=tier, keep=KEEP, disk_directory=str(directory))
        pool.sleep(plan)
        pool.wake()
        for _ in range(rounds):
            samples[name].append(timed(lambda plan=plan: pool.sleep(plan)))  # type: ignore[misc]
            pool.wake()
    for index, address in enumerate(weights.addresses):
        pool.declare_source(address, TENSOR, [FileExtent(0, TENSOR, str(source), index * TENSOR)])
    for _ in range(rounds):
        samples["source"].append(timed(lambda: pool.sleep(SleepPlan(tier=SleepTier.SOURCE))))
        pool.wake()
    for _ in range(rounds):
        samples["level 2"].append(timed(lambda: pool.sleep(SleepPlan(policies={WEIGHTS: Policy.DISCARD}))))
        pool.wake()
        for address in weights.addresses:
            ctypes.memset(address, 1, TENSOR)
    return {name: [seconds / (size / GIB) for seconds in values] for name, values in samples.items()}


def measure_block(limits: Limits, rounds: int) -> dict[str, list[float]]:
    """Allocate and free a block of 2 MiB: the engine over the simulated CUDA driver, and the library's bare calls."""
    from hardpoint import _native
    from hardpoint_cuda.allocator import driver_table
    from hardpoint_simulators import Simulator

    simulator = Simulator("cuda")
    simulator.reset()
    os.environ["HARDPOINT_CUDA_DRIVER"] = str(simulator.path)
    table = driver_table(0)
    pool = VirtualPool(table)
    exported = ctypes.CDLL(str(table.module))
    exported.hp_torch_install(ctypes.c_void_p(_native.torch_functions()))
    _native.enter_torch_pool(pool.native, 0, WEIGHTS, Policy.PRESERVE)
    block, count = ctypes.c_size_t(2 << 20), 500
    samples: dict[str, list[float]] = {"engine": [], "bare": []}
    for round_ in range(4 * rounds + 1):
        bare = limits.seconds("bare_calls", str(simulator.path).encode(), block, ctypes.c_int(count))
        functions = (exported.hp_cuda_malloc, exported.hp_cuda_free)
        engine = limits.seconds("allocator_calls", *functions, block, ctypes.c_int(count))
        if round_:
            samples["bare"].append(bare / count)
            samples["engine"].append(engine / count)
    _native.leave_torch_pool(0)
    pool.close()
    return samples


def measure_books(rounds: int, count: int = 10_000) -> dict[str, list[float]]:
    """Sleep and wake of many small allocations over a driver that does nothing; seconds per allocation."""
    pool = VirtualPool(DriverTable(compiled("null_driver"), device=0))
    addresses = [pool.allocate(2 << 20, WEIGHTS if index % 2 else KV_CACHE) for index in range(count)]
    plans = {
        "discarded": SleepPlan(policies={WEIGHTS: Policy.DISCARD, KV_CACHE: Policy.DISCARD}),
        "preserved": SleepPlan(host_budget=1 << 40),
    }
    samples: dict[str, list[float]] = {f"{kind} {what}": [] for kind in plans for what in ("sleep", "wake")}
    for kind, plan in plans.items():
        for _ in range(rounds + 1):
            sleep, wake = timed(lambda plan=plan: pool.sleep(plan)), timed(pool.wake)  # type: ignore[misc]
            samples[f"{kind} sleep"].append(sleep / count)
            samples[f"{kind} wake"].append(wake / count)
        for name in (f"{kind} sleep", f"{kind} wake"):
            del samples[name][0]
    for address in addresses:
        pool.free(address)
    pool.close()
    return samples


def measure_memory(directory: Path, size: int = 256 << 20, cycles: int = 100) -> dict[str, Any]:
    """What the operating system says: bytes that come back, and what a hundred cycles leave behind."""
    weights = Weights(size)
    plan = SleepPlan(tier=SleepTier.DISK, disk_directory=str(directory))

    def counts() -> dict[str, int]:
        status = Path("/proc/self/status").read_text().splitlines()
        address_space = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
        return {
            "resident": resident(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "address_space": address_space,
        }

    for _ in range(3):
        weights.pool.sleep(plan)
        weights.pool.wake()
    before, awake = counts(), resident()
    weights.pool.sleep(plan)
    freed = awake - resident()
    weights.pool.wake()
    for _ in range(cycles):
        weights.pool.sleep(plan)
        weights.pool.wake()
    after = counts()
    weights.free()
    return {
        "slept_bytes": size,
        "resident_fell_by": freed,
        "cycles": cycles,
        "growth": {name: after[name] - before[name] for name in before},
    }


def verdicts(results: dict[str, Any], size: int) -> list[Verdict]:
    """Hold the results against their bars."""

    def rate(name: str, ours: list[float], limit: list[float], whose: str, bar: float) -> Verdict:
        ratio = median([theirs / mine for mine, theirs in zip(ours, limit, strict=True)])
        gb = size / 1e9
        return Verdict(
            name, gb / median(ours), gb / median(limit), whose, f"≥ {bar:.2f} (rounds: {ratio:.2f})", ratio >= bar
        )

    host, disk, block = results["host"], results["disk"], results["block"]
    found = [
        rate("host tier: sleep, GB/s", host["sleep"], host["copy_out"], "non-temporal copy and unmap", 0.8),
        rate("host tier: wake, GB/s", host["wake"], host["copy_in"], "map and non-temporal copy", 0.8),
        rate("disk tier: sleep, GB/s", disk["sleep"], disk["write"], "direct write and fdatasync", 0.85),
        rate("disk tier: wake, GB/s", disk["wake"], disk["read"], "map and direct read", 0.85),
    ]
    for name, values in results["without_copies"].items():
        ours = median(values) * 1e3
        found.append(Verdict(f"sleep without copies, {name}: ms per GiB", ours, 10.0, "bar", "≤ 10", ours <= 10))
    ratio = median([mine / bare for mine, bare in zip(block["engine"], block["bare"], strict=True)])
    found.append(
        Verdict(
            "allocate and free 2 MiB: µs",
            median(block["engine"]) * 1e6,
            median(block["bare"]) * 1e6,
            "bare calls (simulated)",
            f"≤ 1.50 (rounds: {ratio:.2f})",
            ratio <= 1.5,
        )
    )
    for name, values in results["books"].items():
        ours = median(values) * 1e6
        bar = "≤ 2" if "sleep" in name else None
        found.append(Verdict(f"10,000 allocations, {name}: µs each", ours, 2.0, "bar", bar, ours <= 2 if bar else None))
    memory = results["memory"]
    share = memory["resident_fell_by"] / memory["slept_bytes"]
    found.append(Verdict("resident memory fell by, of slept bytes", share, 1.0, "slept bytes", "≥ 0.99", share >= 0.99))
    growth = memory["growth"]
    grown = growth["resident"] / 1e6
    found.append(Verdict("100 cycles: resident memory grew by, MB", grown, None, "", "≤ 1", grown <= 1))
    for name in ("descriptors", "mappings", "address_space"):
        found.append(Verdict(f"100 cycles: {name} grew by", growth[name], None, "", "= 0", growth[name] <= 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="for backups on disk; default: build/ of the checkout")
    arguments = parser.parse_args()
    about = machine(("hardpoint", "hardpoint-cpu", "hardpoint-cuda", "hardpoint-simulators"))
    threads = min(len(os.sched_getaffinity(0)), 8)
    size = int(arguments.gib * GIB) // TENSOR * TENSOR
    parent = arguments.directory or REPOSITORY / "build"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        directory = Path(name)
        limits = Limits()
        results: dict[str, Any] = {"memory": measure_memory(directory)}
        weights = Weights(size)
        results["host"] = measure_copies(limits, weights, arguments.rounds, threads)
        results["disk"] = measure_disk(limits, weights, arguments.rounds, directory)
        results["without_copies"] = measure_without_copies(weights, arguments.rounds, directory)
        weights.free()
        results["block"] = measure_block(limits, arguments.rounds)
        results["books"] = measure_books(arguments.rounds)
    found = verdicts(results, size)
    print(command())
    print(f"{about['cpu']}, {threads} threads, {size / GIB:g} GiB, load {about['load_average_at_start'][0]}")
    print("Ratios within rounds decide; ours and reference are medians. The CUDA driver is simulated.\n")
    print(verdict_table(found))
    if arguments.json:
        write_json(
            arguments.json,
            {
                "command": command(),
                "machine": about,
                "unit": "seconds unless said otherwise",
                "threads": threads,
                "bytes": size,
                "simulated": ["block"],
                "results": results,
                "verdicts": [verdict.as_dict() for verdict in found],
            },
        )


if __name__ == "__main__":
    main()
