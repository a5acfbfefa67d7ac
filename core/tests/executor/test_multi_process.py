"""Ranks in processes: calls and their answers, errors, and what happens when a rank dies, stops or hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.executor import Executor, MultiProcessExecutor, RankLimits
from hardpoint.executor.link import Kind
from hardpoint.executor.meeting import MeetingServer
from hardpoint.interfaces import (
    WORKER_CALLS,
    SequenceSampling,
    SleepPlan,
    StepInput,
    StepOutput,
    WakePlan,
    WeightWrite,
    WorkerConfig,
)
from hardpoint.interfaces.errors import (
    ConfigError,
    DriverError,
    EngineDead,
    ForkedProcess,
    HostBudgetExceeded,
    OutputFailed,
    RankFailed,
    WeightsMissing,
    WorkerError,
)
from hardpoint.plugins import Resolved
from tests.leaks import Belongings, is_mapped

Make = Callable[..., MultiProcessExecutor]
REPORTED_WITHIN = 5.0


def order(call: str, does: str, rank: int | None = None, after: int = 0) -> dict[str, Any]:
    return {"call": call, "does": does, "rank": rank, "after": after}


def run_step(executor: Executor, step: StepInput) -> StepOutput:
    executor.submit(step)
    return executor.collect()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def sums(table: Any, rows: list[int], blocks: int) -> list[int]:
    """What a fake worker returns for a step."""
    return [int(table[row, :blocks].sum()) for row in rows]


# Two ranks that are well: one executor for all


@pytest.fixture(scope="module")
def pair(fake: ModuleType) -> Iterator[MultiProcessExecutor]:
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[1])
    executor = MultiProcessExecutor(resolved, WorkerConfig(model="", tensor_parallel_size=2, threads=6))
    yield executor
    executor.shutdown()


def test_ranks_are_processes_with_a_device_and_a_share_of_the_threads_each(pair: MultiProcessExecutor) -> None:
    models = pair.call("load")
    first, second = pair.pids
    assert [model.path for model in models] == [f"pid {first} rank 0 device 1 3", f"pid {second} rank 1 device 2 3"]
    assert os.getpid() not in pair.pids


def test_every_question_is_answered_by_every_rank(pair: MultiProcessExecutor) -> None:
    assert pair.call("start") == [None, None]
    assert [profile.utilization for profile in pair.call("profile")] == [0.5, 0.4]
    assert pair.call("initialize_kv", 3, 4) == [None, None]
    assert [status.missing_weights for status in pair.call("status")] == [{"of rank 0"}, {"of rank 1"}]
    assert pair.call("write_weights", WeightWrite.RELOAD, (), "four") == [4, 4]
    assert pair.call("write_weights", WeightWrite.RELOAD) == [0, 0]
    with pytest.raises(ConfigError, match="no_such"):
        pair.call("no_such")


def test_steps_carry_what_changes_and_return_the_drivers_output(pair: MultiProcessExecutor, step: Any) -> None:
    pair.call("load")
    rng, table = np.random.default_rng(0), np.zeros((64, 32), np.int32)
    for number in range(20):
        table[rng.integers(0, 64, 40), rng.integers(0, 32, 40)] = rng.integers(0, 1000, 40)
        rows = rng.choice(64, rng.integers(1, 20), replace=False).tolist()
        context = int(rng.integers(1, 512))
        output = run_step(pair, step(rows, context, table=table, seed=number))
        assert output.token_ids.tolist() == sums(table, rows, -(-context // 16))


def test_steps_and_answers_larger_than_the_ring_go_through(pair: MultiProcessExecutor, step: Any) -> None:
    table = np.arange(600 * 2000, dtype=np.int32).reshape(600, 2000)
    wanted = SequenceSampling(1, list(range(300_000)), 0, logprobs=400_000)
    one = step(list(range(600)), 16 * 2000, table=table, new=(wanted,))
    output = run_step(pair, one)
    assert output.token_ids.tolist() == sums(table, list(range(600)), 2000)
    assert output.logprobs[0].token_ids.tolist() == list(range(400_000))
    assert output.embeddings[9].tolist() == [12, 12, 12]


def test_a_call_that_fails_on_all_ranks_raises_the_first_ranks_error_and_they_go_on(pair: MultiProcessExecutor) -> None:
    with pytest.raises(HostBudgetExceeded, match=r"rank 0: no host memory: 0 bytes allowed") as raised:
        pair.call("begin", 1, SleepPlan(host_budget=0))
    assert raised.value.rank == 0
    assert raised.value.found == "0 bytes allowed"
    assert "fake_ranks.py" in raised.value.__notes__[0]
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2


def test_sleep_is_prepared_and_committed_with_progress_of_the_first_rank(pair: MultiProcessExecutor) -> None:
    seen: list[tuple[int, int]] = []
    plan = SleepPlan(tags=frozenset({"weights"}), progress=lambda done, total: seen.append((done, total)))
    assert [report.still_asleep for report in pair.change(plan)] == [frozenset({"weights"})] * 2
    assert seen == [(1, 2)]
    pair.change(WakePlan(frozenset({"weights"})))
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2


def test_a_callback_that_raises_fails_the_sleep_and_all_ranks_are_rolled_back(pair: MultiProcessExecutor) -> None:
    def callback(done: int, total: int) -> None:
        raise ZeroDivisionError("not now")

    with pytest.raises(ZeroDivisionError, match="not now"):
        pair.change(SleepPlan(progress=callback))
    assert [status.memory.asleep for status in pair.call("status")] == [frozenset()] * 2


def test_tensors_of_an_update_reach_every_rank(pair: MultiProcessExecutor) -> None:
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


def test_an_iterator_that_raises_is_raised_in_the_ranks_too_and_raised_here_as_itself(
    pair: MultiProcessExecutor,
) -> None:
    mine = LookupError("the trainer is gone")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise mine

    with pytest.raises(LookupError) as raised:
        pair.call("write_weights", WeightWrite.UPDATE, weights())
    assert raised.value is mine
    assert pair.call("status")[1].missing_weights == {"of rank 1"}


def test_an_interrupted_wait_leaves_the_ranks_usable(pair: MultiProcessExecutor, step: Any, fake: ModuleType) -> None:
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


def test_a_forked_child_cannot_use_the_ranks(pair: MultiProcessExecutor) -> None:
    child = os.fork()
    if child == 0:
        try:
            pair.shutdown()
            pair._finalizer()  # As at the child's exit.
            pair._is_shut_down = False
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

    outcomes = executor._call_all("write_weights", (WeightWrite.UPDATE, weights()))
    assert [type(outcome) for outcome in outcomes] == [DriverError] * 2
    assert len(asked) < 200
    assert executor.call("write_weights", WeightWrite.UPDATE, [("w", torch.ones(3))]) == [4, 4]


def test_a_frame_that_no_rank_understands_is_a_typed_end(make: Make) -> None:
    executor = make()
    executor._links[0].send(Kind.GO_ON, 1, [b"?"], lambda fd: None)
    with pytest.raises(RankFailed, match="exit code 1") as raised:
        executor.call("status")
    assert "MalformedMessage" in raised.value.output


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
    assert all(map(is_gone, executor.pids))


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
    assert all(map(is_gone, executor.pids))
    with pytest.raises(RankFailed, match="it raised"):
        executor.call("status")


# Death


@pytest.mark.parametrize("call", sorted(WORKER_CALLS - {"shutdown"}))
def test_a_rank_that_dies_in_any_call_is_reported_in_time(call: str, make: Make, step: Any) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "initialize_kv": (1, 1),
        "begin": (1, SleepPlan()),
        "commit": (1,),
        "rollback": (1,),
        "write_weights": (WeightWrite.UPDATE, [("a", torch.ones(1 << 20))] * 5),
    }
    executor = make(order(call, "kill"))
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 failed: its process was ended by SIGKILL") as raised:
        run_step(executor, step([1], 16)) if call in ("submit", "collect") else executor.call(
            call, *arguments.get(call, ())
        )
    assert time.monotonic() - start < REPORTED_WITHIN
    assert raised.value.rank == 0
    assert "out of memory" in str(raised.value)


@pytest.mark.parametrize(
    ("deed", "text", "output"),
    [
        ("exit", "its process ended with exit code 3", "the last words of this rank"),
        ("sys_exit", "its process ended with exit code 1", "sys.exit was called"),
        ("abort", "its process was ended by SIGABRT", "in collect"),
        ("stop", "its process has been stopped", ""),
        ("hang", r"it has not answered 'execute' within 0\.5 s", "in collect"),
    ],
)
def test_whatever_ends_one_rank_ends_all_and_is_said(deed: str, text: str, output: str, make: Make, step: Any) -> None:
    orders = [order("collect", deed, 1)]
    if deed != "hang":
        orders.append(order("collect", "hang", 0))
    executor = make(*orders, ranks=2, limits={"step": 0.5 if deed == "hang" else 30.0})
    start = time.monotonic()
    with pytest.raises(RankFailed, match=text) as raised:
        run_step(executor, step([1], 16))
    assert time.monotonic() - start < REPORTED_WITHIN
    assert raised.value.rank == 1
    assert output in raised.value.output
    assert wait_until(lambda: all(map(is_gone, executor.pids)))


def test_a_rank_that_dies_between_calls_is_noticed_by_the_next(make: Make) -> None:
    executor = make(ranks=2)
    os.kill(executor.pids[0], signal.SIGKILL)
    assert wait_until(lambda: all(map(is_gone, executor.pids)))
    with pytest.raises(RankFailed, match="rank 0"):
        executor.call("status")


@pytest.mark.parametrize(
    ("orders", "error", "text"),
    [
        ([order("made", "fail", 1)], DriverError, "rank 1: driver call fakeMalloc failed"),
        ([order("made", "exit", 1)], RankFailed, "rank 1 failed: its process ended with exit code 3"),
        ([order("made", "hang", 0)], RankFailed, r"rank 0 failed: it has not answered 'start' within"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_start_that_fails_leaves_nothing(orders: list[Any], error: type[Exception], text: str, make: Make) -> None:
    MeetingServer().close()
    before = Belongings.now()
    with pytest.raises(error, match=text):
        make(*orders, ranks=2, limits={"start": 4.0} if orders[0]["does"] == "hang" else None)
    assert Belongings.now().new_since(before) == []


@pytest.mark.parametrize("end", ["shutdown", "failure", "forgotten", "hang"])
def test_nothing_is_left_however_it_ends(
    end: str, step: Any, fake: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[0])
    orders = '[{"call": "shutdown", "does": "hang"}]' if end == "hang" else ""
    MeetingServer().close()  # The first one of a process opens files that the library keeps.
    before = Belongings.now()
    executor = MultiProcessExecutor(
        resolved,
        WorkerConfig(model=orders, tensor_parallel_size=2),
        RankLimits(shutdown=0.3),
    )
    held = Belongings.now()
    assert len(held.children - before.children) == 2
    assert len(held.ports - before.ports) == 1
    new_names = held.shared - before.shared  # Other programs have some, too.
    assert [name for name in new_names if is_mapped(name, (os.getpid(), *executor.pids))] == []
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
    assert Belongings.now().new_since(before) == []
    assert ("ERROR" in {record.levelname for record in caplog.records}) == (end == "failure")


@pytest.mark.parametrize("free", [3, 7, 10])
def test_a_start_without_enough_files_leaves_nothing(free: int, make: Make) -> None:
    before = Belongings.now()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(free):
            os.close(fillers.pop())
        with pytest.raises((OSError, RuntimeError)):
            make()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    assert Belongings.now().new_since(before) == []


def test_too_few_devices_are_refused_before_anything_is_started(make: Make) -> None:
    before = Belongings.now()
    with pytest.raises(ConfigError, match="4 ranks need 4 devices"):
        make(ranks=2, stages=2)
    assert Belongings.now().new_since(before) == []


PROGRAM = """
    import json, os, sys, time
    sys.path.insert(0, {site!r})
    import hardpoint_fake_ranks as fake
    from hardpoint.executor import MultiProcessExecutor
    from hardpoint.interfaces import WorkerConfig
    from hardpoint.plugins import Resolved
    descriptor = fake.hardpoint_backend()
    orders = json.dumps([{{"call": "start", "does": "hang"}}])
    executor = MultiProcessExecutor(Resolved(descriptor, descriptor.probe().devices[0]), WorkerConfig(model=orders))
    print(*executor.pids, flush=True)
    executor.call("start")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_their_engine_whatever_ends_it(number: signal.Signals, fake: ModuleType) -> None:
    """Without a word of theirs, and in a script without a guard for its main module."""
    program = dedent(PROGRAM).format(site=str(Path(fake.__file__ or "").parent))
    engine = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert engine.stdout is not None
    (pid,) = map(int, engine.stdout.readline().split())
    assert not is_gone(pid)
    os.killpg(engine.pid, number)
    _, errors = engine.communicate(timeout=10)
    assert wait_until(lambda: is_gone(pid))
    assert "rank_main" not in errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_ranks_outlive_the_thread_that_made_them(make: Make) -> None:
    made: list[MultiProcessExecutor] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert [status.missing_weights for status in made[0].call("status")] == [{"of rank 0"}]


def test_what_ranks_write_is_logged_with_their_number(make: Make, step: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hardpoint")
    executor = make(order("collect", "exit"))
    with pytest.raises(RankFailed):
        run_step(executor, step([1], 16))
    assert "rank 0: the last words of this rank" in caplog.messages
    assert any(record.levelname == "ERROR" and "rank 0 failed" in record.getMessage() for record in caplog.records)
