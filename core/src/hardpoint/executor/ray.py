"""Ranks on the machines of a Ray cluster, an actor for each; see docs/architecture.md for what happens when one fails."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardpoint.executor.base import at_rank, raise_first
from hardpoint.executor.calls import EXECUTE, SCHEMAS, Progress, may_wait_for_others
from hardpoint.executor.failures import describe
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.link import PROGRESS
from hardpoint.executor.messages import Buffer, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.ray_group import ActorGroup
from hardpoint.executor.ray_placement import Demand
from hardpoint.executor.ray_session import RaySession, RaySettings, import_ray
from hardpoint.executor.remote import RemoteExecutor
from hardpoint.executor.rounds import (
    NOT_YET,
    OUT_OF_STEP,
    Deadline,
    are_in_step,
    culprit,
    without_progress,
)
from hardpoint.executor.weights import encode_weight
from hardpoint.interfaces.errors import ConfigError, EngineDead, RankFailed
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.plugins import Resolved

_SHARED_BYTES = 100_000
"""From this size on, Ray keeps a message once on each machine, and not once for each call."""


class RayExecutor(RemoteExecutor):
    """Ranks as actors, on one machine or several.

    A rank that dies or does not answer within its limit ends all ranks: every call from then on raises the RankFailed that says which one
    it was. So does an error that leaves the ranks out of step with one another.

    Args:
        resolved: the backend; Ray chooses the devices.
        config: of the whole engine; each rank's place, address and threads are filled in.

    Raises:
        ConfigError: Ray is not installed, or does not know the backend's devices.
        ClusterError: the cluster cannot be joined, has no room, or has other versions.
        RankFailed, and what making a worker raises: nothing is left behind.
    """

    def __init__(
        self,
        resolved: Resolved,
        config: WorkerConfig,
        limits: RankLimits | None = None,
        settings: RaySettings | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, limits)
        settings = RaySettings.parse(settings)
        demand = _demand(resolved, config, settings)
        self._ray = import_ray()
        self._group = ActorGroup(self._ray, RaySession.join(self._ray, settings))
        self._finalizer = weakref.finalize(self, _end, self._group, self._pid)
        try:
            deadline = Deadline("start", self._limits.start)
            self._group.start(demand, settings, resolved.descriptor.name, deadline)
            address = self._group.facts[0].address
            meeting = ""
            if demand.num_ranks > 1:
                opened = [self._group.actors[0].open_meeting.remote(address)]
                meeting = self._group.ask(opened, deadline, str)[0]
            specs = _specs(resolved, config, self._group.facts, meeting)
            messages = [b"".join(spec.encode()) for spec in specs]
            refs = [actor.start.remote(one) for actor, one in zip(self._group.actors, messages, strict=True)]
            raise_first(self._gather(refs, deadline, waits=True))
        except BaseException:
            self._finalizer()
            raise

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self._group.facts)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its machine."""
        return [one.pid for one in self._group.facts]

    @property
    def nodes(self) -> list[str]:
        """Ray's ids of the ranks' machines."""
        return [one.node for one in self._group.facts]

    def _send_step(self, parts: list[Buffer]) -> Callable[[], list[Any]]:
        message = self._shared(b"".join(parts))
        refs = self._submit(lambda actor: actor.execute.remote(message))
        deadline = Deadline(EXECUTE, self._limits.step)
        return lambda: self._gather(refs, deadline, waits=True)

    def shutdown(self) -> None:
        """End all ranks: those that are well end their workers first. Legal in any state and more than once."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if os.getpid() != self._pid:
            return
        if self._finalizer.alive and self._group.failure is None:
            message = b"".join(SCHEMAS["shutdown"].encode([]))
            number = self._next_call()
            refs = [actor.call.remote(number, "shutdown", message) for actor in self._group.actors]
            self._ray.wait(refs, num_returns=len(refs), timeout=self._limits.shutdown)
        self._finalizer()

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        schema, number = SCHEMAS[name], self._next_call()
        deadline = Deadline(name, self._limits.of(name))
        progress = schema.progress_of(args)
        first = others = b"".join(schema.encode(args))
        if progress is not None:
            others = b"".join(schema.encode([without_progress(argument) for argument in args]))
        try:
            self._check()
            actors = self._group.actors
            refs = self._submit(lambda actor: actor.call.remote(number, name, first if actor is actors[0] else others))
            if schema.takes_weights:
                return self._results(schema, self._stream(number, schema.weights_of(args), refs, deadline))
            if progress is not None:
                self._follow(number, progress, deadline)
            return self._results(schema, self._gather(refs, deadline, waits=may_wait_for_others(name)))
        except EngineDead as error:
            return [error] * self.num_ranks

    # One round of calls

    def _shared(self, message: bytes) -> Any:
        return message if len(message) < _SHARED_BYTES else self._ray.put(message)

    def _submit(self, call: Any) -> list[Any]:
        """Call every actor; returns what stands for the answers."""
        refs: list[Any] = []
        try:
            for actor in self._group.actors:
                refs.append(call(actor))
        except BaseException as error:
            self._group.fail(len(refs), f"a message to it broke off ({type(error).__name__})")
            raise
        return refs

    def _gather(self, refs: Sequence[Any], deadline: Deadline, *, waits: bool) -> list[Any]:
        """Return each rank's answer: bytes, or the exception that it raised.

        Args:
            waits: ranks wait for one another in this call: when one has failed, the others get little time to follow.
        """
        outcomes = self._group.gather(refs, deadline, self._limits.behind if waits else None)
        late = next((rank for rank, outcome in enumerate(outcomes) if outcome is NOT_YET), None)
        if late is None:
            return outcomes
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            raise self._out_of_step(outcomes, f"rank {late} waits for it")
        raise self._group.fail_hanging(late, deadline)

    def _follow(self, number: int, progress: Progress, deadline: Deadline) -> None:
        """Pass the first rank's reports on until its call is over; have it raise what the callback raises."""
        actor, reply = self._group.actors[0], b""
        while packed := self._wait_for(actor.report.remote(number, reply), deadline):
            reply = self._reply_to(packed, progress, number)

    def _reply_to(self, packed: bytes, progress: Progress, number: int) -> bytes:
        from hardpoint.executor.ray_actor import END, GO_ON

        try:
            progress(*PROGRESS.unpack(packed))
        except BaseException as error:
            reply = b"".join([END, *encode(describe(error))])
            if not isinstance(error, Exception):
                self._group.actors[0].report.remote(number, reply)
                raise
            return reply
        return GO_ON

    def _stream(self, number: int, weights: Iterable[Any], refs: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Send tensors to all ranks until there are no more or a rank has failed, and return the ranks' answers."""
        from hardpoint.executor.ray_actor import END, GO_ON

        last, raised = END, None
        try:
            for item in weights:
                over = self._send_weight(number, b"".join([GO_ON, *encode_weight(item)]), deadline)
                deadline.extend()
                failed = (
                    outcome for rank in over if isinstance(outcome := self._group.outcome(rank, refs[rank]), Exception)
                )
                if (failure := next(failed, None)) is not None:
                    last = b"".join([END, *encode(describe(failure))])
                    break
        except BaseException as error:
            if self._group.failure is not None:
                raise
            raised = error
            last = b"".join([END, *encode(describe(error))])
        self._send_weight(number, last, deadline)
        outcomes = self._gather(refs, deadline, waits=False)
        if raised is not None:
            # The exception itself; the ranks were given its likeness.
            raise raised
        return outcomes

    def _send_weight(self, number: int, message: bytes, deadline: Deadline) -> list[int]:
        """Send one message of a stream to all ranks; returns those whose call is over already."""
        from hardpoint.executor.ray_actor import END

        shared = self._shared(message)
        replies = self._submit(lambda actor: actor.weight.remote(number, shared))
        return [rank for rank, ref in enumerate(replies) if self._wait_for(ref, deadline, rank) == END]

    def _wait_for(self, ref: Any, deadline: Deadline, rank: int = 0) -> bytes:
        """Return what an actor says during a call."""
        try:
            said: bytes = self._ray.get(ref, timeout=deadline.left())
            return said
        except self._ray.exceptions.GetTimeoutError:
            raise self._group.fail_hanging(rank, deadline) from None
        except self._ray.exceptions.RayError as error:
            raise self._group.failed(rank, error) from error

    # Failures

    def _check_ranks(self) -> None:
        failure = self._group.failure
        if failure is not None:
            raise RankFailed.of(failure.rank or 0, failure.ended, failure.output, failure.hint or "")

    def _failed_step(self, outcomes: Sequence[Any]) -> BaseException:
        """Return what a failed step raises; ranks that are out of step are ended."""
        if are_in_step(outcomes, self._driver):
            return at_rank(outcomes[self._driver], self._driver, len(outcomes))
        return self._out_of_step(outcomes, "the others did not fail alike")

    def _out_of_step(self, outcomes: Sequence[Any], others: str) -> RankFailed:
        rank, error = culprit(outcomes)
        ended = f"it raised {type(error).__name__}: {error}, and {others}"
        failure = self._group.fail(rank, ended, "\n".join(getattr(error, "__notes__", ())), OUT_OF_STEP)
        failure.__cause__ = error
        return failure


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


def _end(group: ActorGroup, pid: int) -> None:
    """End the ranks. Also the way out for an executor that nobody shut down, from whatever thread."""
    if os.getpid() != pid:
        return
    if group.is_watcher():
        threading.Thread(target=group.end).start()
    else:
        group.end()
