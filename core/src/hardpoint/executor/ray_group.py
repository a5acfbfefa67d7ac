"""The actors of one engine, in the order of ranks: made, watched, and ended together."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from hardpoint.executor.failures import Failure, rebuild
from hardpoint.executor.messages import decode
from hardpoint.executor.ray_placement import Demand, in_order, release, reserve
from hardpoint.executor.ray_session import RaySession, RaySettings
from hardpoint.executor.rounds import HANGING, NOT_YET, Deadline
from hardpoint.interfaces.errors import ClusterError, RankFailed

_log = logging.getLogger("hardpoint")

_SLICE_SECONDS = 0.5
"""How long a rank's error may go unseen while others have not answered, and how often the watcher looks at whether it is to end."""

_TRACE_SECONDS = 2.0
_END_SECONDS = 5.0
_MAX_OUTPUT = 4000
_DEAD_HINT = "Ray's logs on that machine say more. All ranks were ended; make a new engine"


class ActorGroup:
    """All ranks of one engine.

    A rank that dies ends all, whoever notices: the call under way, or the watcher, a thread that waits for the ends of actors.

    Attributes:
        actors: in the order of ranks.
        facts: of each.
        failure: the first one.
    """

    def __init__(self, ray: Any, session: RaySession) -> None:
        self._ray, self._session = ray, session
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._watcher: threading.Thread | None = None
        self._watches: dict[Any, int] = {}
        self._placed: list[Any] = []
        self.actors: list[Any] = []
        self.facts: list[Any] = []
        self.failure: RankFailed | None = None

    def start(self, demand: Demand, settings: RaySettings, backend: str, deadline: Deadline) -> None:
        """Make the actors and number them.

        Raises:
            ClusterError: there is no room for them, or they do not fit together.
            RankFailed, and what an actor raises.
        """
        from hardpoint.executor.ray_actor import THREADS, Facts, RankActor, versions_of

        ray = self._ray
        actor = ray.remote(concurrency_groups=THREADS)(RankActor)
        options = {"max_restarts": 0, **demand.actor_options()}
        stages = reserve(ray, demand, settings.placement_seconds)
        bundles = [bundle for stage in stages for bundle in stage]
        self._placed = list({group.id: group for group, _ in bundles}.values())
        self.actors = [_make(actor, options, group, index) for group, index in bundles]
        self._watch()
        found = self.ask([actor.facts.remote(backend, demand.resource) for actor in self.actors], deadline, Facts)
        here = ray.get_runtime_context().get_node_id()
        by_node = _ranks_by_node(found, demand, here)
        self.actors = [self.actors[place] for place in by_node]
        self._watches = {ref: by_node.index(place) for ref, place in self._watches.items()}
        self.facts = [found[place] for place in by_node]
        _check_versions(self.facts, versions_of(backend))

    def where(self, rank: int) -> str:
        """Return which rank it is, for people."""
        at = f" on {self.facts[rank].host} ({self.facts[rank].address})" if self.facts else ""
        return f"rank {rank} of {len(self.actors)}{at}"

    def ask(self, refs: Sequence[Any], deadline: Deadline, kind: Any) -> list[Any]:
        """Return all actors' answers, decoded; raises the first error."""
        outcomes = self.gather(refs, deadline)
        for rank, outcome in enumerate(outcomes):
            if outcome is NOT_YET:
                raise self.fail_hanging(rank, deadline)
            if isinstance(outcome, BaseException):
                raise outcome
        return [decode(outcome, kind) for outcome in outcomes]

    def gather(self, refs: Sequence[Any], deadline: Deadline, behind: float | None = None) -> list[Any]:
        """Return each rank's outcome: bytes, or the exception that it raised; `NOT_YET` for ranks that are late.

        Args:
            refs: one for each rank.
            behind: seconds that the other ranks have once one has failed.

        Raises:
            RankFailed: one is gone.
        """
        try:
            # One question to Ray where all is well, as in nearly every step.
            answers = self._ray.get(list(refs), timeout=min(deadline.left(), _SLICE_SECONDS))
            return [self._read(rank, answer) for rank, answer in enumerate(answers)]
        except self._ray.exceptions.RayError:
            return self._gather_singly(refs, deadline, behind)

    def _gather_singly(self, refs: Sequence[Any], deadline: Deadline, behind: float | None) -> list[Any]:
        outcomes: list[Any] = [NOT_YET] * len(refs)
        pending = {ref: rank for rank, ref in enumerate(refs)}
        while pending:
            left = deadline.left()
            ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=min(left, _SLICE_SECONDS))
            for ref in ready:
                rank = pending.pop(ref)
                outcomes[rank] = outcome = self.outcome(rank, ref)
                if behind is not None and isinstance(outcome, BaseException):
                    deadline.shorten(behind)
            if not ready and not left:
                break
        return outcomes

    def outcome(self, rank: int, ref: Any) -> Any:
        """Return what an actor has answered: bytes, or the exception that it raised; raises RankFailed for one that is gone."""
        try:
            return self._read(rank, self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            raise self.failed(rank, error) from error

    def _read(self, rank: int, answer: Any) -> Any:
        from hardpoint.executor.ray_actor import FAILURE, RESULT

        mark = answer[:1] if isinstance(answer, bytes) else None
        if mark == RESULT:
            # Arrays are views of it, and torch takes no read-only ones.
            return bytearray(answer)[1:]
        if mark == FAILURE:
            return rebuild(decode(memoryview(answer)[1:], Failure), self.where(rank))
        raise self.fail(
            rank, f"its messages cannot be understood: {repr(answer)[:80]} is neither a result nor a failure"
        )

    def fail(self, rank: int, ended: str, output: str = "", hint: str = "") -> RankFailed:
        """Note that a rank has failed, unless one has before, and end all; returns the first failure."""
        with self._lock:
            if self.failure is None:
                if self.facts:
                    ended = f"{ended} (on {self.facts[rank].host}, {self.facts[rank].address})"
                self.failure = RankFailed.of(rank, ended, output, hint)
                if not self._ending.is_set():
                    _log.error("%s", self.failure)
        self.kill()
        return self.failure

    def failed(self, rank: int, error: BaseException) -> RankFailed:
        """Note a failure of which Ray told; see `fail`."""
        return self.fail(rank, *_end_of(self._ray, error))

    def fail_hanging(self, rank: int, deadline: Deadline) -> RankFailed:
        """Note that a rank has not answered in time; it is asked first where it stands."""
        trace = ""
        with contextlib.suppress(self._ray.exceptions.RayError):
            trace = self._ray.get(self.actors[rank].trace.remote(), timeout=_TRACE_SECONDS)
        return self.fail(
            rank, f"it has not answered '{deadline.call}' within {deadline.seconds:g} s", trace, hint=HANGING
        )

    def kill(self) -> None:
        """End all actors at once and give their room back; where this process has left the cluster, they have ended with its job."""
        # Ray starts a cluster for questions that come when there is none.
        if not self._ray.is_initialized():
            return
        placed, self._placed = self._placed, []
        for actor in self.actors:
            with contextlib.suppress(Exception):  # Ray itself may be gone.
                self._ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            # Whoever cannot follow the call, because its process is stopped, ends with its room.
            release(placed)

    def end(self) -> None:
        """End all actors and leave the cluster."""
        self._ending.set()
        self.kill()
        if self._watches and self._ray.is_initialized():
            with contextlib.suppress(Exception):
                self._ray.wait(list(self._watches), num_returns=len(self._watches), timeout=_END_SECONDS)
        if self._watcher is not None:
            self._watcher.join()
        self.actors, self._watches = [], {}
        self._session.leave()

    def is_watcher(self) -> bool:
        """Whether this is the thread that waits for the ends of actors."""
        return threading.current_thread() is self._watcher

    def _watch(self) -> None:
        self._watches = {actor.watch.remote(): rank for rank, actor in enumerate(self.actors)}
        self._watcher = threading.Thread(target=self._wait_for_ends, name="hardpoint ranks", daemon=True)
        self._watcher.start()

    def _wait_for_ends(self) -> None:
        watches = list(self._watches)
        while not self._ending.is_set():
            try:
                ready, _ = self._ray.wait(watches, num_returns=1, timeout=_SLICE_SECONDS)
            except Exception as error:
                _log.warning("the ranks are not watched any more: %s", error)
                return
            if ready and not self._ending.is_set():
                with contextlib.suppress(RankFailed):
                    self.outcome(self._watches[ready[0]], ready[0])
                return


def _make(actor: Any, options: dict[str, Any], group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return actor.options(scheduling_strategy=place, **options).remote(_log.getEffectiveLevel())


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
