"""The life cycle of one engine: what may happen in which state, and what is undone when it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from hardpoint.engine.sleep.participants import Participants, SleepParticipant
from hardpoint.engine.sleep.report import (
    EngineState,
    SleepReport,
    SleepStatus,
    SleepTotals,
    TagMemory,
    WakeReport,
    over_ranks,
)
from hardpoint.engine.sleep.request import KVChoice, SleepMode, SleepRequest
from hardpoint.executor import Executor
from hardpoint.executor.interrupts import AllowedInterrupts
from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS, MemoryReport, Policy, SleepPlan, WakePlan
from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.errors import (
    BackupCorrupt,
    CapabilityRefused,
    EngineAsleep,
    EngineDead,
    HardpointError,
    MemoryBusy,
    RankFailed,
    RanksDiverged,
    SleepRefused,
    UnknownTag,
    WeightsMissing,
)
from hardpoint.interfaces.worker import WeightWrite, WorkerStatus
from hardpoint.scheduler import Scheduler

_log = logging.getLogger("hardpoint")

_MIB = 1 << 20
_INTERRUPTED = "a change of the workers' memory was interrupted"
"""Why an engine is FAILED from the first call that changes memory until the workers' books were read after the last one."""


class LifeCycle:
    """Sleep and wake of one engine, as transactions over its workers' memory, its KV blocks and its participants.

    A sleep that fails leaves the engine as it was; a wake that fails leaves it asleep, and can be tried again. What is asleep is
    read from the workers' books, not remembered. Not safe to call from several threads at once.

    Args:
        settings: how the engine sleeps unless it is told otherwise: tier, budgets and directory.
        backend: its name, for messages.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        capabilities: MemoryCapabilities,
        settings: SleepPlan,
        backend: str,
    ) -> None:
        self.totals = SleepTotals()
        self.participants = Participants()
        self._executor = executor
        self._scheduler = scheduler
        self._capabilities = capabilities
        self._settings = settings
        self._backend = backend
        self._paused = False
        self._level: int | None = None
        self._asleep: frozenset[str] = frozenset()
        self._last_status: Sequence[WorkerStatus] = ()
        self._slept: dict[str, SleepPlan] = {}
        self._missing: frozenset[str] = frozenset()
        self._in_flight: EngineState | None = None
        self._is_writing = False
        self._failure: str | None = None
        self.death: EngineDead | None = None

    # State

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        if self._in_flight is not None:
            return self._in_flight
        if self._failure is not None:
            return EngineState.FAILED
        if self._paused:
            return EngineState.SLEEPING
        return EngineState.WEIGHTS_MISSING if self._missing else EngineState.RUNNING

    def status(self) -> SleepStatus:
        """Return the state in full."""
        return SleepStatus(
            state=self.state,
            level=self._level,
            asleep=self._asleep,
            weights_valid=not self._missing,
            missing_weights=len(self._missing),
            waiting_for=self.participants.waiting_for(self._asleep),
            failure=self._failure,
            memory=self._memory(),
        )

    def _memory(self) -> dict[str, TagMemory]:
        """Return where the bytes of each tag are."""
        self._read_first()
        return {tag: self._tag_memory(tag) for tag in sorted(self._known_tags())}

    def _read_first(self) -> None:
        """Have the workers say what memory there is, where they have not said it yet."""
        if not self._last_status and self.state is EngineState.RUNNING:
            with suppress(HardpointError):
                self._last_status = self._executor.call("status")

    def _tag_memory(self, tag: str) -> TagMemory:
        books = [status.memory.tags[tag] for status in self._last_status if tag in status.memory.tags]
        # Preserved bytes without a source are on the host where the others have one.
        tier = self._slept[tag].tier if tag in self._slept else self._settings.tier
        reads_source = tier is SleepTier.SOURCE and tag in self._asleep and self._is_preserved(tag)
        copies = {
            SleepTier.HOST if tier is SleepTier.SOURCE else tier: sum(one.backed_up for one in books),
            SleepTier.SOURCE: sum(one.sourced for one in books) if reads_source else 0,
        }
        return TagMemory(
            allocated=sum(one.allocated for one in books),
            mapped=sum(one.mapped for one in books),
            copies={where: size for where, size in copies.items() if size},
        )

    def mark_dead(self, error: EngineDead) -> None:
        """Note that a rank is gone: there is no way back."""
        self._failure = f"{type(error).__name__}: {error}"
        self._paused, self.death = True, error

    @property
    def can_step(self) -> bool:
        """Whether a step can be computed."""
        return self.state in (EngineState.RUNNING, EngineState.DRAINING) and not self._is_writing

    def check_step(self) -> None:
        """Raise EngineAsleep, WeightsMissing, MemoryBusy or EngineDead unless a step can be computed."""
        self.check_not_writing("a step cannot be computed")
        if not self.can_step:
            raise self._refusal(self.state, "a step cannot be computed")

    def check_admission(self, queued: int, limit: int) -> None:
        """Raise EngineAsleep, WeightsMissing, MemoryBusy or EngineDead unless the engine runs, or may queue one more request.

        Args:
            queued: requests queued since the engine stopped.
            limit: most of them; 0 where requests are rejected.
        """
        self.check_not_writing("a new request cannot be taken")
        state = self.state
        if state is EngineState.RUNNING or (queued < limit and state is not EngineState.FAILED):
            return
        raise self._refusal(state, "a new request cannot be taken", f"{queued} requests are queued" if limit else None)

    def check_not_writing(self, problem: str) -> None:
        """Raise MemoryBusy in the midst of a change of weights: half of them are the old ones, and their memory is written to."""
        if self._is_writing:
            raise MemoryBusy(problem, found="the weights are being written", hint="Do it when that call has returned")

    def _refusal(self, state: EngineState, problem: str, queue: str | None = None) -> HardpointError:
        if self.death is not None:
            dead = type(self.death)(problem, found=self._failure, hint="Make a new engine")
            if isinstance(dead, RankFailed) and isinstance(self.death, RankFailed):
                dead.rank, dead.ended, dead.output = self.death.rank, self.death.ended, self.death.output
            return dead
        if state is EngineState.FAILED:
            return EngineDead(
                problem,
                found=f"what is asleep is not known ({self._failure})",
                hint="Try wake_up(), or make a new engine",
            )
        if state is EngineState.WEIGHTS_MISSING:
            return WeightsMissing(
                problem,
                found=f"{len(self._missing)} weights have no valid values",
                hint="Call reload_weights(), update_weights() with all of them, or declare_weights_valid()",
            )
        asleep = f"the engine is {state.value}" + (f", with {_listed(self._asleep)} asleep" if self._asleep else "")
        # A sleep that waits is given up; memory that it has not taken yet needs no wake.
        way = "resume" if state is EngineState.DRAINING else "wake_up"
        return EngineAsleep(
            problem, found=asleep if queue is None else f"{asleep}; {queue}", hint=f"Call {way}() first"
        )

    def register(self, participant: SleepParticipant) -> None:
        """Add a participant; raises ConfigError when its name is taken, or it is no participant."""
        self.participants.register(participant)

    # Sleep

    def check_sleep(self, request: SleepRequest) -> None:
        """Raise SleepRefused, UnknownTag, CapabilityRefused, MemoryBusy or EngineDead unless a sleep is possible now."""
        self._plan(request)

    def begin_drain(self, request: SleepRequest) -> None:
        """Serve the requests in progress to their end and take no new ones, until `end_drain`: a sleep waits for them.

        Raises:
            SleepRefused, UnknownTag, CapabilityRefused, MemoryBusy, EngineDead: the sleep is not possible; nothing was done.
        """
        self._plan(request)
        if self.state is not EngineState.RUNNING:
            raise SleepRefused(
                "requests in progress cannot be waited for",
                found=f"the engine is {self.state.value}",
                hint="Wake it up first, or use the mode 'keep' or 'abort'",
            )
        self._in_flight = EngineState.DRAINING

    def end_drain(self, *, failed: bool) -> None:
        """End what `begin_drain` began: the sleep can follow, unless it has failed."""
        self._in_flight = None
        self.totals.failures += failed

    def sleep(self, request: SleepRequest, start: float | None = None) -> SleepReport:
        """Put the engine to sleep; no step is in flight.

        Args:
            start: when it was asked for, of `time.perf_counter`; None for now.

        Raises:
            SleepRefused, UnknownTag, CapabilityRefused: it is not possible as asked, or not in this state; nothing was done.
            MemoryBusy: a sleep or wake is under way.
            EngineDead: the state is FAILED.
            RanksDiverged: some ranks sleep and others do not, and the state is FAILED now.
            What a participant or the workers raise: the engine is as it was and runs on.
        """
        start = time.perf_counter() if start is None else start
        plan = self._plan(request)
        reports: Sequence[MemoryReport] = ()
        tags = plan.tags if plan is not None and plan.tags else frozenset()
        new = tags - self._asleep
        if plan is not None and tags:
            with self._transition(EngineState.SLEEPING):
                if new:
                    self.participants.before_sleep(plan, new)
                self._failure = _INTERRUPTED
                try:
                    reports = self._executor.change(plan)
                except BaseException as error:
                    self._read_books(error)
                    if isinstance(error, RanksDiverged):
                        self._note_slept(plan, tags)
                    self.participants.undo(new - self._asleep)
                    raise
            self._read_books()
            self._check_alive()
            self._note_slept(plan, tags)
        changed = bool(tags) or (plan is None and not self._paused)
        if changed or not self._paused:
            self._level = max(request.level, self._level or 0)
        self._paused = True
        memory = over_ranks(reports)
        residual: dict[str, int] = {}
        if memory is not None:
            # A participant that wakes the engine from here is refused as from its other methods.
            with self._transition(EngineState.SLEEPING):
                residual = {**memory.residual, **self.participants.resident_bytes()}
        report = SleepReport(
            changed=changed,
            level=self._level or 0,
            mode=request.mode.value,
            tier=None if plan is None else plan.tier,
            tags=new,
            dropped=tags - new,
            asleep=self._asleep,
            weights_valid=not self._missing,
            seconds=time.perf_counter() - start,
            memory=memory,
            residual=residual,
            ranks=tuple(reports) if len(reports) > 1 else (),
        )
        if changed:
            self.totals.count_sleep(report.seconds, memory)
            self._log_sleep(report)
        return report

    def loses_kv(self, request: SleepRequest) -> bool:
        """Whether a sleep discards the KV cache, which is awake, and leaves the weights with which it was computed as they are.

        Raises what refuses the sleep.
        """
        plan = self._plan(request)
        if plan is None or self._asleep or self._missing:
            return False
        tags, policies = plan.tags or frozenset(), plan.policies
        loses_weights = WEIGHTS in tags and policies[WEIGHTS] is Policy.DISCARD
        return KV_CACHE in tags and policies[KV_CACHE] is Policy.DISCARD and not loses_weights

    def _note_slept(self, plan: SleepPlan, tags: frozenset[str]) -> None:
        """Remember how these tags sleep, on all ranks or on some, and that bytes of the KV cache are gone."""
        self._slept.update(dict.fromkeys(tags & self._asleep, plan))
        if KV_CACHE in tags and plan.policies[KV_CACHE] is Policy.DISCARD:
            self._scheduler.recompute_all(swapped=False)

    def _plan(self, request: SleepRequest) -> SleepPlan | None:
        """Return what a sleep does: its tags are those to put to sleep, and those whose preserved bytes are given up.

        None for one that touches no memory. Raises SleepRefused, UnknownTag, CapabilityRefused, MemoryBusy, EngineDead.
        """
        self._check_not_busy()
        self._check_not_failed("the engine cannot sleep")
        if request.level == 0:
            return None
        self._last_status = self._executor.call("status")
        known = self._known_tags()
        target = known if request.tags is None else request.tags
        if not target <= known:
            raise _unknown(target - known, known)
        tier = request.tier or self._settings.tier
        self._check_capabilities(request, tier)
        if WEIGHTS in target:
            self._check_weights(request)
        preserved = {tag for tag in target & self._asleep if self._is_preserved(tag)}
        if KV_CACHE in (target & self._asleep) - preserved and request.kv is KVChoice.PRESERVE:
            raise SleepRefused(
                "the KV cache cannot be preserved", found="it is asleep and was discarded", hint="Wake it up first"
            )
        given_up = (
            {WEIGHTS, KV_CACHE} if request.level == 2 else {KV_CACHE} if request.kv is KVChoice.DISCARD else set()
        )
        tags = target - self._asleep | preserved & given_up
        preserves_kv = request.kv is KVChoice.PRESERVE
        running = request.mode is not SleepMode.ABORT
        return replace(
            self._settings,
            tags=tags,
            tier=tier,
            policies={
                WEIGHTS: Policy.PRESERVE if request.level == 1 else Policy.DISCARD,
                KV_CACHE: Policy.PRESERVE if preserves_kv else Policy.DISCARD,
            },
            live_blocks=self._scheduler.live_blocks(running=running).tolist()
            if preserves_kv and KV_CACHE in tags
            else None,
            verify=request.verify,
            progress=None if request.progress is None else partial(_report, request.progress),
        )

    def _check_weights(self, request: SleepRequest) -> None:
        """Refuse to preserve what is not there, and to move preserved weights from one tier to another."""
        if request.level != 1:
            return
        if self._missing:
            raise SleepRefused(
                "the weights cannot be preserved",
                found="they were discarded and have not been loaded again",
                hint="Use level 2, or wake the weights and reload them first",
            )
        slept = self._slept.get(WEIGHTS) if WEIGHTS in self._asleep else None
        if slept is not None and request.tier not in (None, slept.tier):
            raise SleepRefused(
                f"the weights are asleep already, preserved with the tier '{slept.tier.value}'",
                found=f"tier '{request.tier.value}' asked for" if request.tier else None,
                hint="Wake them up first, or leave the tier out",
            )

    def _check_capabilities(self, request: SleepRequest, tier: SleepTier) -> None:
        levels, tiers = self._capabilities.sleep_levels, self._capabilities.tiers
        reasons = []
        if request.level not in levels:
            reasons.append(f"its memory has the sleep levels {_listed(str(level) for level in levels) or 'none'}")
        if (request.level == 1 or request.tier is not None) and tier not in tiers:
            reasons.append(f"its tiers are {_listed(tier.value for tier in tiers) or 'none'}")
        if reasons:
            raise CapabilityRefused(
                f"the {self._backend} backend cannot sleep at level {request.level} with the tier '{tier.value}'",
                reasons,
                hint="`hardpoint doctor` lists what the backend supports",
            )

    def _is_preserved(self, tag: str) -> bool:
        """Whether the bytes of a tag that is asleep come back when it wakes."""
        slept = self._slept.get(tag)
        return slept is not None and slept.policies.get(tag, Policy.PRESERVE) is Policy.PRESERVE

    # Wake

    def wake(self, tags: frozenset[str] | None = None) -> WakeReport:
        """Wake the tags, and with any of them all memory that is neither weights nor KV cache; None for all.

        Steps can be computed again once no tag is asleep.

        Raises:
            UnknownTag: nothing was done.
            MemoryBusy: a sleep or wake is under way.
            RanksDiverged: some ranks sleep and others do not, and the state is FAILED; another wake tries to bring them together.
            What the workers or a participant raise: the engine is asleep still, and another wake goes on from there.
        """
        start = time.perf_counter()
        self._check_not_busy()
        if self._failure is not None:
            self._executor.settle()
            self._read_books()
        self._last_status = self._executor.call("status")
        known = self._known_tags()
        if tags is not None and not tags <= known:
            raise _unknown(tags - known, known)
        woken = self._asleep if tags is None else self._asleep & tags
        if woken:
            woken |= self._asleep - {WEIGHTS, KV_CACHE}
        resumes = bool(woken or self.participants.waiting_for(self._asleep) or tags is None)
        changed = resumes and self._paused
        reports: Sequence[MemoryReport] = ()
        if changed:
            with self._transition(EngineState.WAKING):
                if woken:
                    self._failure = _INTERRUPTED
                    try:
                        reports = self._executor.change(WakePlan(woken))
                    except BaseException as error:
                        self._read_books(error)
                        if isinstance(error, BackupCorrupt):
                            raise self._lost(error, woken) from error
                        raise
                    self._read_books()
                    self._check_alive()
                self.participants.after_wake(self._asleep)
            if not self._asleep:
                self._paused, self._level = False, None
        report = WakeReport(
            changed=changed,
            tags=woken,
            asleep=self._asleep,
            weights_valid=not self._missing,
            state=self.state,
            seconds=time.perf_counter() - start,
            memory=over_ranks(reports),
            ranks=tuple(reports) if len(reports) > 1 else (),
        )
        if changed:
            self.totals.count_wake(report.seconds, report.memory)
            self._log_wake(report)
        return report

    def _lost(self, error: BackupCorrupt, tags: frozenset[str]) -> BackupCorrupt:
        """Return the error of a wake of these tags that says what can still be given up: weights, then the KV cache, and no more."""
        if WEIGHTS in tags and self._is_preserved(WEIGHTS):
            hint = "Drop it with sleep(level=2), then wake_up() and reload_weights()"
        elif KV_CACHE in tags and self._is_preserved(KV_CACHE):
            hint = "Drop it with sleep(tags='kv_cache', kv='discard'), then wake_up()"
        else:
            hint = f"It has memory that nothing can be read into again ({_listed(tags - {WEIGHTS, KV_CACHE})}): make a new engine"
        lost = BackupCorrupt(error.problem, found=error.found, hint=hint)
        if error.rank is not None:
            lost.name_rank(error.rank)
        return lost

    def resume(self) -> None:
        """Compute steps again after a pause; raises EngineAsleep where memory is asleep, EngineDead."""
        self._check_not_busy()
        self._check_not_failed("the engine cannot resume")
        if self._asleep or self.participants.waiting_for(self._asleep):
            raise self._refusal(EngineState.SLEEPING, "the engine cannot resume")
        self._paused, self._level = False, None

    # Weights

    def change_weights(
        self, write: WeightWrite, weights: Iterable[tuple[str, Any]] = (), model: str | None = None
    ) -> int:
        """Have the workers write weights; see `Worker.write_weights`. What was computed with the old ones is void.

        Until it returns, whatever computes or changes memory is refused with MemoryBusy: the weights' iterator may call the engine.

        Raises EngineDead in the state FAILED, and what the worker raises; a write that breaks off makes the state WEIGHTS_MISSING.
        """
        self._check_not_busy()
        self._check_not_failed("the weights cannot be written")
        # Its iterator may ask for it, and the workers say nothing then.
        self._read_first()
        # After an interrupt, ranks elsewhere may have written what they were given, all of it even.
        changed = True
        self._is_writing = True
        try:
            results: list[int] = self._executor.call("write_weights", write, weights, model)
        except Exception:
            changed = False
            raise
        finally:
            self._is_writing = False
            self._read_books()
            if changed or self._missing:
                self._scheduler.recompute_all(swapped=True)
        return results[0]

    # Common

    def _check_not_busy(self) -> None:
        self.check_not_writing("the engine's memory cannot be changed")
        if self._in_flight is not None:
            raise MemoryBusy(
                "the engine's memory cannot be changed from within a sleep or wake",
                found=f"the engine is {self._in_flight.value}",
                hint="Do it when the call has returned",
            )

    def _check_not_failed(self, problem: str) -> None:
        if self._failure is not None:
            raise self._refusal(EngineState.FAILED, problem)

    @contextmanager
    def _transition(self, state: EngineState) -> Iterator[None]:
        """Be in a passing state; a failure inside is counted, and leaves the engine paused when not all is awake."""
        self._in_flight = state
        try:
            yield
        except BaseException:
            self.totals.failures += 1
            self._paused = self._paused or bool(self._asleep or self.participants.waiting_for(self._asleep))
            raise
        finally:
            self._in_flight = None

    def _known_tags(self) -> frozenset[str]:
        books = (status.memory.tags for status in self._last_status)
        return frozenset(tag for tags in books for tag, of_tag in tags.items() if of_tag.allocations)

    def _read_books(self, after: BaseException | None = None) -> None:
        """Read from the workers what is asleep on any rank and which weights are valid on all.

        The state is FAILED where they do not say, and where they say it after an error that left them apart.
        """
        failure: BaseException | None = after if isinstance(after, RanksDiverged) else None
        try:
            self._last_status = self._executor.call("status")
            self._asleep = frozenset().union(*(status.memory.asleep for status in self._last_status))
            self._missing = frozenset().union(*(status.missing_weights for status in self._last_status))
        except EngineDead as error:
            self.mark_dead(error)
            return
        except Exception as error:
            failure = error
        self._failure = None if failure is None else f"{type(failure).__name__}: {failure}"
        self._paused = self._paused or failure is not None or bool(self._asleep)

    def _check_alive(self) -> None:
        """Raise what ended the engine, where a rank has gone since it ended a sleep or wake."""
        if self.death is not None:
            raise self.death

    def _log_sleep(self, report: SleepReport) -> None:
        if report.memory is None:
            _log.info("paused in %.3f s, all memory stays", report.seconds)
            return
        mapped = sum(tag.mapped for status in self._last_status for tag in status.memory.tags.values())
        _log.info(
            "asleep at level %d in %.3f s: %.1f MiB freed, %.1f MiB preserved, %.1f MiB of the engine still in use%s",
            report.level,
            report.seconds,
            report.freed / _MIB,
            report.memory.preserved / _MIB,
            mapped / _MIB,
            "".join(f", {size / _MIB:.1f} MiB by {name}" for name, size in report.residual.items()),
        )

    def _log_wake(self, report: WakeReport) -> None:
        taken, restored = (0, 0) if report.memory is None else (report.memory.unmapped, report.memory.preserved)
        _log.info(
            "woke %s in %.3f s: %.1f MiB taken, %.1f MiB restored; the engine is %s",
            _listed(report.tags) or "no memory",
            report.seconds,
            taken / _MIB,
            restored / _MIB,
            report.state.value,
        )


def _report(progress: Callable[[int, int], None], done: int, total: int) -> None:
    with AllowedInterrupts():
        progress(done, total)


def _unknown(tags: frozenset[str], known: frozenset[str]) -> UnknownTag:
    return UnknownTag(f"no memory has the tag {_listed(tags)}", found=f"tags {_listed(known)}", hint="Nothing was done")


def _listed(items: Any) -> str:
    return ", ".join(sorted(items))
