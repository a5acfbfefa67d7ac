"""Several engines of one model behind one loop: each in a process of its own, with all of the model and a KV cache of its own.

A request goes to the engine to which the longest beginning of its prompt went, unless that one is much busier than the least busy, which
it goes to otherwise. All other commands go to all engines. The engines number their sequences alike; clients see numbers that also say
which engine it is.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, tee
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hardpoint.engine.adapters import adapters_over_engines, in_use
from hardpoint.engine.commands import (
    Abort,
    Added,
    CheckStep,
    Command,
    DeclareWeightsValid,
    Died,
    Embed,
    Event,
    Finish,
    Generate,
    GetStats,
    GetStatus,
    GiveUp,
    LoadAdapter,
    Lost,
    Pause,
    RegisterParticipant,
    ReloadWeights,
    Reply,
    Resume,
    Sleep,
    StepDone,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.info import EngineInfo, EngineStats
from hardpoint.engine.loops import Deliver, RunningLoop, called_back
from hardpoint.engine.prefix_owners import PrefixOwners
from hardpoint.engine.process_loop import ProcessLoop
from hardpoint.engine.sleep import (
    EngineState,
    SleepMode,
    SleepReport,
    SleepRequest,
    SleepStatus,
    WakeReport,
    slept_over_engines,
    status_over_engines,
    totals_over_engines,
    woken_over_engines,
)
from hardpoint.executor.ray_session import RaySession, RaySettings, import_ray
from hardpoint.interfaces.allocator import WEIGHTS
from hardpoint.interfaces.errors import (
    ConfigError,
    EngineAsleep,
    EngineDead,
    HardpointError,
    InvalidRequest,
    MemoryBusy,
    RanksDiverged,
    SleepRefused,
    WeightsMissing,
)
from hardpoint.plugins import resolve_backend

if TYPE_CHECKING:
    from torch import Tensor

_ENGINE_BITS = 48
"""A sequence's number has that of its engine from this bit on."""
_IMBALANCE = 8
"""Requests that an engine with the beginning of a prompt may have more than the least busy one."""
_MAX_BLOCKS = 64
"""Blocks of a prompt by which its beginning is known."""


def engine_processes(config: EngineConfig, deliver: Deliver | None = None) -> ProcessLoop | DataParallelLoop:
    """Return a loop over one engine in a process of its own, or over as many as the configuration asks for."""
    return DataParallelLoop(config, deliver) if config.data_parallel_size > 1 else ProcessLoop(config, deliver)


@dataclass(slots=True)
class _Placed:
    """A request in progress.

    Attributes:
        adapter: name of the LoRA adapter that it goes through; empty for none.
        alive: those of its sequences that have not ended; None before the engine has numbered them.
    """

    engine: int
    num_seqs: int
    adapter: str
    alive: set[int] | None = None


@dataclass(eq=False, slots=True)
class _Drain:
    """A sleep that waits for the requests of all engines.

    Attributes:
        key: of the command that it was asked for with.
        is_over: they have ended, or one engine refused: it cannot be given up any more.
    """

    key: int
    is_over: bool = False


class DataParallelLoop(RunningLoop):
    """A loop over several engines; see `RunningLoop`.

    Sleeps are transactions: where one engine fails, the others wake again. One that waits for requests begins when those of all engines
    have ended, and until it is done no other command changes memory. A change that cannot be taken back and was not made by all
    is RanksDiverged. The death of one engine is that of all. A participant of sleeps is told by the first engine.

    Raises what `ProcessLoop` raises, and ConfigError where there are fewer devices than engines need; nothing is left then.
    """

    def __init__(self, config: EngineConfig, deliver: Deliver | None = None) -> None:
        super().__init__(deliver)
        self._order = threading.RLock()
        """Held while a command goes to the engines, so that all have the same commands in the same order."""
        self._lock = threading.Lock()
        self._requests: dict[int, _Placed] = {}
        self._request_of: dict[int, int] = {}
        self._loads = dict.fromkeys(range(config.data_parallel_size), 0)
        self._owners: PrefixOwners[bytes, int] = PrefixOwners(_IMBALANCE)
        self._death: EngineDead | None = None
        self._unlike_weights: HardpointError | None = None
        self._drain: _Drain | None = None
        self._queues = config.queue_while_asleep > 0
        self._pauses: Counter[int] = Counter()
        """By engine, how often it paused on the way to a sleep, which its counters take for another sleep."""
        self._engines: list[ProcessLoop] = []
        self._cluster: RaySession | None = None
        if config.executor == "ray":
            # All engines share one Ray cluster, also where it is started here and ends with them.
            self._cluster = RaySession.join(import_ray(), RaySettings.parse(config.ray))
        try:
            self._start(engine_configs(config, self._cluster))
        except BaseException:
            self.shutdown()
            raise
        infos = [one.info for one in self._engines]
        self.info: EngineInfo = replace(
            infos[0],
            **{name: sum(getattr(info, name) for info in infos) for name in ("weight_bytes", "kv_bytes")},
            **{name: sum(getattr(info, name) for info in infos) for name in ("num_device_blocks", "num_host_blocks")},
            data_parallel_size=len(infos),
            weight_formats=dict(sum((Counter(info.weight_formats) for info in infos), Counter())),
        )
        self.model = self._engines[0].model

    def _start(self, configs: Sequence[EngineConfig]) -> None:
        # A weak reference: the threads of the engines' messages end with this loop, so they must not keep it alive.
        this = weakref.ref(self)

        def arrive(engine: int, events: list[Event]) -> None:
            if (loop := this()) is not None:
                loop._arrive(engine, events)

        def start(engine: int) -> ProcessLoop:
            return ProcessLoop(configs[engine], partial(arrive, engine))

        with ThreadPoolExecutor(len(configs)) as pool:
            started = [pool.submit(start, engine) for engine in range(len(configs))]
        failed = [error for one in started if (error := one.exception()) is not None]
        self._engines = [one.result() for one in started if one.exception() is None]
        if failed:
            raise failed[0]

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return [one.pid for one in self._engines]

    def submit(self, command: Command) -> Future[Reply]:
        """Hand a command over to the engine that it concerns, or to all."""
        if self._death is not None:
            raise self._death
        if self.lock.is_refused_here:
            raise called_back(type(command).__name__)
        with self._order:
            return self._submit(command)

    def _submit(self, command: Command) -> Future[Reply]:
        if self._drain is not None and isinstance(command, _CHANGES):
            raise MemoryBusy(
                "the engine's memory cannot be changed from within a sleep or wake",
                found=f"the engine is {EngineState.DRAINING.value}",
                hint="Do it when the call has returned",
            )
        match command:
            case Generate() | Embed():
                return self._place(command)
            case Abort(keys=keys):
                return self._abort(keys)
            case Finish(seq_ids=seq_ids):
                return self._finish(seq_ids)
            case RegisterParticipant():
                return self._engines[0].submit(command)
            case Sleep(request=request, key=key):
                return self._sleep(request, key)
            case Pause(mode=mode, drain_timeout=limit, key=key):
                return self._sleep(SleepRequest(level=0, mode=mode, drain_timeout=limit), key)
            case GiveUp(key=key):
                return self._submit(Resume()) if self._waits(key) else self._some({})
            case Resume() if self._drain is not None and not self._drain.is_over:
                # The command reaches every engine after its pause, so that the next command finds all of them running.
                self._drain = None
            case LoadAdapter(name=name):
                replies = self._send(dict.fromkeys(self._loads, command))
                return _gathered(replies, partial(self._loaded, name), may_wait=True)
            case UnloadAdapter(name=name):
                self._check_idle(name)
            case Wake():
                return self._all(command, self._woken)
            case UpdateWeights() | ReloadWeights() | DeclareWeightsValid():
                return self._change_weights(command)
            case GetStats():
                return self._all(command, self._stats)
        return self._all(command, _COMBINED.get(type(command), _first))

    def shutdown(self) -> None:
        """End all engines and their processes, and leave the cluster that their ranks run in."""
        with ThreadPoolExecutor(max(len(self._engines), 1)) as pool:
            list(pool.map(ProcessLoop.shutdown, self._engines))
        with self._lock:
            cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.leave()

    # Requests

    def _place(self, command: Generate | Embed) -> Future[Reply]:
        if self._unlike_weights is not None:
            raise WeightsMissing(
                "the engines may have unlike weights",
                found=str(self._unlike_weights),
                hint="Update or load all weights again",
            )
        if self._drain is not None and not self._queues:
            # An engine that has paused already would call for a wake, which is refused until the sleep has come.
            raise EngineAsleep(
                "a new request cannot be taken",
                found=f"the engine is {EngineState.DRAINING.value}",
                hint="Call resume() first",
            )
        names = _beginnings(command, self.info.block_size)
        many = isinstance(command, Generate) and command.beams is None
        adapter = command.adapter if isinstance(command, Generate) else ""
        with self._lock:
            engine = self._owners.preferred(names, self._loads)
            if engine is None:
                engine = min(self._loads, key=self._loads.__getitem__)
            self._owners.note(names, engine)
            self._requests[command.key] = _Placed(engine, len(command.sampling) if many else 1, adapter)  # type: ignore[union-attr]
            self._loads[engine] += 1
        try:
            taken = self._engines[engine].submit(command)
        except BaseException:
            self._forget(command.key)
            raise
        taken.add_done_callback(lambda done: self._taken(command.key, done))
        return taken

    def _taken(self, key: int, done: Future[Reply]) -> None:
        # A request that its client cancelled is not forgotten yet: the engine has still to be told to abort it.
        if not done.cancelled() and done.exception() is not None:
            self._forget(key)

    def _forget(self, key: int) -> int | None:
        """Count a request as ended; returns its engine, None where it has ended before."""
        with self._lock:
            return self._ended(key)

    def _ended(self, key: int) -> int | None:
        placed = self._requests.pop(key, None)
        if placed is None:
            return None
        self._loads[placed.engine] -= 1
        for seq_id in placed.alive or ():
            del self._request_of[seq_id]
        return placed.engine

    def _seq_ended(self, seq_id: int) -> None:
        key = self._request_of.get(seq_id)
        if key is None:
            return
        alive = self._requests[key].alive
        assert alive is not None
        if alive == {seq_id}:
            self._ended(key)
        else:
            alive.remove(seq_id)
            del self._request_of[seq_id]

    def _abort(self, keys: Sequence[int]) -> Future[Reply]:
        of_engine: dict[int, list[int]] = {}
        for key in keys:
            engine = self._forget(key)
            if engine is not None:
                of_engine.setdefault(engine, []).append(key)
        return self._some({engine: Abort(tuple(some)) for engine, some in of_engine.items()})

    def _finish(self, seq_ids: Sequence[int]) -> Future[Reply]:
        of_engine: dict[int, list[int]] = {}
        with self._lock:
            for seq_id in seq_ids:
                self._seq_ended(seq_id)
                engine, own = divmod(seq_id, 1 << _ENGINE_BITS)
                of_engine.setdefault(engine, []).append(own)
        return self._some({engine: Finish(tuple(some)) for engine, some in of_engine.items()})

    # Adapters

    def _loaded(self, name: str, outcomes: list[Any]) -> None:
        """Where some engines have not loaded an adapter, let the others forget it, and raise: all have the same ones."""
        failures = _failures(outcomes)
        if not failures:
            return
        with self._order:
            undone = self._send({engine: UnloadAdapter(name) for engine in self._loads.keys() - failures.keys()})
        _outcomes(undone)
        raise next(iter(failures.values()))

    def _check_idle(self, name: str) -> None:
        """Raise AdapterInUse while requests of any engine go through an adapter: the others would have forgotten it."""
        with self._lock:
            count = sum(placed.adapter == name for placed in self._requests.values())
        if count:
            raise in_use(name, count)

    # Events, in the threads of the engines' messages

    def _arrive(self, engine: int, events: list[Event]) -> None:
        if isinstance(last := events[-1], Died):
            events = events[:-1]
            self._die(engine, last.error)
        seen = [_renumbered(event, engine << _ENGINE_BITS) for event in events]
        with self._lock:
            for event in seen:
                self._book(event)
        if seen:
            self._deliver(seen)

    def _book(self, event: Event) -> None:
        match event:
            case Added(key=key, first_seq_id=first) if key in self._requests:
                placed = self._requests[key]
                placed.alive = set(range(first, first + placed.num_seqs))
                self._request_of.update(dict.fromkeys(placed.alive, key))
            case StepDone(ended=ended):
                for one in ended:
                    self._seq_ended(one.seq_id)
            case Lost(keys=keys):
                for key in keys:
                    self._ended(key)

    def _die(self, engine: int, error: EngineDead) -> None:
        """End all engines with one: what the others compute nobody could sleep, wake or update together any more."""
        with self._lock:
            if self._death is not None:
                return
            self._death = dead = EngineDead(f"engine {engine} of {len(self._loads)} has ended", found=str(error))
            dead.__cause__ = error
        for other in self._engines:
            other.kill()
        self._deliver([Died(dead)])

    # Commands of all engines

    def _send(self, commands: Mapping[int, Command]) -> list[Future[Reply]]:
        """Hand each engine its command. That one cannot take it is its answer, since others may have theirs already."""
        replies: list[Future[Reply]] = []
        for engine, command in commands.items():
            try:
                replies.append(self._engines[engine].submit(command))
            except HardpointError as error:
                replies.append(Future())
                replies[-1].set_exception(error)
        return replies

    def _all(self, command: Command, combine: Callable[[list[Any]], Reply]) -> Future[Reply]:
        return _gathered(self._send(dict.fromkeys(self._loads, command)), combine)

    def _some(self, commands: Mapping[int, Command]) -> Future[Reply]:
        return _gathered(self._send(commands), _first)

    def _waits(self, key: int) -> bool:
        """Whether it is this command's sleep that waits for requests."""
        return self._drain is not None and self._drain.key == key and not self._drain.is_over

    def _sleep(self, request: SleepRequest, key: int) -> Future[Reply]:
        if request.mode is not SleepMode.WAIT or not self._requests:
            return _gathered(self._send(self._sleeps(request)), self._slept, may_wait=True)
        # Memory that an engine without requests gave up could not be taken back while the others still serve theirs.
        pause = Pause(SleepMode.WAIT, request.drain_timeout, before=replace(request, progress=None))
        replies = self._send(dict.fromkeys(self._loads, pause))
        drain = self._drain = _Drain(key)
        return _gathered(replies, partial(self._drained, request, drain), may_wait=True)

    def _drained(self, request: SleepRequest, drain: _Drain, outcomes: list[Any]) -> SleepReport:
        """Put the engines to sleep, all of which have paused now; where some have not, let all run on."""
        paused = [engine for engine, one in enumerate(outcomes) if isinstance(one, SleepReport) and one.changed]
        if request.level > 0:
            self._pauses.update(paused)
        with self._order:
            drain.is_over = True
            is_given_up = self._drain is not drain
        if is_given_up:
            _checked(outcomes)
            raise SleepRefused("the sleep that waited for requests was given up", found="none are in progress")
        try:
            pause = self._slept(outcomes)
            if request.level == 0:
                return pause
            with self._order:
                # Requests that were queued since are not to be waited for.
                replies = self._send(self._sleeps(replace(request, mode=SleepMode.KEEP)))
            report = self._slept(_outcomes(replies), paused)
            return replace(report, mode=request.mode.value, seconds=pause.seconds + report.seconds)
        finally:
            with self._order:
                self._drain = None

    def _sleeps(self, request: SleepRequest) -> dict[int, Command]:
        if request.progress is None:
            return dict.fromkeys(self._loads, Sleep(request))
        notes = self._progress(request.progress)
        return {engine: Sleep(replace(request, progress=note)) for engine, note in enumerate(notes)}

    def _progress(self, progress: Callable[[int, int], None]) -> list[Callable[[int, int], None]]:
        """Return for each engine what adds its progress to that of the others, and calls the caller's."""
        known = [(0, 0)] * len(self._engines)
        lock = threading.Lock()

        def note(engine: int, done: int, total: int) -> None:
            with lock, self.lock.refused_here():
                known[engine] = done, total
                progress(sum(one for one, _ in known), sum(one for _, one in known))

        return [partial(note, engine) for engine in range(len(known))]

    def _slept(self, outcomes: list[Any], paused: Collection[int] = ()) -> SleepReport:
        """Return one report of all engines' sleeps; where some failed, wake those that did not, and raise.

        Args:
            paused: engines that had paused for this sleep.
        """
        failures = _failures(outcomes)
        if not failures:
            return slept_over_engines(outcomes)
        first = self._reason(failures)
        slept = {engine: one for engine, one in enumerate(outcomes) if isinstance(one, SleepReport) and one.changed}
        lost = any(one.dropped or (WEIGHTS in one.tags and not one.weights_valid) for one in slept.values())
        if lost and not isinstance(first, EngineDead):
            raise RanksDiverged.of("sleep", failures) from first
        undoing: dict[int, Command] = dict.fromkeys(paused, Resume())
        undoing |= {engine: Wake(one.tags) if one.tags else Resume() for engine, one in slept.items()}
        with self._order:
            undone = self._send(undoing)
        for one in undone:
            # Where the first failure is an engine's death, all the others are being ended, so that what they answer does not matter.
            if one.exception() is not None and not isinstance(first, EngineDead):
                raise RanksDiverged.of("take a sleep back", failures) from one.exception()
        raise first

    def _woken(self, outcomes: list[Any]) -> WakeReport:
        """Return one report of all engines' wakes; raises RanksDiverged where only some failed."""
        failures = _failures(outcomes)
        if not failures:
            return woken_over_engines(outcomes)
        first = self._reason(failures)
        if len(failures) == len(outcomes) or isinstance(first, EngineDead):
            raise first
        raise RanksDiverged.of("wake", failures) from first

    def _reason(self, failures: Mapping[int, BaseException]) -> BaseException:
        """Return the first failure, or the death of an engine, after which no wake brings the others together: they are being ended."""
        died = (one for one in failures.values() if isinstance(one, EngineDead))
        return self._death or next(died, next(iter(failures.values())))

    def _change_weights(self, command: UpdateWeights | ReloadWeights | DeclareWeightsValid) -> Future[Reply]:
        commands: dict[int, Command] = dict.fromkeys(self._loads, command)
        if isinstance(command, UpdateWeights):
            commands = {engine: UpdateWeights(one) for engine, one in enumerate(self._shared(command.weights))}

        def changed(outcomes: list[Any]) -> Any:
            failures = _failures(outcomes)
            first = next(iter(failures.values()), None)
            is_unlike = first is not None and len(failures) < len(outcomes)
            self._unlike_weights = _as_ours(first) if is_unlike else None
            if first is not None:
                raise first
            return outcomes[0]

        return _gathered(self._send(commands), changed)

    def _stats(self, outcomes: list[Any]) -> EngineStats:
        _checked(outcomes)
        sums = {
            one.name: sum(getattr(stats, one.name) for stats in outcomes)
            for one in fields(EngineStats)
            if one.name not in ("sleep", "adapters")
        }
        sleeps = [
            replace(stats.sleep, sleeps=stats.sleep.sleeps - self._pauses[engine])
            for engine, stats in enumerate(outcomes)
        ]
        return EngineStats(
            **sums,
            sleep=totals_over_engines(sleeps),
            adapters=adapters_over_engines([stats.adapters for stats in outcomes]),
        )

    def _shared(self, weights: Iterable[tuple[str, Tensor]]) -> list[Iterator[tuple[str, Tensor]]]:
        """Return for each engine an iterator over the same tensors, which are read once; an error of theirs is that of all."""
        lock = threading.Lock()
        sources = tee(_Lasting(weights), len(self._engines))

        def read(source: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            while True:
                with lock, self.lock.refused_here():
                    pair = next(source, None)
                if pair is None:
                    return
                yield pair

        return [read(source) for source in sources]


class _Lasting:
    """An iterator whose error is raised again by each further call, so that nobody takes it for the end."""

    def __init__(self, items: Iterable[tuple[str, Tensor]]) -> None:
        self._items = iter(items)
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        if self._error is not None:
            raise self._error
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error
            raise


def engine_configs(config: EngineConfig, cluster: RaySession | None = None) -> list[EngineConfig]:
    """Return what each of the engines is asked to be.

    Those on accelerators take devices of their own, one after the other from `device` on; those on the host's processor share its threads,
    and of its memory each takes its part. In a Ray cluster it is Ray that gives the ranks devices.

    Raises ConfigError where there are too few devices, and what `resolve_backend` raises.
    """
    count = config.data_parallel_size
    resolved = resolve_backend(config.backend, device=config.device, require_accelerator=config.require_accelerator)
    name = resolved.descriptor.name
    config = replace(config, backend=name, engine_process=True)
    if not resolved.descriptor.accelerator:
        config = replace(config, threads=max((config.threads or len(os.sched_getaffinity(0))) // count, 1))
    if cluster is not None:
        return [replace(config, ray=replace(RaySettings.parse(config.ray), address=cluster.address))] * count
    if not resolved.descriptor.accelerator:
        return [config] * count
    last = config.device + count * config.num_ranks - 1
    try:
        resolve_backend(name, device=last)
    except ConfigError as error:
        raise ConfigError(
            f"{count} engines of {config.num_ranks} ranks need devices from {config.device} to {last}",
            found=error.found,
            hint="Lower data_parallel_size or tensor_parallel_size, or begin at a lower device",
        ) from error
    return [replace(config, device=config.device + engine * config.num_ranks) for engine in range(count)]


def _beginnings(command: Generate | Embed, block_size: int) -> list[bytes]:
    """Return names of the beginnings of a prompt, each a block of tokens longer than the one before; equal ones have equal names."""
    if isinstance(command, Generate) and command.embedded:
        return []  # its tokens do not say what they stand for
    tokens = np.asarray(command.prompt_token_ids[: _MAX_BLOCKS * block_size], np.int32)
    hashed = blake2b(command.salt.encode() if isinstance(command, Generate) else b"", digest_size=12)
    names = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        hashed.update(tokens[start : start + block_size].tobytes())
        names.append(hashed.digest())
    return names


def _renumbered(event: Event, offset: int) -> Event:
    """Return an event whose sequences have the numbers that clients know."""
    if offset == 0:
        return event
    match event:
        case Added(key=key, first_seq_id=first):
            return Added(key, first + offset)
        case StepDone():
            changes: dict[str, Any] = {
                name: {seq_id + offset: one for seq_id, one in value.items()}
                for name in _BY_SEQUENCE
                if (value := getattr(event, name))
            }
            if event.ended:
                changes["ended"] = [msgspec.structs.replace(one, seq_id=one.seq_id + offset) for one in event.ended]
            return msgspec.structs.replace(event, seq_ids=event.seq_ids + offset, **changes)
    return event


_BY_SEQUENCE = ("num_cached", "embeddings", "prompt_logprobs", "queue_seconds", "beams")


def _gathered(
    replies: Sequence[Future[Reply]], combine: Callable[[list[Any]], Reply], *, may_wait: bool = False
) -> Future[Reply]:
    """Return the future of what `combine` makes of all outcomes, which are answers or exceptions.

    Args:
        may_wait: `combine` waits for further answers, which come by the threads that bring these.
    """
    combined: Future[Reply] = Future()
    combined.set_running_or_notify_cancel()
    lock, missing = threading.Lock(), len(replies)

    def finish() -> None:
        try:
            combined.set_result(combine(_outcomes(replies)))
        except BaseException as error:
            combined.set_exception(error)

    def arrived(_: Future[Reply]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last and may_wait:
            threading.Thread(target=finish, name="hardpoint engines", daemon=True).start()
        elif is_last:
            finish()

    if not replies:
        combined.set_result(None)
    for one in replies:
        one.add_done_callback(arrived)
    return combined


def _outcomes(replies: Sequence[Future[Reply]]) -> list[Any]:
    """Return the answers or exceptions, when all have come."""
    return [one.exception() or one.result() for one in replies]


def _failures(outcomes: Sequence[Any]) -> dict[int, BaseException]:
    return {engine: one for engine, one in enumerate(outcomes) if isinstance(one, BaseException)}


def _checked(outcomes: Sequence[Any]) -> None:
    for failure in _failures(outcomes).values():
        raise failure


def _first(outcomes: list[Any]) -> Any:
    _checked(outcomes)
    return outcomes[0] if outcomes else None


def _any(outcomes: list[Any]) -> bool:
    # One engine may have paused already (and refuse) while another still serves the requests that a sleep waits for.
    if True in outcomes:
        return True
    _checked(outcomes)
    return False


def _joined(outcomes: list[Any]) -> list[Any]:
    _checked(outcomes)
    return list(chain.from_iterable(outcomes))


def _status(outcomes: list[Any]) -> SleepStatus:
    _checked(outcomes)
    status = status_over_engines(outcomes)
    if status.state is EngineState.SLEEPING and any(one.state is EngineState.DRAINING for one in outcomes):
        # Engines that have paused wait for the others.
        return replace(status, state=EngineState.DRAINING, level=None)
    return status


_COMBINED: Mapping[type, Callable[[list[Any]], Any]] = {
    CheckStep: _any,
    GetStatus: _status,
    StopProfile: _joined,
}

_CHANGES = (Sleep, Pause, Wake, UpdateWeights, ReloadWeights, DeclareWeightsValid)
"""Commands that change memory or what is in it."""


def _as_ours(error: BaseException | None) -> HardpointError:
    return error if isinstance(error, HardpointError) else InvalidRequest(str(error))
