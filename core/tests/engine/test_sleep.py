"""The life cycle of an engine, with workers whose memory is books alone and whose calls fail when they are told to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.tests.executor.helpers import RanksWithoutSteps
from hardpoint.engine.commands import RegisterParticipant
from hardpoint.engine.sleep import EngineState, LifeCycle, SleepMode, SleepRequest
from hardpoint.engine.sleep.report import over_ranks
from hardpoint.interfaces import (
    BUFFERS,
    DEFAULT,
    KV_CACHE,
    WEIGHTS,
    MemoryCapabilities,
    MemoryReport,
    MemoryStats,
    Policy,
    SleepPlan,
    SleepTier,
    TagStats,
)
from hardpoint.interfaces.allocator import MemoryChange
from hardpoint.interfaces.errors import (
    BackupCorrupt,
    CapabilityRefused,
    ConfigError,
    CorruptWeights,
    DeviceOutOfMemory,
    DriverError,
    EngineAsleep,
    EngineDead,
    HardpointError,
    InvalidTransaction,
    MemoryAsleep,
    MemoryBusy,
    ParticipantError,
    RanksDiverged,
    SleepRefused,
    UnknownTag,
    WeightsMissing,
    WorkerError,
)
from hardpoint.interfaces.worker import WeightWrite, WorkerStatus
from hardpoint.scheduler import Scheduler, SchedulerConfig, SequenceState

SIZES = {WEIGHTS: 1000, BUFFERS: 10, KV_CACHE: 400, DEFAULT: 50}
NAMES = frozenset({"a", "b", "c"})
ALL_TAGS = frozenset(SIZES)


class Rank:
    """One worker's books."""

    def __init__(self) -> None:
        self.asleep: dict[str, Policy] = {}
        self.open: dict[int, Callable[[], MemoryReport]] = {}
        self.missing: frozenset[str] = frozenset()

    def status(self) -> WorkerStatus:
        tags = {tag: TagStats(size, 0 if tag in self.asleep else size, 0, 1) for tag, size in SIZES.items()}
        memory = MemoryStats({**tags, "empty": TagStats(0, 0, 0, 0)}, 2000, frozenset(self.asleep))
        return WorkerStatus(memory, self.missing)

    def _sleep(self, plan: SleepPlan) -> MemoryReport:
        assert plan.tags is not None
        new = plan.tags - self.asleep.keys()
        for tag in plan.tags:
            self.asleep[tag] = plan.policies.get(tag, Policy.PRESERVE)
        if self.asleep.get(WEIGHTS) is Policy.DISCARD:
            self.missing = NAMES
        preserved = sum(SIZES[tag] for tag in new if self.asleep[tag] is Policy.PRESERVE)
        return self._report(preserved, sum(SIZES[tag] for tag in new))

    def _wake(self, tags: Iterable[str]) -> MemoryReport:
        tags = sorted(tags)
        woken = {tag: self.asleep.pop(tag) for tag in tags}
        preserved = sum(SIZES[tag] for tag, policy in woken.items() if policy is Policy.PRESERVE)
        return self._report(preserved, sum(SIZES[tag] for tag in woken))

    def begin(self, transaction: int, change: MemoryChange) -> None:
        if isinstance(change, SleepPlan):
            self.open[transaction] = lambda: self._sleep(change)
        else:
            assert change.tags is not None
            self.open[transaction] = lambda: self._wake(change.tags or frozenset())

    def commit(self, transaction: int) -> MemoryReport:
        return self._ended(transaction)()

    def rollback(self, transaction: int) -> None:
        self._ended(transaction)

    def _ended(self, transaction: int) -> Callable[[], MemoryReport]:
        if transaction not in self.open:
            raise InvalidTransaction("nothing is open")
        return self.open.pop(transaction)

    def write_weights(self, write: WeightWrite, weights: Iterable[tuple[str, Any]], model: str | None) -> int:
        self._check_awake()
        names = [name for name, _ in weights]
        if not NAMES.issuperset(names):
            self.missing = NAMES
            raise CorruptWeights("no such tensor")
        self.missing -= set(names) if write is WeightWrite.UPDATE else NAMES
        return {WeightWrite.UPDATE: len(names), WeightWrite.RELOAD: len(NAMES), WeightWrite.DECLARE: 0}[write]

    def _check_awake(self) -> None:
        if WEIGHTS in self.asleep:
            raise MemoryAsleep("asleep")

    def _report(self, preserved: int, unmapped: int) -> MemoryReport:
        return MemoryReport(
            preserved,
            unmapped - preserved,
            0,
            {"copy": 0.25, "total": 0.5},
            100,
            100 + unmapped,
            unmapped=unmapped,
            tiers={SleepTier.HOST: preserved},
            still_asleep=frozenset(self.asleep),
        )


class Ranks(RanksWithoutSteps):
    """Calls of all ranks; `fail[name]` is raised instead of making the call of that name, `fail[name, rank]` by one rank."""

    def __init__(self, count: int = 1) -> None:
        self.ranks = [Rank() for _ in range(count)]
        self.fail: dict[str | tuple[str, int], BaseException] = {}
        self.plans: list[SleepPlan] = []
        self.calls: list[str] = []

    @property
    def asleep(self) -> set[str]:
        return set(self.ranks[0].asleep)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        if name == "begin":
            name = "sleep" if isinstance(args[1], SleepPlan) else "wake"
        if name not in ("status", "commit", "rollback"):
            self.calls.append(name)
        if name == "sleep":
            self.plans.append(args[1])
        return [self._outcome(index, name, args) for index in range(len(self.ranks))]

    def _outcome(self, index: int, name: str, args: tuple[Any, ...]) -> Any:
        error = self.fail.get(name) or self.fail.get((name, index))
        if error is not None:
            return error
        try:
            return getattr(self.ranks[index], "begin" if name in ("sleep", "wake") else name)(*args)
        except HardpointError as raised:
            return raised


class Witness:
    """A participant that writes down what it is told, and fails when it is told to."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name = name
        self.diary = diary
        self.fails: set[str] = set()
        self.on_sleep: Callable[[], object] = lambda: None

    def before_sleep(self, plan: SleepPlan) -> None:
        if "before_sleep" in self.fails:
            raise RuntimeError(f"{self.name} holds on")
        self.on_sleep()
        self.diary.append(f"{self.name} sleeps")

    def after_wake(self, tags: frozenset[str]) -> None:
        if "after_wake" in self.fails:
            raise RuntimeError(f"{self.name} is too tired")
        self.diary.append(f"{self.name} wakes with {' '.join(sorted(tags))}")

    def resident_bytes(self) -> int:
        if "resident_bytes" in self.fails:
            raise RuntimeError("lost count")
        return 7


def new_scheduler(**options: Any) -> Scheduler:
    settings = {"block_size": 4, "num_device_blocks": 32, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    return Scheduler(SchedulerConfig(**({"max_model_len": 64, "watermark": 0.0} | settings)))


class Engine:
    """A life cycle and what is around it."""

    def __init__(self, ranks: int = 1, **options: Any) -> None:
        self.workers = Ranks(ranks)
        self.scheduler = new_scheduler(**options.pop("scheduler", {}))
        capabilities = options.pop("capabilities", None) or MemoryCapabilities(
            sleep_levels=frozenset({0, 1, 2}), tiers=frozenset({SleepTier.HOST, SleepTier.DISK})
        )
        self.lifecycle = LifeCycle(self.workers, self.scheduler, capabilities, SleepPlan(**options), "acme")
        self.diary: list[str] = []
        self.drained = 0

    def sleep(self, level: Any = 1, mode: Any = "abort", **options: Any) -> Any:
        request = SleepRequest(level=level, mode=mode, **options)
        if request.mode is SleepMode.WAIT and self.scheduler.has_unfinished():
            self.lifecycle.begin_drain(request)
            self._drain()
            self.lifecycle.end_drain(failed=False)
        return self.lifecycle.sleep(request)

    def wake(self, *tags: str) -> Any:
        return self.lifecycle.wake(frozenset(tags) if tags else None)

    def witness(self, *names: str) -> list[Witness]:
        witnesses = [Witness(name, self.diary) for name in names]
        for witness in witnesses:
            self.lifecycle.register(witness)
        return witnesses

    def run(self, prompt: list[int], max_tokens: int = 8) -> int:
        """Start a sequence and compute its prompt."""
        handle = self.scheduler.add_request(prompt, max_tokens=max_tokens)
        self.step()
        return handle

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None
        self.scheduler.update(np.full(len(batch.sample_rows), 9, np.int64))

    def _drain(self) -> None:
        assert self.lifecycle.state is EngineState.DRAINING
        self.lifecycle.check_step()
        while self.scheduler.has_unfinished():
            self.step()
        self.drained += 1


# States


def test_an_engine_sleeps_and_wakes() -> None:
    engine = Engine()
    assert engine.lifecycle.state is EngineState.RUNNING
    engine.lifecycle.check_step()
    report = engine.sleep()
    assert (report.changed, report.level, report.tier) == (True, 1, SleepTier.HOST)
    assert report.tags == report.asleep == ALL_TAGS
    assert report.freed == sum(SIZES.values())
    assert report.weights_valid
    status = engine.lifecycle.status()
    assert (status.state, status.level, status.asleep) == (EngineState.SLEEPING, 1, ALL_TAGS)
    with pytest.raises(EngineAsleep, match="wake_up"):
        engine.lifecycle.check_step()
    woken = engine.wake()
    assert (woken.changed, woken.tags, woken.asleep, woken.state) == (True, ALL_TAGS, frozenset(), EngineState.RUNNING)
    assert woken.memory.preserved == SIZES[WEIGHTS] + SIZES[BUFFERS] + SIZES[DEFAULT]
    assert engine.lifecycle.status().level is None
    engine.lifecycle.check_step()


def test_level_0_pauses_and_touches_no_memory() -> None:
    engine = Engine()
    report = engine.sleep(0)
    assert (report.changed, report.level, report.asleep, report.memory) == (True, 0, frozenset(), None)
    assert engine.lifecycle.status().level == 0
    with pytest.raises(EngineAsleep):
        engine.lifecycle.check_step()
    assert engine.wake().state is EngineState.RUNNING
    assert engine.workers.calls == []


def test_a_paused_engine_can_sleep_deeper() -> None:
    engine = Engine()
    engine.sleep(0)
    assert engine.sleep(1).tags == ALL_TAGS
    assert engine.lifecycle.status().level == 1
    assert not engine.sleep(0).changed
    assert engine.lifecycle.status().level == 1


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_repeated_sleep_or_wake_does_nothing_and_says_so(level: int) -> None:
    engine = Engine()
    assert not engine.wake().changed
    engine.sleep(level)
    again = engine.sleep(level)
    assert (again.changed, again.tags, again.memory) == (False, frozenset(), None)
    engine.wake()
    assert not engine.wake().changed
    assert not engine.wake(WEIGHTS).changed
    assert engine.workers.calls == (["sleep", "wake"] if level else [])
    assert (engine.lifecycle.totals.sleeps, engine.lifecycle.totals.wakes) == (1, 1)


def test_a_wake_of_some_tags_says_what_is_still_asleep_and_steps_wait_for_the_rest() -> None:
    engine = Engine()
    engine.sleep()
    first = engine.wake(WEIGHTS)
    assert first.tags == {WEIGHTS, BUFFERS, DEFAULT}
    assert first.asleep == engine.lifecycle.status().asleep == {KV_CACHE}
    assert first.state is EngineState.SLEEPING
    with pytest.raises(EngineAsleep, match=KV_CACHE):
        engine.lifecycle.check_step()
    assert engine.wake(KV_CACHE).state is EngineState.RUNNING


def test_the_kv_cache_sleeps_alone() -> None:
    engine = Engine()
    assert engine.sleep(tags="kv_cache").tags == {KV_CACHE}
    assert engine.workers.asleep == {KV_CACHE}
    assert engine.lifecycle.status().weights_valid
    assert engine.sleep().tags == ALL_TAGS - {KV_CACHE}
    assert engine.wake().state is EngineState.RUNNING


def test_tags_without_memory_are_not_asked_to_sleep() -> None:
    engine = Engine()
    engine.sleep()
    assert engine.workers.plans[0].tags == ALL_TAGS


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        pytest.param({"level": 3}, SleepRefused, "0, 1, 2", id="level"),
        pytest.param({"level": "1"}, SleepRefused, "level='1'", id="level-type"),
        pytest.param({"level": True}, SleepRefused, "level=True", id="level-flag"),
        pytest.param({"levle": 1}, SleepRefused, "Did you mean 'level'", id="unknown-name"),
        pytest.param({"tags": 5}, SleepRefused, "tags=5", id="tags-type"),
        pytest.param({"tags": ["weights", 5]}, SleepRefused, r"tags\[1\] must be a text", id="tag-type"),
        pytest.param({"verify": 1}, SleepRefused, "True or False", id="verify"),
        pytest.param({"drain_timeout": "1"}, SleepRefused, "drain_timeout", id="drain-timeout"),
        pytest.param({"drain_timeout": float("nan")}, SleepRefused, "drain_timeout", id="drain-timeout-nan"),
        pytest.param({"progress": "bar"}, SleepRefused, "a function", id="progress"),
        pytest.param({"mode": "now"}, SleepRefused, "'abort', 'wait', 'keep'", id="mode"),
        pytest.param({"tier": "tape"}, SleepRefused, "'host', 'disk', 'source'", id="tier"),
        pytest.param({"kv": "half"}, SleepRefused, "'discard', 'preserve'", id="kv"),
        pytest.param({"tags": []}, SleepRefused, "empty", id="no-tags"),
        pytest.param({"level": 0, "tags": "kv_cache"}, SleepRefused, "level 0", id="level-0-with-tags"),
        pytest.param({"level": 0, "tier": "disk"}, SleepRefused, "level 0", id="level-0-with-tier"),
        pytest.param({"level": 2, "kv": "preserve"}, SleepRefused, "level 2", id="level-2-with-kv"),
        pytest.param({"tags": ["weights", "wieghts"]}, UnknownTag, "buffers, default, kv_cache, weights", id="tag"),
        pytest.param({"tier": "source"}, CapabilityRefused, "disk, host", id="tier-not-claimed"),
    ],
)
def test_an_impossible_sleep_is_one_typed_error_that_lists_what_is_known(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    engine = Engine()
    engine.witness("one")
    engine.run([1, 2, 3])
    with pytest.raises(error, match=text):
        engine.sleep(**arguments)
    assert (engine.workers.calls, engine.diary) == ([], [])
    assert engine.lifecycle.state is EngineState.RUNNING
    assert engine.lifecycle.totals.failures == 0


def test_an_unknown_tag_wakes_nothing() -> None:
    engine = Engine()
    engine.sleep()
    with pytest.raises(UnknownTag, match="wieghts"):
        engine.wake(WEIGHTS, "wieghts")
    assert engine.workers.asleep == ALL_TAGS


@pytest.mark.parametrize("level", [1, 2])
def test_a_level_that_the_backend_does_not_claim_is_refused(level: int) -> None:
    engine = Engine(capabilities=MemoryCapabilities())
    with pytest.raises(CapabilityRefused, match="acme"):
        engine.sleep(level)
    assert engine.sleep(0).changed


# Weights


def test_discarded_weights_are_never_served() -> None:
    engine = Engine()
    report = engine.sleep(2)
    assert not report.weights_valid
    assert engine.workers.plans[0].policies == {WEIGHTS: Policy.DISCARD, KV_CACHE: Policy.DISCARD}
    woken = engine.wake()
    assert (woken.weights_valid, woken.state) == (False, EngineState.WEIGHTS_MISSING)
    with pytest.raises(WeightsMissing, match="reload_weights"):
        engine.lifecycle.check_step()
    with pytest.raises(WeightsMissing):
        engine.lifecycle.check_admission(0, 0)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [(WeightWrite.RELOAD, ()), (WeightWrite.UPDATE, ([("a", 0), ("b", 0), ("c", 0)],)), (WeightWrite.DECLARE, ())],
)
def test_weights_are_valid_after(call: str, arguments: tuple[Any, ...]) -> None:
    engine = Engine()
    engine.sleep(2)
    with pytest.raises(MemoryAsleep):
        engine.lifecycle.change_weights(call, *arguments)
    engine.wake(WEIGHTS)
    engine.lifecycle.change_weights(call, *arguments)
    assert engine.lifecycle.status().weights_valid
    assert engine.wake().state is EngineState.RUNNING


def test_weights_are_missing_until_updates_have_covered_all() -> None:
    engine = Engine()
    engine.sleep(2)
    engine.wake()
    assert engine.lifecycle.change_weights(WeightWrite.UPDATE, [("a", 0), ("b", 0)]) == 2
    assert engine.lifecycle.status().missing_weights == 1
    assert engine.lifecycle.state is EngineState.WEIGHTS_MISSING
    assert engine.lifecycle.change_weights(WeightWrite.UPDATE, [("c", 0)]) == 1
    assert engine.lifecycle.state is EngineState.RUNNING


def test_an_update_that_breaks_off_leaves_the_weights_missing() -> None:
    engine = Engine()
    with pytest.raises(CorruptWeights):
        engine.lifecycle.change_weights(WeightWrite.UPDATE, [("a", 0), ("nonsense", 0)])
    assert engine.lifecycle.state is EngineState.WEIGHTS_MISSING
    engine.lifecycle.change_weights(WeightWrite.RELOAD)
    assert engine.lifecycle.state is EngineState.RUNNING


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.sleep(),
        lambda engine: engine.sleep(0, mode="keep"),
        lambda engine: engine.lifecycle.begin_drain(SleepRequest()),
        lambda engine: engine.wake(),
        lambda engine: engine.lifecycle.resume(),
        lambda engine: engine.lifecycle.change_weights(WeightWrite.RELOAD),
        lambda engine: engine.lifecycle.check_step(),
        lambda engine: engine.lifecycle.check_admission(0, 5),
    ],
)
@pytest.mark.parametrize("before", [[], ["sleep"]])
def test_in_the_midst_of_a_change_of_weights_nothing_is_computed_or_changed(
    before: list[str], ask: Callable[[Engine], object]
) -> None:
    engine = Engine()
    for _ in before:
        engine.sleep(1, tags=KV_CACHE)

    def weights() -> Iterator[tuple[str, int]]:
        yield "a", 0
        with pytest.raises(MemoryBusy, match="being written"):
            ask(engine)
        assert engine.lifecycle.status().memory[WEIGHTS].mapped == SIZES[WEIGHTS]
        yield "b", 0

    assert engine.lifecycle.change_weights(WeightWrite.UPDATE, weights()) == 2
    assert engine.workers.calls == [*before, "write_weights"]
    engine.wake()
    engine.lifecycle.check_step()


def test_missing_weights_cannot_be_preserved() -> None:
    engine = Engine()
    engine.sleep(2)
    with pytest.raises(SleepRefused, match="discarded"):
        engine.sleep(1)
    engine.wake()
    with pytest.raises(SleepRefused, match="Use level 2"):
        engine.sleep(1)
    assert engine.sleep(1, tags="kv_cache").changed
    assert engine.sleep(2).changed


def test_a_deeper_sleep_drops_what_was_preserved() -> None:
    engine = Engine()
    engine.sleep(1)
    deeper = engine.sleep(2)
    assert (deeper.changed, deeper.tags, deeper.dropped, deeper.level) == (True, frozenset(), {WEIGHTS}, 2)
    assert not deeper.weights_valid
    assert not engine.sleep(2).changed
    assert engine.wake().state is EngineState.WEIGHTS_MISSING


def test_weights_that_are_asleep_do_not_change_their_tier() -> None:
    engine = Engine()
    engine.sleep(tier="disk")
    with pytest.raises(SleepRefused, match="'disk'"):
        engine.sleep(tier="host")
    assert not engine.sleep().changed
    assert not engine.sleep(tier="disk").changed


def test_a_change_of_weights_makes_everything_computed_before_void() -> None:
    engine = Engine(scheduler={"num_device_blocks": 4, "num_host_blocks": 8, "preemption_mode": "swap"})
    first = engine.run([1] * 7, 9)
    second = engine.run([2] * 7, 9)
    while engine.scheduler.state(second) is not SequenceState.SWAPPED:
        engine.step()
    engine.lifecycle.change_weights(WeightWrite.UPDATE, [("a", 0)])
    assert [engine.scheduler.state(s) for s in (first, second)] == [SequenceState.WAITING] * 2
    assert engine.scheduler.block_stats.cached == 0


# KV blocks and requests


def test_a_discarded_kv_cache_is_computed_again() -> None:
    engine = Engine()
    handle = engine.run(list(range(9)))
    assert engine.scheduler.block_stats.cached == 2
    engine.sleep(mode="keep")
    assert engine.workers.plans[0].live_blocks is None
    assert engine.scheduler.state(handle) is SequenceState.WAITING
    assert engine.scheduler.block_stats.cached == 0


def test_a_preserved_kv_cache_stays_and_only_live_blocks_are_asked_for() -> None:
    engine = Engine()
    handle = engine.run(list(range(9)))
    live = engine.scheduler.live_blocks(running=True).tolist()
    engine.sleep(mode="keep", kv="preserve")
    (plan,) = engine.workers.plans
    assert plan.live_blocks == live
    assert len(live) == 3
    assert plan.policies[KV_CACHE] is Policy.PRESERVE
    assert engine.scheduler.state(handle) is SequenceState.RUNNING
    assert engine.scheduler.block_stats.cached == 2


def test_requests_that_will_be_aborted_leave_only_the_prefix_cache_to_preserve() -> None:
    engine = Engine()
    engine.run(list(range(9)))
    engine.sleep(mode="abort", kv="preserve")
    assert len(engine.workers.plans[0].live_blocks or ()) == 2


def test_a_preserved_kv_cache_can_be_given_up_and_a_discarded_one_not_be_preserved() -> None:
    engine = Engine()
    handle = engine.run(list(range(9)))
    engine.sleep(mode="keep", kv="preserve")
    assert not engine.sleep(mode="keep").changed
    given_up = engine.sleep(mode="keep", kv="discard")
    assert (given_up.dropped, given_up.tags) == ({KV_CACHE}, frozenset())
    assert engine.scheduler.state(handle) is SequenceState.WAITING
    with pytest.raises(SleepRefused, match="KV cache"):
        engine.sleep(mode="keep", kv="preserve")


def test_weights_that_sleep_alone_leave_the_kv_cache_as_it_is() -> None:
    engine = Engine()
    handle = engine.run(list(range(9)))
    engine.sleep(mode="keep", tags="weights")
    assert engine.scheduler.state(handle) is SequenceState.RUNNING
    assert engine.scheduler.block_stats.cached == 2


def test_waiting_serves_requests_to_their_end_first() -> None:
    engine = Engine()
    handle = engine.run([1, 2, 3])
    engine.sleep(mode="wait")
    assert engine.drained == 1
    assert engine.scheduler.state(handle) is SequenceState.FINISHED
    assert engine.workers.asleep == ALL_TAGS


def test_requests_cannot_be_waited_for_while_the_engine_sleeps() -> None:
    engine = Engine()
    engine.run([1, 2, 3])
    engine.sleep(mode="keep")
    with pytest.raises(SleepRefused, match="'keep' or 'abort'"):
        engine.sleep(2, mode="wait")
    assert engine.lifecycle.status().level == 1


def test_a_drain_that_fails_leaves_the_engine_running() -> None:
    engine = Engine()
    engine.run([1, 2, 3])
    engine.lifecycle.begin_drain(SleepRequest.parse({"mode": "wait"}))
    with pytest.raises(MemoryBusy, match="draining"):
        engine.lifecycle.sleep(SleepRequest())
    engine.lifecycle.end_drain(failed=True)
    assert engine.lifecycle.state is EngineState.RUNNING
    assert engine.lifecycle.totals.failures == 1
    assert engine.workers.calls == []


def test_a_stopped_engine_takes_no_more_requests_than_its_queue_holds() -> None:
    engine = Engine()
    engine.lifecycle.check_admission(0, 0)
    engine.sleep()
    with pytest.raises(EngineAsleep, match="wake_up"):
        engine.lifecycle.check_admission(0, 0)
    engine.lifecycle.check_admission(1, 2)
    with pytest.raises(EngineAsleep, match="2 requests are queued"):
        engine.lifecycle.check_admission(2, 2)


# Failures


@pytest.mark.parametrize("error", [DriverError("unmap", 1, "stuck"), KeyboardInterrupt()])
def test_a_sleep_that_fails_leaves_the_engine_as_it_was(error: BaseException) -> None:
    engine = Engine()
    engine.witness("one", "two")
    handle = engine.run(list(range(9)))
    engine.workers.fail["sleep"] = error
    with pytest.raises(type(error)):
        engine.sleep(mode="keep")
    assert engine.lifecycle.state is EngineState.RUNNING
    assert engine.scheduler.state(handle) is SequenceState.RUNNING
    assert engine.scheduler.block_stats.cached == 2
    every = "buffers default kv_cache weights"
    assert engine.diary == ["one sleeps", "two sleeps", f"two wakes with {every}", f"one wakes with {every}"]
    assert engine.lifecycle.totals.failures == 1
    engine.workers.fail.clear()
    assert engine.sleep(mode="keep").asleep == ALL_TAGS


def test_a_wake_that_fails_leaves_the_engine_asleep_and_a_retry_works() -> None:
    engine = Engine()
    engine.witness("one")
    engine.sleep()
    engine.workers.fail["wake"] = DeviceOutOfMemory("no room")
    with pytest.raises(DeviceOutOfMemory):
        engine.wake()
    assert engine.lifecycle.status().state is EngineState.SLEEPING
    assert engine.lifecycle.status().asleep == ALL_TAGS
    assert engine.diary == ["one sleeps"]
    engine.workers.fail.clear()
    assert engine.wake().state is EngineState.RUNNING
    assert engine.lifecycle.totals.failures == 1


def test_a_failing_participant_undoes_those_before_it_and_no_memory_is_touched() -> None:
    engine = Engine()
    _, _, third = engine.witness("one", "two", "three")
    third.fails.add("before_sleep")
    with pytest.raises(
        ParticipantError, match="'three' failed in before_sleep: RuntimeError: three holds on"
    ) as caught:
        engine.sleep(tags="kv_cache")
    assert caught.value.participant == "three"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.diary == ["one sleeps", "two sleeps", "two wakes with kv_cache", "one wakes with kv_cache"]
    assert engine.workers.calls == []
    assert engine.lifecycle.state is EngineState.RUNNING


def test_participants_sleep_in_order_and_wake_in_reverse_each_time_with_what_woke() -> None:
    engine = Engine()
    engine.witness("one", "two")
    engine.sleep()
    engine.wake(WEIGHTS)
    engine.wake()
    own = "buffers default weights"
    assert engine.diary == [
        *("one sleeps", "two sleeps"),
        *(f"two wakes with {own}", f"one wakes with {own}"),
        *("two wakes with kv_cache", "one wakes with kv_cache"),
    ]


def test_a_participant_that_cannot_wake_is_waited_for_and_the_next_wake_goes_on_there() -> None:
    engine = Engine()
    one, _ = engine.witness("one", "two")
    engine.sleep(tags="kv_cache")
    one.fails.add("after_wake")
    with pytest.raises(ParticipantError, match="'one'"):
        engine.wake()
    status = engine.lifecycle.status()
    assert (status.state, status.asleep, status.waiting_for) == (EngineState.SLEEPING, frozenset(), ("one",))
    with pytest.raises(EngineAsleep):
        engine.lifecycle.check_step()
    one.fails.clear()
    assert engine.wake(KV_CACHE).state is EngineState.RUNNING
    assert engine.diary[2:] == ["two wakes with kv_cache", "one wakes with kv_cache"]
    assert engine.workers.calls == ["sleep", "wake"]


def test_a_participant_that_cannot_be_undone_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    one, _ = engine.witness("one", "two")
    one.fails.add("after_wake")
    engine.workers.fail["sleep"] = DriverError("unmap", 1, "stuck")
    with pytest.raises(DriverError):
        engine.sleep()
    assert engine.lifecycle.status().waiting_for == ("one",)
    assert engine.lifecycle.state is EngineState.SLEEPING
    assert "'one' could not be woken" in caplog.text
    one.fails.clear()
    assert engine.wake().state is EngineState.RUNNING


def test_workers_that_do_not_say_what_is_asleep_are_a_failed_engine_until_they_do() -> None:
    engine = Engine()
    engine.workers.fail["sleep"] = DriverError("unmap", 1, "stuck")
    original = engine.workers.ranks[0].status
    sleeps = engine.workers.calls
    engine.workers.ranks[0].status = lambda: original() if not sleeps else (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    with pytest.raises(DriverError):
        engine.sleep()
    assert engine.lifecycle.state is EngineState.FAILED
    assert "gone" in (engine.lifecycle.status().failure or "")
    for check in (engine.lifecycle.check_step, lambda: engine.lifecycle.check_admission(0, 5)):
        with pytest.raises(EngineDead, match="gone"):
            check()
    with pytest.raises(OSError, match="gone"):
        engine.wake()
    engine.workers.ranks[0].status = original  # type: ignore[method-assign]
    assert engine.wake().state is EngineState.RUNNING


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_an_interrupt_while_the_books_are_read_leaves_nothing_that_a_wake_does_not_mend(call: str) -> None:
    engine = Engine()
    if call == "wake":
        engine.sleep()
    rank = engine.workers.ranks[0]
    original, was_asleep = rank.status, bool(rank.asleep)

    def interrupted() -> WorkerStatus:
        if bool(rank.asleep) is was_asleep:
            return original()
        rank.status = original  # type: ignore[method-assign]
        raise KeyboardInterrupt

    rank.status = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.sleep() if call == "sleep" else engine.wake()
    with pytest.raises(EngineDead, match="interrupted"):
        engine.lifecycle.check_step()
    assert engine.wake().state is EngineState.RUNNING
    assert not rank.asleep
    engine.lifecycle.check_step()


@pytest.mark.parametrize(
    "again",
    [
        lambda engine: engine.sleep(),
        lambda engine: engine.wake(),
        lambda engine: engine.lifecycle.change_weights(WeightWrite.RELOAD),
    ],
)
def test_memory_is_not_changed_from_within_a_sleep(again: Callable[[Engine], object]) -> None:
    engine = Engine()
    (one,) = engine.witness("one")
    one.on_sleep = lambda: again(engine)
    with pytest.raises(ParticipantError) as caught:
        engine.sleep()
    assert isinstance(caught.value.__cause__, MemoryBusy)
    assert engine.lifecycle.state is EngineState.RUNNING


def test_steps_and_requests_are_refused_while_memory_goes() -> None:
    engine = Engine()
    (one,) = engine.witness("one")
    refused: list[str] = []

    def try_both() -> None:
        for check in (engine.lifecycle.check_step, lambda: engine.lifecycle.check_admission(0, 0)):
            with pytest.raises(EngineAsleep):
                check()
            refused.append(engine.lifecycle.state.value)

    one.on_sleep = try_both
    engine.sleep()
    assert refused == ["sleeping", "sleeping"]


def test_a_participants_name_is_its_own() -> None:
    engine = Engine()
    engine.witness("one")
    with pytest.raises(ConfigError, match="'one'"):
        engine.witness("one")


def _nameless() -> Witness:
    witness = Witness("one", [])
    del witness.name
    return witness


@pytest.mark.parametrize(
    ("participant", "found"),
    [
        pytest.param(object(), "its name is None", id="anything"),
        pytest.param(_nameless(), "its name is None", id="nameless"),
        pytest.param(Witness(5, []), "its name is 5", id="number"),  # type: ignore[arg-type]
        pytest.param(Witness, "the class Witness", id="class"),
        pytest.param(SimpleNamespace(name="one", before_sleep=print), "no method after_wake", id="method"),
    ],
)
def test_what_is_no_participant_is_refused_before_a_sleep_meets_it(participant: Any, found: str) -> None:
    engine = Engine()
    for register in (engine.lifecycle.register, RegisterParticipant):
        with pytest.raises(ConfigError, match=found):
            register(participant)
    engine.witness("two")
    engine.sleep()
    assert engine.wake().state is EngineState.RUNNING


def test_a_participant_of_a_sleeping_engine_hears_the_wake_of_what_it_was_told_sleeps() -> None:
    engine = Engine()
    engine.sleep(tags="weights")
    engine.witness("late")
    engine.sleep(2)  # all tags, of which the weights have their copies dropped
    assert engine.workers.plans[-1].tags == ALL_TAGS
    engine.wake()
    assert engine.diary == ["late sleeps", "late wakes with buffers default kv_cache weights"]


# Plans, reports, totals


def test_the_plan_carries_the_engines_settings_and_the_callers() -> None:
    engine = Engine(tier=SleepTier.DISK, host_budget=11, disk_directory="backups", disk_budget=22)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    engine.sleep(verify=True, progress=progress)
    (plan,) = engine.workers.plans
    assert plan.policies == {WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}
    assert (plan.tier, plan.host_budget, plan.disk_directory, plan.disk_budget) == (SleepTier.DISK, 11, "backups", 22)
    assert plan.verify
    plan.progress(3, 4)
    assert seen == [(3, 4)]
    engine.wake()
    assert engine.sleep(tier="host").tier is SleepTier.HOST


def test_residual_bytes_are_named_and_one_who_cannot_count_is_left_out() -> None:
    engine = Engine()
    _, two = engine.witness("one", "two")
    assert engine.sleep().residual == {"one": 7, "two": 7}
    engine.wake()
    two.fails.add("resident_bytes")
    assert engine.sleep().residual == {"one": 7}


@pytest.mark.parametrize("count", [None, "7", 7.5])
def test_a_count_that_is_no_number_of_bytes_is_left_out_and_the_sleep_is_done(count: Any) -> None:
    engine = Engine()
    one, _ = engine.witness("one", "two")
    one.resident_bytes = lambda: count  # type: ignore[method-assign]
    assert engine.sleep().residual == {"two": 7}
    assert engine.lifecycle.totals.sleeps == 1
    assert engine.wake().state is EngineState.RUNNING


def test_a_participant_that_is_asked_for_its_bytes_cannot_wake_the_engine() -> None:
    engine = Engine()
    (one,) = engine.witness("one")

    def count() -> int:
        with pytest.raises(MemoryBusy):
            engine.wake()
        return 5

    one.resident_bytes = count  # type: ignore[method-assign]
    assert engine.sleep().residual == {"one": 5}
    assert engine.lifecycle.state is EngineState.SLEEPING


@pytest.mark.parametrize(
    ("slept", "woken", "way"),
    [
        ([{}], (), r"sleep\(level=2\)"),
        ([{"tags": "kv_cache", "kv": "preserve"}], (), r"sleep\(tags='kv_cache', kv='discard'\)"),
        ([{}, {"level": 2}], (), r"\(buffers, default\): make a new engine"),
        ([{}], (KV_CACHE,), r"\(buffers, default\): make a new engine"),
    ],
    ids=["weights", "kv_cache", "nothing", "partial"],
)
def test_a_corrupt_backup_names_what_can_still_be_given_up(
    slept: list[dict[str, Any]], woken: tuple[str, ...], way: str
) -> None:
    engine = Engine(ranks=2)
    engine.run([1, 2, 3])
    for arguments in slept:
        engine.sleep(mode="keep", **arguments)
    engine.workers.fail["wake", 1] = BackupCorrupt("the backup x is wrong", found="a checksum differs", hint="lower")
    with pytest.raises(BackupCorrupt, match=f"rank 1: the backup x is wrong: a checksum differs. .*{way}") as caught:
        engine.wake(*woken)
    assert caught.value.rank == 1
    assert engine.lifecycle.state is EngineState.SLEEPING


def test_ranks_add_up() -> None:
    engine = Engine(ranks=2)
    report = engine.sleep()
    assert report.freed == 2 * sum(SIZES.values())
    assert report.memory.seconds == {"copy": 0.25, "total": 0.5}
    assert report.memory.tiers == {SleepTier.HOST: 2 * 1060}
    assert [rank.unmapped for rank in report.ranks] == [sum(SIZES.values())] * 2
    engine.workers.ranks[1].asleep.pop(KV_CACHE)
    assert engine.wake(WEIGHTS).asleep == {KV_CACHE}
    assert Engine().sleep().ranks == ()


def test_what_one_rank_retains_and_where_are_in_the_report() -> None:
    reports = [
        MemoryReport(1, 0, 0, {}, 0, 0, retained=5),
        MemoryReport(2, 0, 0, {}, 0, 0, retained=0, direct_io=False),
    ]
    together = over_ranks(reports)
    assert together is not None
    assert (together.preserved, together.retained, together.direct_io) == (3, 5, False)
    assert (over_ranks([]), over_ranks(reports[:1])) == (None, reports[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_sleep_leaves_the_engine_as_it_was(rank: int) -> None:
    engine = Engine(ranks=2)
    engine.witness("one")
    engine.workers.fail["sleep", rank] = DriverError("unmap", 1, "stuck")
    with pytest.raises(DriverError, match=f"rank {rank}"):
        engine.sleep()
    assert engine.lifecycle.state is EngineState.RUNNING
    assert engine.diary[-1].startswith("one wakes")
    assert all(not one.asleep and not one.open for one in engine.workers.ranks)
    engine.workers.fail.clear()
    assert engine.sleep().changed
    engine.workers.fail["wake", rank] = DriverError("map", 1, "stuck")
    with pytest.raises(DriverError, match=f"rank {rank}"):
        engine.wake()
    assert engine.lifecycle.state is EngineState.SLEEPING
    engine.workers.fail.clear()
    assert engine.wake().state is EngineState.RUNNING


def test_ranks_that_came_apart_serve_nothing_until_a_wake_brings_them_together() -> None:
    engine = Engine(ranks=2)
    (one,) = engine.witness("one")
    handle = engine.run(list(range(9)))
    engine.workers.fail["commit", 1] = WorkerError("the message was lost")
    with pytest.raises(RanksDiverged, match="rank 1"):
        engine.sleep(mode="keep")
    assert engine.scheduler.state(handle) is SequenceState.WAITING, "its keys and values are gone on a rank"
    status = engine.lifecycle.status()
    assert (status.state, status.asleep) == (EngineState.FAILED, set(SIZES))
    assert "rank 1" in (status.failure or "")
    for call in (
        engine.lifecycle.check_step,
        engine.sleep,
        lambda: engine.lifecycle.change_weights(WeightWrite.RELOAD),
    ):
        with pytest.raises(EngineDead, match="rank 1"):
            call()
    with pytest.raises(RanksDiverged):
        engine.wake()
    assert engine.lifecycle.state is EngineState.FAILED
    engine.workers.fail.clear()
    assert engine.wake().state is EngineState.RUNNING
    assert all(not rank.asleep and not rank.open for rank in engine.workers.ranks)
    assert engine.lifecycle.status().waiting_for == ()
    assert engine.lifecycle.totals.failures == 1
    assert engine.diary[-1].startswith(f"{one.name} wakes")


def test_ranks_that_came_apart_in_a_rollback_are_known_to_be_awake_again() -> None:
    engine = Engine(ranks=2)
    engine.workers.fail["sleep", 0] = DriverError("unmap", 1, "stuck")
    engine.workers.fail["rollback", 1] = WorkerError("the message was lost")
    with pytest.raises(RanksDiverged, match="roll back"):
        engine.sleep()
    assert engine.lifecycle.state is EngineState.FAILED
    engine.workers.fail.clear()
    report = engine.wake()
    assert (report.state, report.tags) == (EngineState.RUNNING, frozenset())
    assert not engine.workers.ranks[1].open


def test_totals_count_what_was_done_and_what_failed() -> None:
    engine = Engine()
    engine.sleep()
    engine.wake()
    engine.workers.fail["sleep"] = DriverError("copy", 1, "stuck")
    with pytest.raises(DriverError):
        engine.sleep()
    totals = engine.lifecycle.totals
    assert (totals.sleeps, totals.wakes, totals.failures) == (1, 1, 1)
    assert totals.freed_bytes == sum(SIZES.values())
    assert totals.preserved_bytes == totals.restored_bytes == sum(SIZES.values()) - SIZES[KV_CACHE]
    assert totals.sleep_seconds > 0
    assert totals.wake_seconds > 0


def test_log_lines_say_bytes_seconds_and_what_is_still_in_use(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.witness("graphs")
    with caplog.at_level(logging.INFO, "hardpoint"):
        engine.sleep()
        engine.wake()
    asleep, woke = (record.getMessage() for record in caplog.records)
    assert "MiB freed" in asleep
    assert "still in use, 0.0 MiB by graphs" in asleep
    assert "the engine is running" in woke
