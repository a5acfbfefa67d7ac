"""Ranks elsewhere, over every transport: calls and their answers, errors, and what happens when a rank dies, hangs or is out of step.

Over Ray they run in `tests/ray_cluster/test_calls.py` (`make test-ray`). What one transport alone does is in `test_processes.py` and
`tests/ray_cluster`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from core.tests.executor.conftest import TRANSPORTS, Make, make_executor
from core.tests.executor.helpers import REPORTED_WITHIN, is_gone, order, run_step, sums, wait_until
from hardpoint.executor import RemoteExecutor
from hardpoint.interfaces import WORKER_CALLS, SequenceSampling, SleepPlan, TierMoves, TierReport, WakePlan, WeightWrite
from hardpoint.interfaces.errors import (
    ConfigError,
    DriverError,
    EngineDead,
    ForkedProcess,
    HostBudgetExceeded,
    MemoryBusy,
    NothingToCollect,
    OutputFailed,
    RankFailed,
    WeightsMissing,
    WorkerError,
)
from tests.interrupts import InterruptAfter, InterruptAt
from tests.leaks import Belongings, is_mapped

KILLED = {
    "processes": "rank {} failed: its process was ended by SIGKILL",
    "ray": "rank {} failed: its process has ended, or its machine",
}
"""What is said of a rank that was killed."""


def all_gone(executor: RemoteExecutor) -> Callable[[], bool]:
    pids = executor.pids
    return lambda: all(map(is_gone, pids))


# Two ranks that are well: one executor for all


@pytest.fixture(scope="module")
def pair(fake: ModuleType, transport: str) -> Iterator[RemoteExecutor]:
    # On Ray, so large that each is on a machine of its own.
    settings = {"ray": {"amount": 4}} if transport == "ray" else {}
    executor = make_executor(fake, transport, ranks=2, **settings)
    yield executor
    executor.shutdown()


def test_every_question_is_answered_by_every_rank(pair: RemoteExecutor) -> None:
    assert pair.call("start") == [None, None]
    assert [profile.utilization for profile in pair.call("profile")] == [0.5, 0.4]
    assert pair.call("initialize_kv", 3, 4) == [None, None]
    assert [status.missing_weights for status in pair.call("status")] == [{"of rank 0"}, {"of rank 1"}]
    assert pair.call("write_weights", WeightWrite.RELOAD, (), "four") == [4, 4]
    assert pair.call("write_weights", WeightWrite.RELOAD) == [0, 0]
    with pytest.raises(ConfigError, match="no_such"):
        pair.call("no_such")


def test_steps_carry_what_changes_and_return_the_drivers_output(pair: RemoteExecutor, step: Any) -> None:
    pair.call("load")
    rng, table = np.random.default_rng(0), np.zeros((64, 32), np.int32)
    for number in range(20):
        table[rng.integers(0, 64, 40), rng.integers(0, 32, 40)] = rng.integers(0, 1000, 40)
        rows = rng.choice(64, rng.integers(1, 20), replace=False).tolist()
        context = int(rng.integers(1, 512))
        output = run_step(pair, step(rows, context, table=table, seed=number))
        assert output.token_ids.tolist() == sums(table, rows, -(-context // 16))


def test_a_block_of_the_tiers_is_loaded_where_all_ranks_have_loaded_their_part(pair: RemoteExecutor, step: Any) -> None:
    pair.call("load")
    pair.call("open_tiers", 4, 2, "folder")
    one = step([0], 16, table=np.zeros((4, 4), np.int32))
    stores, loads = np.array([[7, 1, 5], [8, 2, 6]], np.int64), np.array([[3, 4, 2]], np.int64)
    one.batch.tier_moves = TierMoves(stores=stores, loads=loads)
    assert run_step(pair, one).tiers == TierReport((0, 1, 3, 4), ((1, 5), (2, 6)), 2, 1, 2.0)
    one.batch.tier_moves = None
    assert run_step(pair, one).tiers is None


def test_steps_and_answers_larger_than_the_ring_go_through(pair: RemoteExecutor, step: Any) -> None:
    table = np.arange(600 * 2000, dtype=np.int32).reshape(600, 2000)
    wanted = SequenceSampling(1, list(range(300_000)), 0, logprobs=400_000)
    one = step(list(range(600)), 16 * 2000, table=table, new=(wanted,))
    output = run_step(pair, one)
    assert output.token_ids.tolist() == sums(table, list(range(600)), 2000)
    assert output.logprobs[0].token_ids.tolist() == list(range(400_000))
    assert output.embeddings[9].tolist() == [12, 12, 12]


def test_a_call_that_fails_on_all_ranks_raises_the_first_ranks_error_and_they_go_on(pair: RemoteExecutor) -> None:
    with pytest.raises(HostBudgetExceeded, match=r"rank 0: no host memory: 0 bytes allowed") as raised:
        pair.call("begin", 1, SleepPlan(host_budget=0))
    assert raised.value.rank == 0
    assert raised.value.found == "0 bytes allowed"
    assert "fake_ranks.py" in raised.value.__notes__[0]
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2


def test_sleep_is_prepared_and_committed_with_progress_of_the_first_rank(pair: RemoteExecutor) -> None:
    seen: list[tuple[int, int]] = []
    plan = SleepPlan(tags=frozenset({"weights"}), progress=lambda done, total: seen.append((done, total)))
    assert [report.still_asleep for report in pair.change(plan)] == [frozenset({"weights"})] * 2
    assert seen == [(1, 2)]
    pair.change(WakePlan(frozenset({"weights"})))
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2


def test_a_callback_that_raises_fails_the_sleep_and_all_ranks_are_rolled_back(pair: RemoteExecutor) -> None:
    def callback(done: int, total: int) -> None:
        raise ZeroDivisionError("not now")

    with pytest.raises(ZeroDivisionError, match="not now"):
        pair.change(SleepPlan(progress=callback))
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2


def test_tensors_of_an_update_reach_every_rank(pair: RemoteExecutor) -> None:
    large = torch.ones(700_000)
    weights = [
        ("a", torch.ones(3, 4)),
        ("large", large),
        ("half", torch.ones(5, dtype=torch.bfloat16)),
        ("none", torch.empty(0)),
    ]
    expected = sum(len(name) + int(tensor.sum()) for name, tensor in weights)
    assert pair.call("write_weights", WeightWrite.UPDATE, iter(weights)) == [expected] * 2
    assert pair.call("write_weights", WeightWrite.UPDATE, ()) == [0, 0]


def test_the_ranks_are_not_called_by_the_tensors_of_an_update(pair: RemoteExecutor, step: Any) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        for ask in (
            lambda: pair.call("status"),
            lambda: pair.call("write_weights", WeightWrite.UPDATE, [("b", torch.ones(2))]),
            lambda: pair.submit(step([0], 1)),
            pair.collect,
        ):
            with pytest.raises(MemoryBusy, match="tensors of an update"):
                ask()
        yield "c", torch.ones(2)

    assert pair.call("write_weights", WeightWrite.UPDATE, weights()) == [6] * 2
    assert len(pair.call("status")) == 2


def test_an_iterator_that_raises_is_raised_in_the_ranks_too_and_raised_here_as_itself(
    pair: RemoteExecutor,
) -> None:
    mine = LookupError("the trainer is gone")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise mine

    with pytest.raises(LookupError) as raised:
        pair.call("write_weights", WeightWrite.UPDATE, weights())
    assert raised.value is mine
    assert pair.call("status")[1].missing_weights == {"of rank 1"}


def test_an_interrupted_wait_leaves_the_ranks_usable(pair: RemoteExecutor, step: Any, fake: ModuleType) -> None:
    """As Ctrl-C in the middle of a step: its answer is dropped, the next call gets its own."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.change(SleepPlan(progress=interrupt))
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2
    table = np.ones((64, 32), np.int32)
    assert run_step(pair, step([5], 32, table=table)).token_ids.tolist() == [2]


def test_a_signal_while_waiting_is_an_interrupt_and_answers_are_not_mixed_up(make: Make, step: Any) -> None:
    executor = make(order("collect", "wait"))
    table = np.ones((64, 32), np.int32)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_step(executor, step([5], 32, table=table))
    assert run_step(executor, step([5, 6], 32, table=table)).token_ids.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12 on: it has threads
def test_a_forked_child_cannot_use_the_ranks(pair: RemoteExecutor) -> None:
    child = os.fork()
    if child == 0:
        try:
            pair.shutdown()
            pair._finalizer()  # As at the child's exit.
            pair.call("status")
        except ForkedProcess:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(pair.call("status")) == 2


def test_a_rank_that_refuses_a_tensor_ends_the_update_on_all(make: Make) -> None:
    executor = make(order("tensor", "fail", 1, after=1), ranks=2)
    asked: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(200):
            asked.append(number)
            yield "w", torch.ones(50_000)

    with pytest.raises(DriverError) as raised:
        executor.call("write_weights", WeightWrite.UPDATE, weights())
    assert raised.value.rank == 0, "the others are told, and fail with the same error"
    assert len(asked) < 200
    assert executor.call("write_weights", WeightWrite.UPDATE, [("w", torch.ones(3))]) == [4, 4]


def test_steps_in_flight_are_answered_in_their_order_by_number(make: Make, step: Any) -> None:
    executor = make(order("steps_in_flight", 2), ranks=2)
    executor.call("load")
    table, expected, seconds = np.zeros((64, 32), np.int32), [], []

    def submit(number: int) -> None:
        table[number % 3, :] = number
        expected.append(sums(table, [0, 1, 2], 2))
        executor.submit(step([0, 1, 2], 32, table=table))

    for number in range(1, 3):
        submit(number)
    for number in range(3, 20):
        submit(number)
        start = time.monotonic()
        assert executor.collect().token_ids.tolist() == expected.pop(0)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.3, "none waits for those that follow it"
    while expected:
        assert executor.collect().token_ids.tolist() == expected.pop(0)
    with pytest.raises(NothingToCollect):
        executor.collect()


def test_a_step_that_fails_among_others_fails_alone(make: Make, step: Any) -> None:
    executor = make(order("steps_in_flight", 1), order("submit", "fail_weights", after=1), ranks=2)
    executor.call("load")
    table = np.ones((64, 32), np.int32)
    for _ in range(2):
        executor.submit(step([1], 32, table=table))
    assert executor.collect().token_ids.tolist() == [2]
    executor.submit(step([1, 2], 32, table=table))
    with pytest.raises(WeightsMissing):
        executor.collect()
    assert executor.collect().token_ids.tolist() == [2, 2]


# Interrupts


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "in_flight", "functions"),
    [(1, 0, ("submit", "encode")), (1, 0, ()), (2, 0, ()), (2, 1, ())],
    ids=["1 rank, submit", "1 rank", "2 ranks", "2 ranks, 1 in flight"],
)
def test_an_interrupt_at_any_line_of_a_step_does_no_harm(
    ranks: int, in_flight: int, functions: tuple[str, ...], transport: str, make: Make, step: Any
) -> None:
    """Afterwards steps are right, although each sends only what changed of the block table."""
    rng, table = np.random.default_rng(0), np.zeros((64, 32), np.int32)
    rows = list(range(64))
    executor = make(order("steps_in_flight", in_flight), ranks=ranks)
    executor.call("load")

    def change() -> Any:
        table[rng.integers(0, 64, 40), rng.integers(0, 32, 40)] = rng.integers(0, 1000, 40)
        return step(rows, 512, table=table)

    trials, is_over = 0, False
    while not is_over:
        for _ in range(in_flight):
            executor.submit(change())
        line = 1 + trials * (1 if functions else STRIDE[transport])
        inside = ("hardpoint.executor",)
        with InterruptAt(line, inside=inside, functions=functions, returns=True) as interrupt:
            for _ in range(2):
                executor.submit(change())
                executor.collect()
        with contextlib.suppress(NothingToCollect):
            for _ in range(in_flight + 1):
                executor.collect()
        with pytest.raises(NothingToCollect):
            executor.collect()
        assert run_step(executor, change()).token_ids.tolist() == sums(table, rows, 32)
        trials, is_over = trials + 1, not interrupt.came
    assert trials > 20, "that many lines are run at least"


STRIDE = {"processes": 7, "ray": 13}
"""Between the lines at which interrupts are tried, where these are of all functions."""


@pytest.mark.parametrize("call", ["begin", "commit", "status"])
def test_an_interrupt_is_raised_where_a_rank_hangs(call: str, make: Make) -> None:
    """It waits for the answers that end a change of memory, but not as long as they may take."""
    executor = make(order(call, "hang"), limits={"shutdown": 0.3})
    start = time.monotonic()
    with InterruptAfter(0.1) as interrupt:
        executor.call(call, *ARGUMENTS.get(call, ()))
    assert interrupt.came
    assert time.monotonic() - start < REPORTED_WITHIN


# Failures of steps


def test_a_step_that_fails_alike_on_all_ranks_ends_no_rank(make: Make, step: Any) -> None:
    executor = make(order("collect", "fail_weights"), ranks=2)
    with pytest.raises(WeightsMissing, match="no weights") as raised:
        run_step(executor, step([1], 16))
    assert raised.value.rank == 0
    assert len(run_step(executor, step([1], 16)).token_ids) == 1


@pytest.mark.parametrize("sizes", [{"ranks": 2}, {"stages": 2}], ids=["tensor", "pipeline"])
def test_a_step_whose_output_fails_on_the_driver_alone_ends_no_rank(sizes: Any, make: Make, step: Any) -> None:
    driver = sizes.get("stages", 1) - 1
    executor = make(order("collect", "fail_output", driver), **sizes)
    with pytest.raises(OutputFailed, match=f"rank {driver}: no token can be drawn: masks leave none") as raised:
        run_step(executor, step([1], 16))
    assert raised.value.rank == driver
    assert "Traceback" in raised.value.__notes__[0]
    table = np.arange(64 * 32, dtype=np.int32).reshape(64, 32)
    assert run_step(executor, step([3], 16, table=table)).token_ids.tolist() == [96]


@pytest.mark.parametrize(
    "orders",
    [
        [order("collect", "fail_output", 1)],
        [order("collect", "fail_output", 0), order("collect", "fail", 1)],
        [order("collect", "fail_output", 0), order("collect", "hang", 1)],
    ],
    ids=["another rank", "both", "the other waits"],
)
def test_an_output_that_fails_otherwise_leaves_the_ranks_out_of_step(orders: Any, make: Make, step: Any) -> None:
    executor = make(*orders, ranks=2, limits={"behind": 0.5})
    with pytest.raises(RankFailed, match="it raised"):
        run_step(executor, step([1], 16))
    assert wait_until(all_gone(executor))


def test_an_error_of_an_unknown_class_says_which(make: Make, step: Any) -> None:
    executor = make(order("collect", "fail_foreign"))
    with pytest.raises(WorkerError, match=r"rank 0 of 1.* raised .*ForeignError: whatever"):
        run_step(executor, step([1], 16))


@pytest.mark.parametrize(
    "others", [(), (order("collect", "hang", 0),), (order("collect", "fail_value", 0),)], ids=["well", "waits", "fails"]
)
def test_ranks_that_do_not_fail_alike_are_ended(others: tuple[Any, ...], make: Make, step: Any) -> None:
    """One that waits for the failed one is freed that way, and soon."""
    executor = make(order("collect", "fail", 1), *others, ranks=2, limits={"behind": 0.5})
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank \d failed: it raised \w+") as raised:
        run_step(executor, step([1], 16))
    assert time.monotonic() - start < REPORTED_WITHIN
    assert raised.value.rank == (0 if others and others[0]["does"] == "fail_value" else 1)
    assert "Traceback" in raised.value.output
    assert wait_until(all_gone(executor))
    with pytest.raises(RankFailed, match="it raised"):
        executor.call("status")


def test_a_rank_that_fails_to_end_a_change_frees_those_that_wait_for_it(make: Make) -> None:
    """As communicators that are resumed do: their libraries wait for one another."""
    executor = make(order("commit", "fail", 1), order("commit", "hang", 0), ranks=2, limits={"behind": 0.5})
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed: it raised DriverError: .*, and rank 0 waits for it"):
        executor.change(SleepPlan())
    assert time.monotonic() - start < REPORTED_WITHIN
    assert wait_until(all_gone(executor))


# Death


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "initialize_kv": (1, 1),
    "open_tiers": (1, 1, "a/folder"),
    "begin": (1, SleepPlan()),
    "commit": (1,),
    "rollback": (1,),
    "start_trace": ("a/folder",),
    "load_adapter": (1, "a/folder"),
    "unload_adapter": (1,),
    "write_weights": (WeightWrite.UPDATE, [("a", torch.ones(1 << 20))] * 5),
}
CALLS = {"processes": sorted(WORKER_CALLS - {"shutdown"}), "ray": ["collect", "begin", "write_weights"]}


@pytest.mark.parametrize(
    ("transport", "call"), [(name, call) for name in TRANSPORTS for call in CALLS[name]], indirect=["transport"]
)
def test_a_rank_that_dies_in_any_call_is_reported_in_time(call: str, transport: str, make: Make, step: Any) -> None:
    executor, is_step = make(order(call, "kill")), call in ("submit", "collect")
    start = time.monotonic()
    with pytest.raises(RankFailed, match=KILLED[transport].format(0)) as raised:
        run_step(executor, step([1], 16)) if is_step else executor.call(call, *ARGUMENTS.get(call, ()))
    assert time.monotonic() - start < REPORTED_WITHIN
    assert raised.value.rank == 0


def test_one_rank_that_is_killed_ends_all_and_a_new_engine_can_be_made(transport: str, make: Make, step: Any) -> None:
    executor = make(order("collect", "kill", 1), order("collect", "hang", 0), ranks=2)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=KILLED[transport].format(1)) as raised:
        run_step(executor, step([1], 16))
    assert time.monotonic() - start < REPORTED_WITHIN
    assert raised.value.rank == 1
    assert wait_until(all_gone(executor))
    with pytest.raises(RankFailed, match=KILLED[transport].format(1)):
        executor.call("status")
    executor.shutdown()
    assert len(make(ranks=2).call("status")) == 2


def test_a_rank_that_hangs_is_ended_and_says_where_it_stood(make: Make, step: Any) -> None:
    executor = make(order("collect", "hang", 1), ranks=2, limits={"step": 2.0})
    with pytest.raises(RankFailed, match=r"rank 1 failed: it has not answered 'step' within 2 s") as raised:
        run_step(executor, step([1], 16))
    assert raised.value.rank == 1
    assert "in collect" in raised.value.output
    assert wait_until(all_gone(executor))


def test_a_rank_that_ends_itself_or_raises_past_every_error_is_reported(make: Make, step: Any) -> None:
    executor = make(order("collect", "sys_exit"))
    with pytest.raises(RankFailed, match="rank 0 failed"):
        run_step(executor, step([1], 16))


def test_a_rank_that_dies_between_calls_ends_all_without_a_call(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make(ranks=2)
    os.kill(executor.pids[0], signal.SIGKILL)
    assert wait_until(all_gone(executor))
    assert wait_until(lambda: any("rank 0 failed" in message for message in caplog.messages))
    for _ in range(2):
        with pytest.raises(RankFailed, match="rank 0"):
            executor.call("status")


# Start and end


@pytest.fixture
def left(transport: str) -> Callable[[], list[str]]:
    """Return what says what is held of the system since the beginning of the test."""
    if transport == "ray":
        from ray.util import placement_group_table

        def placed() -> set[str]:
            return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}

        groups = placed()
        return lambda: sorted(placed() - groups)
    before = Belongings.now()
    return lambda: Belongings.now().new_since(before)


@pytest.mark.parametrize(
    ("orders", "error", "text"),
    [
        ([order("made", "fail", 1)], DriverError, "rank 1: driver call fakeMalloc failed"),
        ([order("made", "exit", 1)], RankFailed, "rank 1 failed: its process (ended with exit code 3|has ended)"),
        ([order("made", "hang", 0)], RankFailed, r"rank 0 failed: it has not answered 'start' within"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_start_that_fails_leaves_nothing(
    orders: list[Any], error: type[Exception], text: str, make: Make, left: Callable[[], list[str]]
) -> None:
    with pytest.raises(error, match=text):
        make(*orders, ranks=2, limits={"start": 6.0} if orders[0]["does"] == "hang" else None)
    assert wait_until(lambda: left() == [])


@pytest.mark.parametrize("end", ["shutdown", "failure", "forgotten", "hang"])
def test_nothing_is_left_however_it_ends(
    end: str,
    transport: str,
    step: Any,
    fake: ModuleType,
    left: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = threading.active_count()
    orders = [order("shutdown", "hang")] if end == "hang" else []
    executor = make_executor(fake, transport, *orders, ranks=2, limits={"shutdown": 0.3})
    gone = all_gone(executor)
    held = left()
    if transport == "processes":
        assert len([one for one in held if one.isdigit()]) == 2, "the ranks"
        assert not [name for name in os.listdir("/dev/shm") if is_mapped(name, executor.pids)]
    else:
        assert len(held) == 1
    run_step(executor, step([1], 16))
    if end == "failure":
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed):
            run_step(executor, step([1], 16))
    if end != "forgotten":
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(EngineDead):
            run_step(executor, step([1], 16))
    del executor
    gc.collect()
    assert wait_until(lambda: gone() and left() == [])
    assert threading.active_count() <= threads
    assert ("ERROR" in {record.levelname for record in caplog.records}) == (end == "failure")
