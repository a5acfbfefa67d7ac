"""Ranks on the machines of a Ray cluster, an actor for each."""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardpoint.executor.limits import RankLimits
from hardpoint.executor.messages import Buffer, decode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.ray_placement import Demand, in_order, release, reserve
from hardpoint.executor.ray_session import RaySession, RaySettings, import_ray
from hardpoint.executor.transport import Deadline, Frame, Kind, Transport
from hardpoint.interfaces.errors import ClusterError, ConfigError, RankFailed
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.plugins import Resolved

_log = logging.getLogger("hardpoint")

_SLICE_SECONDS = 0.5
"""How long a rank's error may go unseen while others have not answered, and how often the watcher looks at whether it is to end."""

_TRACE_SECONDS = 2.0
_END_SECONDS = 5.0
_MAX_OUTPUT = 4000
_SHARED_BYTES = 100_000
"""From this size on, Ray keeps a message once on each machine, and not once for each call."""

_UNTAKEN = 2
"""Frames without an answer that a rank may not have taken yet."""

_ANSWERED = frozenset({Kind.START, Kind.STEP, Kind.CALL, Kind.CONTINUE, Kind.CANCEL})
"""Each frame of these kinds to a rank is followed by one from it."""

_DEAD_HINT = "Ray's logs on that machine say more. All ranks were ended; make a new engine"


class RayTransport(Transport):
    """Makes an actor for each rank, on one machine or several, and watches them in a thread that waits for their ends.

    Args:
        resolved: the backend; Ray chooses the devices.
        config: of the whole engine; each rank's place, address and threads are filled in.

    Raises:
        ConfigError: Ray is not installed, or does not know the backend's devices.
    """

    def __init__(
        self,
        resolved: Resolved,
        config: WorkerConfig,
        limits: RankLimits | None = None,
        settings: RaySettings | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(limits)
        self._resolved, self._config = resolved, config
        self._settings = RaySettings.parse(settings)
        self._demand = _demand(resolved, config, self._settings)
        self._ray = import_ray()
        self._session: RaySession | None = None
        self._facts: list[Any] = []
        self._actors: list[Any] = []
        self._placed: list[Any] = []
        self._sent: list[int] = []
        self._answers: dict[Any, int] = {}
        self._untaken: list[deque[Any]] = []
        self._watches: list[Any] = []
        self._watcher: threading.Thread | None = None

    def start(self, deadline: Deadline) -> list[RankSpec]:
        """Make the actors and number them.

        Raises:
            ClusterError: the cluster cannot be joined, there is no room, or the machines do not fit together.
            RankFailed, and what an actor raises.
        """
        from hardpoint.executor.ray_actor import THREADS, Facts, RankActor, versions_of

        ray, demand, backend = self._ray, self._demand, self._resolved.descriptor.name
        self._session = RaySession.join(ray, self._settings)
        actor = ray.remote(concurrency_groups=THREADS)(RankActor)
        options = {"max_restarts": 0, **demand.actor_options()}
        stages = reserve(ray, demand, self._settings.placement_seconds)
        bundles = [bundle for stage in stages for bundle in stage]
        self._placed = list({group.id: group for group, _ in bundles}.values())
        self._actors = [_make(actor, options, group, index) for group, index in bundles]
        found = [
            decode(self._get(rank, one.facts.remote(backend, demand.resource), deadline), Facts)
            for rank, one in enumerate(self._actors)
        ]
        order = _ranks_by_node(found, demand, ray.get_runtime_context().get_node_id())
        self._actors = [self._actors[place] for place in order]
        self._facts = [found[place] for place in order]
        self._sent = [0] * len(order)
        self._untaken = [deque() for _ in order]
        self._watches = [one.watch.remote() for one in self._actors]
        self._watcher = threading.Thread(target=self._watch, name="hardpoint ranks", daemon=True)
        self._watcher.start()
        _check_versions(self._facts, versions_of(backend))
        init_method = ""
        if len(order) > 1:
            opened = self._actors[0].open_rendezvous.remote(self._facts[0].address)
            init_method = decode(self._get(0, opened, deadline), str)
        return _specs(self._resolved, self._config, self._facts, init_method)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its machine."""
        return [one.pid for one in self._facts]

    @property
    def nodes(self) -> list[str]:
        """Ray's ids of the ranks' machines."""
        return [one.node for one in self._facts]

    def where(self, rank: int) -> str:
        """Return the machine of a rank."""
        return f" (on {self._facts[rank].host}, {self._facts[rank].address})" if self._facts else ""

    def send(self, ranks: Sequence[int], kind: Kind, call: int, parts: Sequence[Buffer], deadline: Deadline) -> None:
        """Call each of these actors with a frame."""
        from hardpoint.executor.ray_actor import pack

        message: Any = pack(kind, call, parts)
        if len(message) >= _SHARED_BYTES:
            message = self._ray.put(message)
        is_answered = kind in _ANSWERED
        for rank in ranks:
            ref = self._actors[rank].exchange.remote(self._sent[rank], message, is_answered)
            self._sent[rank] += 1
            if is_answered:
                self._answers[ref] = rank
                continue
            untaken = self._untaken[rank]
            untaken.append(ref)
            if len(untaken) > _UNTAKEN:
                self._get(rank, untaken.popleft(), deadline)

    def wait(self, seconds: float, first: int | None = None) -> bool:
        """Wait for one answer, or for as many as there are ranks that owe one."""
        end = Deadline("", seconds)
        while True:
            refs = list(self._answers)
            # Waiting for all ranks at once asks Ray a single time in nearly every step; what follows a step is answered later.
            count = 1 if first is None else len(set(self._answers.values()))
            ready, _ = self._ray.wait(refs, num_returns=count, timeout=min(end.left(), _SLICE_SECONDS))
            self.check()
            if ready or not end.left():
                return bool(ready)

    def receive(self) -> Sequence[tuple[int, Frame]]:
        """Return what actors have answered."""
        from hardpoint.executor.ray_actor import unpack

        refs = list(self._answers)
        if not refs:
            return ()
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        deadline = Deadline("get", self.limits.other)
        frames = []
        for ref in ready:
            rank = self._answers.pop(ref)
            try:
                frames.append((rank, unpack(self._get(rank, ref, deadline))))
            except (struct.error, TypeError) as error:
                raise self.fail_malformed(rank, error) from error
        return frames

    def trace(self, rank: int) -> str:
        """Return where every thread of a rank stands."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            return str(self._ray.get(self._actors[rank].trace.remote(), timeout=_TRACE_SECONDS))
        return ""

    def kill(self) -> None:
        """End all actors and give their room back; where this process has left the cluster, they have ended with its job."""
        # Not connected, Ray would start a cluster of its own for any call.
        if not self._ray.is_initialized():
            return
        with self._lock:
            placed, self._placed = self._placed, []
        if not placed:
            return
        for actor in self._actors:
            with contextlib.suppress(Exception):  # Ray itself may be gone.
                self._ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            # An actor whose process is stopped cannot follow `kill`; it ends when its placement is released.
            release(placed)

    def close(self, patience: float = 0.0) -> None:
        """End all actors and leave the cluster."""
        self.expect_end()
        if self._session is None:
            return
        session, self._session = self._session, None
        for seconds in (patience, _END_SECONDS):
            if self._watches and self._ray.is_initialized():
                with contextlib.suppress(Exception):
                    self._ray.wait(self._watches, num_returns=len(self._watches), timeout=seconds)
            self.kill()
        if self._watcher is not None:
            self._watcher.join()
        self._actors, self._answers, self._untaken, self._watches = [], {}, [], []
        session.leave()

    def is_watcher(self) -> bool:
        """Whether this is the thread that waits for the ends of actors."""
        return threading.current_thread() is self._watcher

    def _get(self, rank: int, ref: Any, deadline: Deadline) -> Any:
        """Return what an actor answers; raises RankFailed for one that is gone, or late."""
        try:
            return self._ray.get(ref, timeout=deadline.left())
        except self._ray.exceptions.GetTimeoutError:
            raise self.fail_hanging(rank, deadline) from None
        except self._ray.exceptions.RayError as error:
            raise self.fail(rank, *_end_of(self._ray, error)) from error

    def _watch(self) -> None:
        ready: list[Any] = []
        while not ready and not self._is_closing:
            try:
                ready, _ = self._ray.wait(self._watches, num_returns=1, timeout=_SLICE_SECONDS)
            except Exception as error:
                _log.warning("the ranks are not watched any more: %s", error)
                return
        for ref in ready:
            with contextlib.suppress(RankFailed):
                self._get(self._watches.index(ref), ref, Deadline("watch", self.limits.other))


def _make(actor: Any, options: dict[str, Any], group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return actor.options(scheduling_strategy=place, **options).remote(_log.getEffectiveLevel())


def _demand(resolved: Resolved, config: WorkerConfig, settings: RaySettings) -> Demand:
    descriptor = resolved.descriptor
    resource = settings.resource or (descriptor.cluster_resource if descriptor.accelerator else "CPU")
    if not resource:
        raise ConfigError(
            f"Ray does not know the devices of the backend '{descriptor.name}'",
            hint="Start Ray's machines with --resources='{\"name\": count}', and give ray={'resource': 'name'}",
        )
    if resolved.device.index:
        raise ConfigError(
            "an engine on Ray cannot begin at a device",
            found=f"device {resolved.device.index}",
            hint="Ray chooses them",
        )
    return Demand(resource, settings.amount, config.pipeline_parallel_size, config.tensor_parallel_size)


def _specs(resolved: Resolved, config: WorkerConfig, facts: Sequence[Any], init_method: str) -> list[RankSpec]:
    """Return what the ranks are.

    Where Ray shows a rank its own devices and no others, the first of them is the rank's; elsewhere the ranks of a machine count its
    devices from the first. Ranks on the host's processor share it with the others of their machine.
    """
    neighbours: Counter[str] = Counter(one.address for one in facts)
    before: Counter[str] = Counter()
    specs = []
    for rank, one in enumerate(facts):
        shares_device = one.isolated or not resolved.descriptor.accelerator
        threads = config.threads // len(facts) if config.threads else one.cpus // neighbours[one.address]
        place: dict[str, Any] = {
            "rank": rank,
            "world_size": len(facts),
            "init_method": init_method,
            "threads": max(threads, 1),
        }
        device = 0 if shares_device else before[one.node]
        specs.append(RankSpec(resolved.descriptor.name, device, replace(config, **place)))
        before[one.node] += 1
    return specs


def _ranks_by_node(facts: Sequence[Any], demand: Demand, here: str) -> list[int]:
    """Return places among the actors in the order of ranks: stages stay together where each is on one machine."""
    size = demand.ranks_per_stage
    stages = [range(start, start + size) for start in range(0, len(facts), size)]
    if all(len({facts[place].node for place in stage}) == 1 for stage in stages):
        ordered = in_order(stages, [facts[stage[0]].node for stage in stages], here)
        return [place for stage in ordered for place in stage]
    return in_order(range(len(facts)), [one.node for one in facts], here)


def _check_versions(facts: Sequence[Any], ours: dict[str, str]) -> None:
    for rank, one in enumerate(facts):
        for name, version in ours.items():
            if one.versions.get(name) != version:
                raise ClusterError(
                    f"rank {rank} on {one.host} ({one.address}) and the engine have different versions of {name}",
                    found=f"{one.versions.get(name, 'none')} there, {version} here",
                    hint="Install the same packages on every machine of the cluster",
                )


def _end_of(ray: Any, error: BaseException) -> tuple[str, str, str]:
    """Return what became of an actor, what it left, and what to do."""
    text = str(error).strip()
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        ended = "it cannot be reached, its process or its machine may be gone"
    elif isinstance(error, ray.exceptions.OutOfMemoryError):
        ended = "Ray ended its process, because the machine was short of memory"
    elif isinstance(error, ray.exceptions.RayActorError):
        ended = "its process has ended, or its machine"
    else:
        ended = f"Ray says {type(error).__name__}"
    return ended, text[-_MAX_OUTPUT:], _DEAD_HINT
