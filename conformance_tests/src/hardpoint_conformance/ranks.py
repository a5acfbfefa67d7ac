"""Collective operations run in processes of their own, one for each rank, with what each operation gave as plain numbers.

A rank reports every operation as soon as it is done. What a rank that died or hung did before is there; the operation in which it
did has no result, and that is what a test then finds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing import connection, forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces import Collectives, Device
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    import torch

WORLD = 2
_PRELOADED = ("torch", "hardpoint.worker", "hardpoint_conformance.worker_ranks")
_LARGE = 100_003
_TURNS, _PRIME = 50, 97

Make = Callable[[int], tuple[Collectives, str]]
"""Returns a rank's collectives and what torch calls its device; it must be picklable."""


@dataclass
class RankResult:
    """What one rank did.

    Attributes:
        values: of each operation that ended, by its name.
        errors: class names of each failed operation's error and its bases, and its text.
        seconds: of each operation.
        exit_code: of the process; None when it had to be killed.
    """

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    exit_code: int | None = None


def collectives_of(name: str, device: int, rank: int) -> tuple[Collectives, str]:
    """Make the collectives of an installed backend for a rank, on a device of its own where there are enough."""
    target = Target.find(name, device)
    devices: Sequence[Device] = target.record.devices
    chosen = devices[(device + rank) % len(devices)]
    return target.descriptor.make("collectives", chosen), chosen.torch_device


def make_for(target: Target) -> Make:
    """Return what makes a target's collectives in another process."""
    return partial(collectives_of, target.name, target.device.index)


def missing_devices(target: Target) -> str:
    """Return why ranks of an accelerator cannot be tested here; "" where each can have a device of its own."""
    found = len(target.record.devices)
    return (
        f"{WORLD} ranks need as many devices, and {found} is here"
        if target.descriptor.accelerator and found < WORLD
        else ""
    )


def process_context() -> ForkServerContext:
    """Return how processes of ranks are started: forks of one fresh process that has imported what all need, and has started no device."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def import_for_ranks() -> None:
    """Import what processes of ranks need."""
    for name in _PRELOADED:
        import_module(name)


def fork_server_here() -> None:
    """Let the process that ranks are forks of be a fork of this one, which has imported everything, and not a fresh one.

    For a process that has started no threads and no device. It is Python's own server, which `process_context` uses, with another
    beginning; Pythons whose servers begin in a way that is not known here keep theirs.
    """
    if sys.version_info >= (3, 14) or not sys.platform.startswith("linux"):
        return
    server: Any = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]  # without a file, on Linux
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, keep_alive = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(keep_alive)
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, keep_alive, pid


def run_ranks(
    make: Make,
    operations: Sequence[str],
    *,
    ranks: Sequence[int] = tuple(range(WORLD)),
    join_timeout: float = 20.0,
    limit: float = 60.0,
) -> dict[int, RankResult]:
    """Run operations of `OPERATIONS` in turn on ranks of a group of two, each in a process; return what each did.

    Args:
        ranks: those that come.
        join_timeout: given to `Collectives.start`.
        limit: seconds after which what still runs is killed.
    """
    context = process_context()
    init_method = f"tcp://127.0.0.1:{free_port()}"
    results = {rank: RankResult() for rank in ranks}
    readers: dict[Connection, int] = {}
    processes = {}
    for rank in ranks:
        reader, writer = context.Pipe(duplex=False)
        arguments = (make, rank, init_method, join_timeout, tuple(operations), writer)
        processes[rank] = context.Process(target=_rank, args=arguments, daemon=True)
        processes[rank].start()
        writer.close()
        readers[reader] = rank
    end = time.monotonic() + limit
    while readers and (left := end - time.monotonic()) > 0:
        for ready in wait(list(readers), left):
            assert isinstance(ready, Connection)
            try:
                operation, kind, value, seconds = ready.recv()
            except EOFError:
                del readers[ready]
                continue
            result = results[readers[ready]]
            result.seconds[operation] = seconds
            (result.values if kind == "value" else result.errors)[operation] = value
    for rank, process in processes.items():
        process.join(max(end - time.monotonic(), 1.0))
        if process.is_alive():
            process.kill()
            process.join()
        else:
            results[rank].exit_code = process.exitcode
    return results


def _rank(
    make: Make, rank: int, init_method: str, timeout: float, operations: Sequence[str], report: Connection
) -> None:
    collectives, device = make(rank)

    def run(name: str, work: Callable[[], Any]) -> bool:
        start = time.perf_counter()
        try:
            value, kind = work(), "value"
        except Exception as error:
            names = tuple(cls.__name__ for cls in type(error).__mro__)
            value, kind = (names, str(error)), "error"
        report.send((name, kind, value, time.perf_counter() - start))
        return kind == "value"

    if run("start", lambda: collectives.start(rank, WORLD, init_method, timeout)):
        for name in operations:
            run(name, partial(OPERATIONS[name], collectives, rank, device))
    with suppress(Exception):
        run("stop", collectives.stop)
        run("stop again", collectives.stop)
    report.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Operations: all numbers are integers that every element type in use holds exactly.


def _numbers(rank: int, shape: Sequence[int], dtype: str, device: str) -> torch.Tensor:
    """Return small integers that differ between ranks and places."""
    import torch

    count = 1
    for size in shape:
        count *= size
    values = torch.arange(count, dtype=torch.int64) * (rank + 3) % 61 - 20 * rank
    return values.reshape(tuple(shape)).to(getattr(torch, dtype)).to(device)


def expected(rank: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return what a rank puts in."""
    return _numbers(rank, shape, dtype, "cpu")


def _all_reduce(
    collectives: Collectives, rank: int, device: str, dtype: str = "float32", shape: Sequence[int] = (5, 7)
) -> Any:
    tensor = _numbers(rank, shape, dtype, device)
    collectives.all_reduce(tensor)
    return tensor.cpu().tolist()


def _all_gather(collectives: Collectives, rank: int, device: str, axis: int) -> Any:
    return collectives.all_gather(_numbers(rank, (3, 4), "float32", device), axis).cpu().tolist()


def _broadcast(collectives: Collectives, rank: int, device: str, source: int) -> Any:
    tensor = _numbers(rank, (6,), "float32", device)
    collectives.broadcast(tensor, source)
    return tensor.cpu().tolist()


def _send_receive(collectives: Collectives, rank: int, device: str) -> Any:
    """Rank 0 sends, rank 1 answers with what it got plus one; each returns what it has in the end."""
    tensor = _numbers(rank, (4, 5), "float32", device)
    if rank == 0:
        collectives.send(tensor, 1)
        tensor.fill_(-1)
        collectives.receive(tensor, 1)
    else:
        collectives.receive(tensor, 0)
        tensor += 1
        collectives.send(tensor, 0)
    return tensor.cpu().tolist()


def _many(collectives: Collectives, rank: int, device: str) -> Any:
    """Return the last of fifty sums in turn, each of the one before and of what the rank adds to it."""
    import torch

    tensor = torch.zeros(3, dtype=torch.int64, device=device)
    for turn in range(_TURNS):
        tensor += _added(turn, rank)
        tensor %= _PRIME
        collectives.all_reduce(tensor)
    return tensor.cpu().tolist()


def _added(turn: int, rank: int) -> int:
    return (turn + 1) * (rank + 1)


def _many_expected() -> list[int]:
    total = 0
    for turn in range(_TURNS):
        total = sum((total + _added(turn, rank)) % _PRIME for rank in range(WORLD))
    return [total] * 3


def _barrier(collectives: Collectives, rank: int, device: str) -> Any:
    """Rank 1 comes late; the time that each waited says whether the other waited for it."""
    collectives.barrier()
    if rank == 1:
        time.sleep(0.5)
    start = time.perf_counter()
    collectives.barrier()
    return time.perf_counter() - start


def _death(collectives: Collectives, rank: int, device: str) -> Any:
    """Rank 1 dies without a word; rank 0 goes into an operation with it."""
    if rank == 1:
        os._exit(7)
    return _all_reduce(collectives, rank, device)


OPERATIONS: Mapping[str, Callable[[Collectives, int, str], Any]] = {
    **{f"all-reduce-{dtype}": partial(_all_reduce, dtype=dtype) for dtype in ("float32", "bfloat16", "int64")},
    "all-reduce-large": partial(_all_reduce, shape=(_LARGE,)),
    **{f"all-gather-{axis}": partial(_all_gather, axis=axis) for axis in (0, 1)},
    **{f"broadcast-{source}": partial(_broadcast, source=source) for source in range(WORLD)},
    "send-receive": _send_receive,
    "many": _many,
    "barrier": _barrier,
    "death": _death,
}
SOUND = tuple(name for name in OPERATIONS if name != "death")


# What the operations must give


def check_operation(results: Mapping[int, RankResult], name: str) -> None:
    """Raise AssertionError where an operation of `SOUND` gave other than exactly what it must."""
    import torch

    for rank in range(WORLD):
        result = results[rank]
        assert name not in result.errors, f"rank {rank}: {result.errors.get(name)}"
        assert name in result.values, f"rank {rank} came to no end in {name} (exit code {result.exit_code})"
    found = [results[rank].values[name] for rank in range(WORLD)]
    kind, _, detail = name.rpartition("-")
    if name == "barrier":
        assert found[0] >= 0.4, "rank 0 did not wait for rank 1"
        return
    if name == "many":
        answer = _many_expected()
    elif name == "send-receive":
        answer = (expected(0, (4, 5), "float32") + 1).tolist()
    elif kind == "broadcast":
        answer = expected(int(detail), (6,), "float32").tolist()
    elif kind == "all-gather":
        answer = torch.cat([expected(rank, (3, 4), "float32") for rank in range(WORLD)], dim=int(detail)).tolist()
    else:
        shape, dtype = ((_LARGE,), "float32") if detail == "large" else ((5, 7), detail)
        answer = sum((expected(rank, shape, dtype) for rank in range(1, WORLD)), expected(0, shape, dtype)).tolist()
    # Compared outside of the assertion: a message with every element of the large ones would take minutes to make.
    wrong = [rank for rank in range(WORLD) if found[rank] != answer]
    assert not wrong, f"ranks {wrong} hold other values than {name} gives"


def check_missing_rank(result: RankResult, timeout: float) -> None:
    """Raise AssertionError unless a rank that waited in vain for the other got a WorkerError in time."""
    assert "start" not in result.values, "it joined a group that is not there"
    assert "start" in result.errors, "it waited for ever, or died"
    classes, text = result.errors["start"]
    assert "WorkerError" in classes, f"{classes[0]}: {text}"
    assert result.seconds["start"] <= timeout + 5.0


def check_dead_rank(result: RankResult) -> None:
    """Raise AssertionError unless the rank that is left got an error from its operation with a dead one."""
    assert "death" not in result.values, "an operation with a dead rank gave a result"
    assert "death" in result.errors, "it waited for ever, or died too"
