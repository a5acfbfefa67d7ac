"""Sleep and wake of several CPU workers as one: whichever rank's memory driver fails in whichever phase, all sleep or all serve."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from core.tests.executor.helpers import RanksWithoutSteps
from hardpoint.interfaces import Device, SleepPlan, SleepTier
from hardpoint.interfaces.errors import DeviceOutOfMemory, DriverError, HardpointError, RanksDiverged
from hardpoint.memory import VirtualAllocator
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import shape_for, tiny_model
from hardpoint_conformance.worker_bench import Served, WorkerBench, level_plan, running
from hardpoint_cpu.allocator import CpuAllocator
from hardpoint_cpu.driver import driver_table

PROMPT = (9, 41, 7, 130, 22, 22, 5, 88, 201, 64, 3, 17, 90, 12, 250, 31, 6, 77)
COUNT = 120
"""Tokens after which a sequence begins again."""


class SeenAllocator(CpuAllocator):
    """The CPU's memory over a driver whose calls can be made to fail."""

    def __init__(self, device: Device) -> None:
        self._driver = InterposedDriver(driver_table(device.index))
        VirtualAllocator.__init__(
            self,
            self._driver,
            device=device.index,
            torch_device=device.torch_device,
            capabilities=Target.find("cpu").claims.memory,
        )


class Ranks(RanksWithoutSteps):
    """Workers in one thread, each of which serves the same sequence with a whole model."""

    def __init__(self, benches: list[WorkerBench], expected: list[int]) -> None:
        self.benches = benches
        self.expected = expected
        self.sequences: list[Served] = []

    @property
    def num_ranks(self) -> int:
        return len(self.benches)

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        outcomes: list[Any] = []
        for bench in self.benches:
            try:
                outcomes.append(getattr(bench.worker, name)(*args))
            except HardpointError as error:
                outcomes.append(error)
        return outcomes

    def driver(self, rank: int) -> InterposedDriver:
        return self.benches[rank].worker._started.allocator._driver  # type: ignore[attr-defined, no-any-return]

    def plan(self) -> SleepPlan:
        return level_plan(1, SleepTier.HOST, live_blocks=tuple(self.sequences[0].blocks))

    @property
    def asleep(self) -> set[frozenset[str]]:
        return {status.memory.asleep for status in self.call("status")}

    def all_serve(self) -> bool:
        """Compute two further tokens on every rank from the keys and values that it has; whether they are those of one that never slept."""
        if not self.sequences or len(self.sequences[0].generated) + 2 > COUNT:
            for bench, sequence in zip(self.benches, self.sequences, strict=False):
                bench.finish(sequence)
            self.sequences = [bench.begin(PROMPT) for bench in self.benches]
        for bench, sequence in zip(self.benches, self.sequences, strict=True):
            bench.run([sequence], len(sequence.generated) + 2)
        return all(sequence.generated == self.expected[: len(sequence.generated)] for sequence in self.sequences)


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    target = Target.find("cpu").with_descriptor(allocator=lambda: SeenAllocator)
    model = tiny_model(shape_for(target.claims))
    with running(target, model) as alone:
        (served,) = alone.generate([PROMPT], COUNT)
    with ExitStack() as stack:
        yield Ranks([stack.enter_context(running(target, model)) for _ in range(request.param)], served.generated)


@pytest.fixture(autouse=True)
def serving(ranks: Ranks) -> None:
    for rank in range(ranks.num_ranks):
        ranks.driver(rank).disarm()
    assert ranks.all_serve()


SLEEP_CALLS = ("device_synchronize", "copy_to_host", "stream_synchronize", "unmap")
CALLS = (None, "map", "unmap", "create", "release", "copy_to_host", "copy_to_device")
WAKE_CALLS = ("create", "map", "copy_to_device", "stream_synchronize")


def error_of(call: Callable[[], object]) -> HardpointError | None:
    """Make a call, and return what it raises."""
    try:
        call()
    except HardpointError as error:
        return error
    return None


@pytest.mark.parametrize("call", SLEEP_CALLS)
def test_a_rank_that_cannot_prepare_a_sleep_leaves_all_awake(ranks: Ranks, call: str) -> None:
    for rank in range(ranks.num_ranks):
        for nth in (1, 2, 4):
            ranks.driver(rank).fail(call, nth)
            error = error_of(lambda: ranks.sleep(ranks.plan()))
            if not ranks.driver(rank).disarm():
                assert (error, nth > 1) == (None, True)
                ranks.wake()
            else:
                assert isinstance(error, DriverError)
                assert (error.rank, ranks.asleep) == (rank, {frozenset()})
            assert ranks.all_serve()
    ranks.sleep(ranks.plan())
    (asleep,) = ranks.asleep
    assert asleep
    ranks.wake()
    assert ranks.all_serve()


@pytest.mark.parametrize("call", WAKE_CALLS)
def test_a_rank_that_cannot_prepare_a_wake_leaves_all_asleep(ranks: Ranks, call: str) -> None:
    ranks.sleep(ranks.plan())
    (asleep,) = ranks.asleep
    for rank in range(ranks.num_ranks):
        for nth in (1, 2):
            ranks.driver(rank).fail(call, nth)
            error = error_of(ranks.wake)
            if not ranks.driver(rank).disarm():
                assert (error, nth > 1) == (None, True)
                ranks.sleep(ranks.plan())
            else:
                assert isinstance(error, (DriverError, DeviceOutOfMemory))
                assert (error.rank, ranks.asleep) == (rank, {asleep})
    ranks.wake()
    assert ranks.all_serve()


def test_memory_that_a_rank_cannot_release_is_retained_by_it(ranks: Ranks) -> None:
    for rank in range(ranks.num_ranks):
        ranks.driver(rank).fail("release", times=-1)
        reports = ranks.sleep(ranks.plan())
        assert ranks.driver(rank).disarm()
        assert [report.retained > 0 for report in reports] == [other == rank for other in range(ranks.num_ranks)]
        assert len(ranks.asleep) == 1
        ranks.wake()
        assert ranks.driver(rank).held()["bytes"] == ranks.driver((rank + 1) % ranks.num_ranks).held()["bytes"]
        assert ranks.all_serve()


def test_a_rank_that_cannot_roll_back_is_named_and_woken_with_the_others(ranks: Ranks) -> None:
    last = ranks.num_ranks - 1
    ranks.driver(last).fail("unmap")
    ranks.driver(0).fail("map", times=-1)
    with pytest.raises(RanksDiverged, match="rank 0: DriverError") as caught:
        ranks.sleep(ranks.plan())
    assert caught.value.ranks == (0,)
    assert isinstance(caught.value.__context__, DriverError)
    assert ranks.driver(0).disarm()
    assert ranks.asleep == {frozenset(), ranks.benches[0].worker.status().memory.asleep}
    ranks.wake()
    assert ranks.all_serve()


def test_any_sequence_of_sleeps_wakes_and_faults_keeps_ranks_together(ranks: Ranks) -> None:
    """Calls of random ranks fail, in any phase. All end as asked or as they were, unless the driver of a rank refuses what would undo
    its part: that is said, and a wake brings the ranks together."""
    dice = random.Random(ranks.num_ranks)
    met: set[str] = set()
    for _ in range(60):
        (before,) = ranks.asleep
        drivers = dice.sample([ranks.driver(rank) for rank in range(ranks.num_ranks)], 2)
        drivers[0].fail(dice.choice(CALLS), dice.randint(1, 8), times=dice.choice([1, -1]))
        if dice.random() < 0.3:
            drivers[1].fail("map", times=-1)
        error = error_of(ranks.wake if before else lambda: ranks.sleep(ranks.plan()))
        for driver in drivers:
            driver.disarm()
        if error is None:
            met.add("done")
            (after,) = ranks.asleep
            assert bool(after) is not bool(before)
        elif isinstance(error, RanksDiverged) or "second failure" in str(error):
            met.add("apart")
            assert len(ranks.asleep) == 2
            ranks.wake()
            assert ranks.asleep == {frozenset()}
        else:
            met.add("undone")
            assert ranks.asleep == {before}
        if ranks.asleep == {frozenset()}:
            assert ranks.all_serve()
    assert met == {"done", "apart", "undone"}
    ranks.wake()
