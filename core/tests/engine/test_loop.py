"""The engine's loop and its synchronous clients, over a device that computes in simulated time with steps in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from hardpoint import LLM, LLMEngine, SamplingParams
from hardpoint.engine.commands import CheckStep, Command, Event, Lost, Reply
from hardpoint.engine.loops import FairLock, RunningLoop
from hardpoint.engine.request_maker import unseeded
from hardpoint.engine.sleep import EngineState
from hardpoint.executor.interrupts import DeferredInterrupts
from hardpoint.interfaces.errors import (
    CorruptWeights,
    DrainTimeout,
    EngineAsleep,
    EngineDead,
    InvalidRequest,
    MemoryBusy,
    ModelError,
    RequestNeverFits,
    SleepRefused,
    WorkerError,
)
from hardpoint.sampling import RequestOutputKind
from tests.interrupts import InterruptAfter, InterruptAt

Make = Callable[..., LLM]

PROMPTS = ["The capital of France is", "Once upon a time", "one two three", "Dear Sir", "0 1 1 2 3 5", "x"] * 4
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=12, n=3, seed=5),
    SamplingParams(max_tokens=25, stop=["ing", "er"], ignore_eos=True),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=40, min_tokens=3, stop_token_ids=list(range(300, 1000)), ignore_eos=True),
    SamplingParams(max_tokens=9, n=1, best_of=2, logprobs=0, ignore_eos=True),
] * 4
SMALL = {"num_device_blocks": 24, "block_size": 16, "max_num_seqs": 8}


def results(outputs: Any) -> Any:
    return [[(c.index, c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def drain(engine: LLMEngine) -> dict[str, list[Any]]:
    outputs: dict[str, list[Any]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def worker_of(llm: LLM) -> Any:
    return llm.engine._loop.core.executor._worker  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{}, SMALL, {"enable_prefix_caching": False, "max_num_batched_tokens": 64}])
def test_outputs_do_not_depend_on_how_many_steps_are_in_flight(make_llm: Make, settings: dict[str, Any]) -> None:
    found = [make_llm(depth, **settings).generate(PROMPTS, PARAMS) for depth in (0, 1, 2)]
    assert results(found[0]) == results(found[1]) == results(found[2])
    assert any(c.finish_reason == "stop" for o in found[0] for c in o.outputs)


def test_parameters_that_change_after_a_request_was_added_change_nothing_of_it(make_llm: Make) -> None:
    llm = make_llm(1)
    params = SamplingParams(max_tokens=6, seed=5)
    llm.engine.add_request("one", "x", params)
    params.logprobs = 1
    found = drain(llm.engine)["one"][-1]
    assert results([found]) == results(llm.generate("x", SamplingParams(max_tokens=6, seed=5)))
    assert found.outputs[0].logprobs is None


def test_embeddings_and_generations_share_steps_in_flight(make_llm: Make) -> None:
    llm = make_llm(2, max_num_batched_tokens=64)
    llm.engine.add_request("text", "Once upon a time", SamplingParams(max_tokens=20, ignore_eos=True))
    vectors = llm.embed([{"prompt_token_ids": [7] * n} for n in (3, 150, 64)])
    assert [v.outputs.embedding[0] for v in vectors] == pytest.approx([0.5] * 3)
    assert len(drain(llm.engine)["text"][-1].outputs[0].token_ids) == 20


def test_requests_say_how_long_their_prompts_waited_for_a_step(make_llm: Make) -> None:
    llm = make_llm(1, max_num_seqs=1, seconds=0.005)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second, third = llm.generate(["one", "two", "three"], [params, params, params])
    waited = [one.metrics.queue_seconds for one in (first, second, third) if one.metrics is not None]
    # 20 steps of 5 ms before the second one's turn.
    assert waited[1] > 0.09
    assert 0 <= waited[0] < waited[1] < waited[2]
    core = llm.engine._loop.core  # type: ignore[attr-defined]
    llm.engine.add_request("gone", "x", params)
    llm.engine.abort_request("gone")
    assert not core._sequences
    assert not core._new_sampling
    assert not core._requests
    assert not core._special


def test_the_device_does_not_wait_for_the_host(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.01)
    engine = llm.engine

    def seconds() -> float:
        engine.add_request("a", "x", SamplingParams(max_tokens=30, ignore_eos=True))
        engine.step()
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            time.sleep(0.005)  # the client's own work
        return time.perf_counter() - start

    # Other processes hold the client up as well: one clear observation is enough.
    assert any(seconds() < 29 * 0.015 for _ in range(40)), "the client's work is done while the device computes"


def test_three_threads_are_each_given_their_own_outputs(make_llm: Make) -> None:
    llm = make_llm(1)
    params = SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
    expected = {prompt: results(llm.generate(prompt, params)) for prompt in PROMPTS[:6]}

    def run(number: int) -> None:
        for prompt in PROMPTS[number : number + 4]:
            assert results(llm.generate(prompt, params)) == expected[prompt]
            assert len(llm.embed(prompt)) == 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert llm.stats().blocks_used == 0


def test_a_request_without_a_seed_does_not_repeat_one_that_a_user_chose(make_llm: Make) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    llm = make_llm(0, seed=0)
    free = [tuple(llm.generate("x", params)[0].outputs[0].token_ids) for _ in range(8)]
    chosen = {tuple(llm.generate("x", params.clone(seed=n))[0].outputs[0].token_ids) for n in range(16)}
    assert len(set(free)) == 8
    assert not chosen.intersection(free)
    again = make_llm(1, seed=0)
    assert [tuple(again.generate("x", params)[0].outputs[0].token_ids) for _ in range(8)] == free
    assert len({unseeded(seed, number) for seed in range(50) for number in range(50)}) == 2500


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_fails_ends_its_requests_and_the_others_go_on(make_llm: Make, depth: int) -> None:
    llm = make_llm(depth)
    engine, params = llm.engine, SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    expected = results(llm.generate("Dear Sir", params))
    worker = worker_of(llm)
    engine.add_request("lost", "x", params)
    engine.step()
    worker.fails = {worker.num_steps + 1}
    with pytest.raises(WorkerError, match="fails") as raised:
        drain(engine)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert not engine.has_unfinished_requests()
    assert results(llm.generate("Dear Sir", params)) == expected
    assert engine.stats().blocks_used == 0


def test_an_interrupt_in_a_step_leaves_an_engine_that_goes_on(make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(1)
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    expected = results(llm.generate("Dear Sir", params))
    core = llm.engine._loop.core  # type: ignore[attr-defined]
    for owner, name, after in (
        (core.scheduler, "schedule", 3),
        (core.executor, "collect", 2),
        (core.scheduler, "update", 2),
    ):
        real, calls = getattr(owner, name), [0]

        def interrupted(*arguments: Any, real: Any = real, calls: list[int] = calls, after: int = after) -> Any:
            calls[0] += 1
            result = real(*arguments)
            if calls[0] == after:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("x", params)
        assert core.scheduler.num_in_flight == 0
        assert results(llm.generate("Dear Sir", params)) == expected
    assert llm.stats().blocks_used == 0


def test_the_outputs_of_an_interrupted_step_come_with_the_next_one(make_llm: Make) -> None:
    llm = make_llm(1)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    expected = list(llm.generate("x", params)[0].outputs[0].token_ids)
    nth, came = 0, True
    while came:
        nth += 1
        llm.engine.add_request("a", "x", params)
        tokens = []
        with InterruptAt(nth, functions=("_book", "take_events", "_apply", "apply", "_step_done")) as interrupt:
            tokens += llm.engine.step()[0].outputs[0].token_ids
        came = interrupt.came
        tokens += [token for output in drain(llm.engine)["a"] for token in output.outputs[0].token_ids]
        assert tokens == expected
    assert nth > 20, "that many lines are run at least"


def test_an_interrupt_ends_the_wait_of_a_sleep_for_requests(make_llm: Make) -> None:
    llm = make_llm(1)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    expected = results(llm.generate("x", params))
    llm.engine.add_request("a", "x", params)
    with InterruptAt(30, functions=("_book",)) as interrupt:
        llm.sleep(0, mode="wait")
    assert interrupt.came
    assert llm.sleep_status().state is EngineState.RUNNING
    assert llm.engine.has_unfinished_requests()
    assert results([drain(llm.engine)["a"][-1]]) == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_is_cancelled_before_in_and_after_a_step_in_flight(make_llm: Make, depth: int, steps: int) -> None:
    llm = make_llm(depth)
    engine, params = llm.engine, SamplingParams(max_tokens=10, seed=2, ignore_eos=True)
    expected = results(llm.generate("Dear Sir", params))
    engine.add_request("stays", "Dear Sir", params)
    engine.add_request("goes", "x", params.clone(n=2))
    for _ in range(steps):
        engine.step()
    engine.abort_request("goes")
    outputs = drain(engine)
    assert "goes" not in outputs
    assert results([outputs["stays"][-1]]) == expected
    assert engine.stats().blocks_used == 0


def test_nothing_comes_of_a_cancelled_request_that_others_have_served(make_llm: Make) -> None:
    llm = make_llm(1)
    llm.engine.add_request("done", "x", SamplingParams(max_tokens=2, ignore_eos=True))
    llm.engine.add_request("goes", "x", SamplingParams(max_tokens=100, ignore_eos=True))
    llm.generate("Dear Sir", SamplingParams(max_tokens=10, ignore_eos=True))
    llm.engine.abort_request(["goes", "done"])
    outputs = drain(llm.engine)
    assert outputs.keys() == {"done"}
    assert len(outputs["done"][-1].outputs[0].token_ids) == 2


def test_streamed_deltas_add_up_with_steps_in_flight(make_llm: Make) -> None:
    llm = make_llm(2)
    params = SamplingParams(max_tokens=30, seed=4, ignore_eos=True, stop=["zzzz"])
    (expected,) = llm.generate("x", params)
    llm.engine.add_request("s", "x", params.clone(output_kind=RequestOutputKind.DELTA))
    outputs = drain(llm.engine)["s"]
    assert "".join(o.outputs[0].text for o in outputs) == expected.outputs[0].text
    assert [t for o in outputs for t in o.outputs[0].token_ids] == list(expected.outputs[0].token_ids)
    assert len(outputs) == 30


def test_a_sleep_that_waits_serves_the_requests_first(make_llm: Make) -> None:
    llm = make_llm(1)
    llm.engine.add_request("a", "x", SamplingParams(max_tokens=20, ignore_eos=True))
    llm.engine.step()
    report = llm.sleep(0, mode="wait")
    assert (report.kept, report.aborted) == (0, 0)
    assert len(llm.engine.step()[-1].outputs[0].token_ids) == 20
    with pytest.raises(EngineAsleep):
        llm.generate("x")
    llm.wake_up()
    assert llm.generate("x")[0].finished


def test_a_drain_that_takes_too_long_leaves_the_engine_running(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.01)
    llm.engine.add_request("a", "x", SamplingParams(max_tokens=500, ignore_eos=True))
    with pytest.raises(DrainTimeout, match="1 in progress"):
        llm.sleep(0, mode="wait", drain_timeout=0.05)
    assert llm.sleep_status().state == "running"
    llm.engine.abort_request("a")
    assert llm.generate("x")[0].finished


def test_two_threads_that_put_it_to_sleep_at_once_are_both_answered(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.002)
    llm.engine.add_request("a", "x", SamplingParams(max_tokens=40, ignore_eos=True))
    reports: list[Any] = []

    def sleep() -> None:
        try:
            reports.append(llm.sleep(0, mode="wait"))
        except SleepRefused as error:
            reports.append(error)

    threads = [threading.Thread(target=sleep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sorted(report.changed for report in reports) == [False, True]
    assert llm.is_sleeping()


@contextmanager
def sleep_that_waits(llm: LLM, tokens: int) -> Iterator[Future[Any]]:
    """Have a thread put the engine to sleep once the request "a" has its tokens, and go on when it waits for that."""
    llm.engine.add_request("a", "x", SamplingParams(max_tokens=tokens, ignore_eos=True))
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(llm.sleep, 0, mode="wait")
        while llm.sleep_status().state is not EngineState.DRAINING:
            assert not sleeping.done()
        yield sleeping


def test_what_a_sleep_waits_for_is_aborted_by_another_thread(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.002)
    with sleep_that_waits(llm, 2000) as sleeping:
        llm.engine.abort_request("a")
        report = sleeping.result(60)
    assert (report.changed, report.kept) == (True, 0)
    assert llm.stats().sampled_tokens < 1000


def test_a_sleep_that_waits_is_given_up_by_another_thread(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.002)
    with sleep_that_waits(llm, 500) as sleeping:
        llm.engine.resume()
        with pytest.raises(SleepRefused, match="given up"):
            sleeping.result(60)
    assert llm.sleep_status().state is EngineState.RUNNING
    assert len(drain(llm.engine)["a"][-1].outputs[0].token_ids) == 500


def test_no_other_thread_comes_into_the_midst_of_an_update_whose_tensors_ask_for_a_sleep(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.002)
    llm.engine.add_request("a", "x", SamplingParams(max_tokens=40, ignore_eos=True))
    waits = threading.Event()

    def abort() -> None:
        waits.set()
        llm.engine.abort_request("other")

    with ThreadPoolExecutor(1) as pool:

        def tensors() -> Iterator[Any]:
            aborted = pool.submit(abort)
            assert waits.wait(60)
            with pytest.raises(MemoryBusy):
                llm.sleep(0, mode="wait")
            with pytest.raises(TimeoutError):
                aborted.result(0.05)
            yield from ()

        assert llm.update_weights(tensors()) == 0
    assert len(drain(llm.engine)["a"][-1].outputs[0].token_ids) == 40


class AsleepAfterEvents(RunningLoop):
    """A loop that goes to sleep when it is first asked, with its last events before the answer."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(None)
        self._last = events

    def submit(self, command: Command) -> Future[Reply]:
        assert command == CheckStep()
        if self._last:
            self._deliver([self._last.pop(0)])
        reply: Future[Reply] = Future()
        reply.set_exception(EngineAsleep("it sleeps"))
        return reply

    def shutdown(self) -> None: ...


def test_events_that_came_before_a_sleep_come_before_its_error() -> None:
    last: list[Event] = [Lost((key,), WorkerError("lost")) for key in range(2)]
    loop = AsleepAfterEvents(list(last))
    assert [*loop.events(), *loop.events()] == last
    with pytest.raises(EngineAsleep):
        loop.events()
    assert loop.pending() == []


def test_requests_that_come_while_a_sleep_waits_begin_when_it_is_given_up(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.002, num_device_blocks=200, sleeping_requests="queue")
    with sleep_that_waits(llm, 500) as sleeping:
        with pytest.raises(RequestNeverFits):
            llm.engine.add_request("never", {"prompt_token_ids": [5] * 3500}, SamplingParams())
        llm.engine.add_request("late", "x", SamplingParams(max_tokens=7, ignore_eos=True))
        assert llm.stats().waiting == 1
        llm.engine.resume()
        with pytest.raises(SleepRefused, match="given up"):
            sleeping.result(60)
    assert {key: len(one[-1].outputs[0].token_ids) for key, one in drain(llm.engine).items()} == {"a": 500, "late": 7}


def test_commands_to_an_engine_that_was_shut_down_are_refused(make_llm: Make) -> None:
    llm = make_llm(1)
    llm.shutdown()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("x"),
        lambda: llm.sleep(0),
        llm.wake_up,
        llm.engine.step,
        llm.reload_weights,
        llm.stats,
        lambda: llm.engine.add_request("a", "x", SamplingParams()),
    ]
    for call in calls:
        with pytest.raises(EngineDead, match="shut down"):
            call()
    llm.engine.abort_request("a")
    llm.shutdown()


def test_a_thread_that_takes_a_lock_again_and_again_lets_others_have_it() -> None:
    lock, holds, seen = FairLock(), 0, list[int]()

    def take(waits: threading.Event) -> None:
        waits.set()
        with lock:
            seen.append(holds)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(9):
            waits = threading.Event()
            holds = 0
            with lock:
                taken = pool.submit(take, waits)
                assert waits.wait(60)
                time.sleep(0.005)
            for _ in range(300):
                with lock, lock:
                    holds += 1
                    sum(range(3000))
            taken.result(60)
    assert sorted(seen)[4] < 10, f"one that waited had the lock after it was taken {seen} times again"


def test_an_interrupt_ends_the_wait_for_a_lock_and_leaves_it_to_others() -> None:
    lock, held, ended = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert ended.wait(60)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        assert held.wait(60)
        with InterruptAfter(0.02) as interrupt, DeferredInterrupts(), lock:
            pass
        ended.set()
        assert interrupt.came
        holder.result(60)
        pool.submit(lock.__enter__).result(60)


def test_an_interrupt_at_any_line_of_taking_a_lock_leaves_it_to_others() -> None:
    lock, last = FairLock(), 0
    with ThreadPoolExecutor(1) as pool:
        for nth in range(1, 60):
            held, waits = threading.Event(), threading.Event()

            def hold(held: threading.Event = held, waits: threading.Event = waits) -> None:
                with lock:
                    held.set()
                    assert waits.wait(60)
                    time.sleep(0.002)

            holder = pool.submit(hold)
            assert held.wait(60)
            waits.set()
            with (
                InterruptAt(nth, functions=("__enter__", "__exit__", "_acquire")) as interrupt,
                DeferredInterrupts(),
                lock,
            ):
                pass
            last = nth if interrupt.came else last
            holder.result(60)
            pool.submit(lock.__enter__).result(60)
            pool.submit(lock.__exit__).result(60)
    assert last > 25, "that many lines are run where the lock is waited for"


def test_requests_that_another_thread_aborts_end_with_an_error(make_llm: Make) -> None:
    llm = make_llm(1, seconds=0.002)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, "x", SamplingParams(max_tokens=400, ignore_eos=True))
        while not llm.engine.get_num_unfinished_requests():
            time.sleep(0.001)
        llm.engine.abort_request("offline-0")
        with pytest.raises(InvalidRequest, match="aborted"):
            running.result(240)


def test_weights_are_pairs_and_checkpoints_and_requests_have_names(make_llm: Make) -> None:
    llm = make_llm(0)
    with pytest.raises(CorruptWeights, match="pairs of a checkpoint name and a tensor"):
        llm.update_weights(5)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="named by its path"):
        llm.reload_weights(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="named by their ids"):
        llm.engine.abort_request(5)  # type: ignore[arg-type]


def test_a_thread_that_gives_way_has_the_lock_again_as_deep_as_before() -> None:
    lock, order = FairLock(), list[str]()

    def take(waits: threading.Event) -> None:
        waits.set()
        with lock:
            order.append("other")

    waits = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with lock, lock:
            lock.give_way()  # to nobody
            taken = pool.submit(take, waits)
            assert waits.wait(60)
            time.sleep(0.01)
            order.append("before")
            lock.give_way()
            order.append("after")
        assert order == ["before", "other", "after"]
        taken.result(60)
        with lock:
            waits.clear()
            taken = pool.submit(take, waits)
            assert waits.wait(60)
            time.sleep(0.01)
            assert len(order) == 3
        taken.result(60)
