"""An interrupt at any line of a worker's sleep or wake: what is lost is never served, and the way on is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from core.tests.worker.test_ranks import model, run_step, started, step  # noqa: F401 - a fixture
from hardpoint.executor import InProcessExecutor
from hardpoint.interfaces import (
    KV_CACHE,
    WEIGHTS,
    MemoryChange,
    Policy,
    SequenceSampling,
    SleepPlan,
    StepInput,
    WakePlan,
    WeightWrite,
)
from hardpoint.interfaces.errors import MemoryAsleep, MemoryBusy, WeightsMissing
from hardpoint.worker import StandardWorker
from tests.interrupts import InterruptAt

PLANS = {
    "level 1": SleepPlan(policies={KV_CACHE: Policy.DISCARD}),
    "level 2": SleepPlan(policies={WEIGHTS: Policy.DISCARD, KV_CACHE: Policy.DISCARD}),
}


def one() -> StepInput:
    """Return a step of a sequence that is new."""
    greedy = SequenceSampling(0, (9,), seed=0, temperature=0.0, state_row=0)
    return step([5], 9, finished_seq_ids=(0,), new_sequences=(greedy,))


@pytest.fixture
def worker(model: str) -> Iterator[StandardWorker]:  # noqa: F811
    # An interrupt where torch enters or leaves `no_grad` leaves it switched on. Clients hold interrupts back there; these tests do not.
    with started(model) as worker, torch.set_grad_enabled(True):
        yield worker


@pytest.mark.parametrize("level", PLANS)
def test_an_interrupt_at_any_line_of_a_sleep_or_wake_leaves_nothing_wrong_to_serve(
    worker: StandardWorker, level: str
) -> None:
    executor = InProcessExecutor(worker)
    expected = run_step(worker, one()).token_ids.tolist()

    def serves() -> None:
        """Check that a step gives the right tokens, or is refused until memory and weights are there again."""
        try:
            assert run_step(worker, one()).token_ids.tolist() == expected
        except MemoryAsleep:
            assert worker.status().memory.asleep
        except WeightsMissing:
            assert worker.status().missing_weights
        else:
            assert not worker.status().memory.asleep
            assert not worker.status().missing_weights

    def interrupted(change: MemoryChange, nth: int) -> bool:
        with InterruptAt(nth, inside=("hardpoint.worker", "hardpoint.executor")) as interrupt:
            executor.change(change)
        with suppress(MemoryBusy):
            serves()
        executor.settle()
        serves()
        return not interrupt.came

    nth, finished = 0, False
    while not finished:
        nth += 1
        finished = interrupted(PLANS[level], nth)
        executor.change(WakePlan())
        if worker.status().missing_weights:
            worker.write_weights(WeightWrite.RELOAD)
        serves()
        executor.change(PLANS[level])
        finished &= interrupted(WakePlan(), nth)
        executor.change(WakePlan())
        if worker.status().missing_weights:
            worker.write_weights(WeightWrite.RELOAD)
        serves()
    assert nth > 30, "that many lines are run at least"
