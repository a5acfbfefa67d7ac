"""Workers that are ranks of one model, each in a process of its own, driven like one worker.

The processes are started once and serve one set of workers after another. A step goes to all ranks at the same time; what the
driver rank gives is the answer, and what the others give can be looked at. A rank that fails, dies or hangs ends all of them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hardpoint.interfaces import WORKER_CALLS, WeightWrite, Worker, WorkerConfig
from hardpoint_conformance.ranks import free_port, process_context
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model
from hardpoint_conformance.worker_bench import WorkerBench, config_for

if TYPE_CHECKING:
    from torch import Tensor

_CALL_SECONDS = 60.0
_JOIN_SECONDS = 20.0


class RankProcesses:
    """One process for each rank, with a device of its own where there are enough."""

    def __init__(self, target: Target, world: int) -> None:
        context = process_context()
        self.world = world
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(target.name, target.device.index, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call all ranks, each with its own arguments, and return what each gave; raises AssertionError that names what failed."""
        try:
            for pipe, given in zip(self._pipes, arguments, strict=True):
                pipe.send((name, given))
            return self._answers(name)
        except (AssertionError, OSError) as error:
            self.close()
            raise AssertionError(f"the ranks failed in {name}: {error}") from None

    def _answers(self, name: str) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[str] = []
        end = time.monotonic() + _CALL_SECONDS
        while len(answers) < self.world and not failures:
            left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(left, max(end - time.monotonic(), 0.0))
            assert ready, f"no answer of ranks {[self._pipes.index(pipe) for pipe in left]} within {_CALL_SECONDS:g} s"
            for pipe in ready:
                rank = self._pipes.index(cast(Connection, pipe))
                try:
                    failed, value = self._pipes[rank].recv()
                except EOFError:
                    failed, value = True, "its process ended"
                answers[rank] = value
                if failed:
                    failures.append(f"rank {rank}: {value}")
        assert not failures, "; ".join(failures)
        return [answers[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes; idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


class WorkerRanks:
    """The workers of a model's ranks behind the calls of one worker: what the driver rank gives is the answer.

    Attributes:
        latest: what each rank gave to the latest call.
    """

    def __init__(self, processes: RankProcesses, config: WorkerConfig) -> None:
        self._processes, self._config = processes, config
        self.latest: list[Any] = []
        address = f"tcp://127.0.0.1:{free_port()}/conformance"
        configs = [
            replace(config, rank=rank, init_method=address, communication_timeout=_JOIN_SECONDS)
            for rank in range(processes.world)
        ]
        processes.call("make", [(one,) for one in configs])

    def __getattr__(self, name: str) -> Any:
        if name not in WORKER_CALLS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.latest = self._processes.call(name, [arguments] * self._processes.world)
            return self.latest[self._config.driver_rank]

        return call

    def update_weights_from(self, folder: str) -> int:
        """Update the weights of all ranks by the whole tensors of a model folder; return how many the driver used."""
        used: int = self._processes.call("update_weights_from", [(folder,)] * self._processes.world)[
            self._config.driver_rank
        ]
        return used


@contextmanager
def running_ranks(
    processes: RankProcesses, target: Target, model: Model, **changes: Any
) -> Iterator[tuple[WorkerBench, WorkerRanks]]:
    """Return ranks that are ready to serve a model; they are shut down at the end."""
    config = config_for(target.claims, model, world_size=processes.world, **changes)
    ranks = WorkerRanks(processes, config)
    try:
        yield WorkerBench(cast(Worker, ranks), config), ranks
    except BaseException:
        # What failed is the news, not that ranks which are gone cannot be shut down.
        with suppress(AssertionError):
            ranks.shutdown()
        raise
    ranks.shutdown()


def _serve(name: str, device: int, rank: int, pipe: Connection) -> None:
    """Make workers and call them as the other side asks, until it closes the pipe."""
    worker: Worker | None = None
    while True:
        try:
            call, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            value: Any = None
            if call == "make":
                target = Target.find(name, device)
                devices = target.record.devices
                worker = replace(target, device=devices[(device + rank) % len(devices)]).worker(*arguments)
            elif call == "update_weights_from":
                assert worker is not None
                value = worker.write_weights(WeightWrite.UPDATE, _tensors(*arguments))
            else:
                value = getattr(worker, call)(*arguments)
            pipe.send((False, value))
        except Exception:
            pipe.send((True, traceback.format_exc(limit=-8)))
    if worker is not None:
        worker.shutdown()


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    yield from load_file(str(Path(folder) / "model.safetensors")).items()
