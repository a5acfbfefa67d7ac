"""An engine in a process of its own, over a device in simulated time: the same results and errors as inline, and nothing left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from core.tests.executor.helpers import is_gone, wait_until
from hardpoint import LLM, SamplingParams
from hardpoint.engine.commands import CheckStep, Event, Generate, GetStats, Sleep, StepDone
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.process_loop import ProcessLoop
from hardpoint.engine.process_messages import REPLIES
from hardpoint.engine.sleep import SleepMode, SleepRequest
from hardpoint.interfaces.batch import SequenceSampling
from hardpoint.interfaces.errors import (
    BackendNotFound,
    CorruptWeights,
    DrainTimeout,
    EngineAsleep,
    EngineDead,
    InboxFull,
    InvalidRequest,
    MemoryBusy,
    RequestNeverFits,
    SleepRefused,
)
from hardpoint.scheduler import FinishReason
from tests.leaks import Belongings
from tests.warm_processes import children_by

Make = Callable[..., LLM]

PROMPTS = ["The capital of France is", "Once upon a time", "one two three", "Dear Sir"] * 4
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=12, n=3, seed=5),
    SamplingParams(max_tokens=25, stop=["ing", "er"], ignore_eos=True),
    SamplingParams(max_tokens=9, n=1, best_of=2, logprobs=0, ignore_eos=True),
] * 4
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=10, seed=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_shared_llm: Make) -> LLM:
    with children_by(subprocess.Popen):  # whose imports are looked at
        return make_shared_llm(1, seconds=0.001, num_device_blocks=200, engine_process=True)


@pytest.fixture(scope="module")
def inline(make_shared_llm: Make) -> LLM:
    return make_shared_llm(1, num_device_blocks=200)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no process, file descriptor or shared memory."""
    before = Belongings.now()
    yield
    assert Belongings.now().new_since(before) == []


@pytest.fixture(params=["inline", "process"])
def either(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue("inline" if request.param == "inline" else "llm")


def results(outputs: Any) -> Any:
    return [[(c.index, c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def pid_of(llm: LLM) -> int:
    return llm.engine._loop.pid  # type: ignore[attr-defined]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def ask_until_it_fails(llm: LLM) -> None:
    for _ in range(6000):
        llm.stats()
        time.sleep(0.01)


def drain(llm: LLM) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    while llm.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.engine.step()}
    return outputs


def test_more_prompts_than_the_inbox_holds_are_served(make_llm: Make) -> None:
    prompts = [{"prompt_token_ids": [7, 8, 1 + number]} for number in range(200)]
    params = SamplingParams(max_tokens=1, detokenize=False)
    with make_llm(engine_process=True, max_commands=16) as few:
        outputs = few.generate(prompts, params)
        assert [output.prompt_token_ids[-1] for output in outputs] == list(range(1, 201))


def test_streams_of_several_threads_are_whole(either: LLM) -> None:
    def stream(_: int) -> int:
        return sum(len(one.outputs[0].token_ids) for _ in range(20) for one in either.stream("Dear Sir", SHORT))

    with ThreadPoolExecutor(4) as threads:
        streams = threads.map(stream, range(2))
        others = threads.map(lambda _: either.generate(["x"] * 20, SHORT), range(8))
        assert list(streams) == [200, 200]
        assert len(list(others)) == 8


def test_outputs_are_those_of_an_engine_in_this_process(llm: LLM, inline: LLM) -> None:
    assert results(llm.generate(PROMPTS, PARAMS)) == results(inline.generate(PROMPTS, PARAMS))
    ours, theirs = (one.embed([{"prompt_token_ids": [7] * n} for n in (3, 150)]) for one in (llm, inline))
    assert [list(o.outputs.embedding) for o in ours] == [list(o.outputs.embedding) for o in theirs]
    assert llm.stats().prefill_tokens == inline.stats().prefill_tokens
    assert llm.info.num_device_blocks == 200
    llm.reset_prefix_cache()
    assert llm.stats().blocks_cached == 0
    assert "libtorch" not in Path(f"/proc/{pid_of(llm)}/maps").read_text(), "its worker does without"


def test_three_threads_are_each_given_their_own_outputs(llm: LLM) -> None:
    expected = {prompt: results(llm.generate(prompt, SHORT)) for prompt in PROMPTS[:4]}

    def run(number: int) -> None:
        for prompt in PROMPTS[number : number + 4]:
            assert results(llm.generate(prompt, SHORT)) == expected[prompt]
            assert len(llm.embed(prompt)) == 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert llm.stats().blocks_used == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_is_cancelled_before_in_and_after_a_step(llm: LLM, steps: int) -> None:
    expected = results(llm.generate("Dear Sir", SHORT))
    llm.engine.add_request("stays", "Dear Sir", SHORT)
    llm.engine.add_request("goes", "x", LONG.clone(n=2))
    seen = [output for _ in range(steps) for output in llm.engine.step() if output.request_id == "stays"]
    llm.engine.abort_request("goes")
    while llm.engine.has_unfinished_requests():
        seen += llm.engine.step()
    assert {output.request_id for output in seen} == {"stays"}
    assert results(seen[-1:]) == expected
    assert llm.stats().blocks_used == 0


def test_refusals_are_the_same_typed_errors(either: LLM) -> None:
    with pytest.raises(RequestNeverFits):
        either.generate({"prompt_token_ids": [5] * 3500})
    with pytest.raises(InvalidRequest):
        either.generate([[]])
    assert either.engine.step() == []
    assert results(either.generate("x", SHORT))[0][0][3] == "length"


def test_a_paused_engine_keeps_its_requests_and_refuses_steps_until_it_resumes(either: LLM) -> None:
    either.engine.add_request("kept", "x", LONG.clone(max_tokens=50))
    assert either.pause().kept == 1
    assert not either.pause().changed
    with suppress(EngineAsleep):
        either.engine.step()  # what came before it
    with pytest.raises(EngineAsleep):
        either.engine.step()
    with pytest.raises(EngineAsleep):
        either.generate("x")
    either.resume()
    either.resume()
    assert len(drain(either)["kept"].outputs[0].token_ids) == 50
    with pytest.raises(SleepRefused, match="mode"):
        either.pause("abruptly")


def test_a_drain_ends_with_its_requests_or_its_time(either: LLM) -> None:
    either.engine.add_request("a", "x", SHORT)
    assert either.sleep(0, mode="wait").changed
    assert len(either.engine.step()[-1].outputs[0].token_ids) == 10
    either.wake_up()
    either.engine.add_request("b", "x", LONG)
    with pytest.raises(DrainTimeout, match="1 in progress"):
        either.sleep(0, mode="wait", drain_timeout=0.02)
    assert either.sleep_status().state == "running"
    either.engine.abort_request("b")
    either.generate("x", SHORT)


def test_a_sleep_that_waits_is_given_up_by_its_own_key_alone(llm: LLM) -> None:
    loop = llm.engine._loop
    assert isinstance(loop, ProcessLoop)
    first, second = (Sleep(SleepRequest(level=0, mode=SleepMode.WAIT)) for _ in range(2))
    llm.engine.add_request("a", "x", LONG)
    answer = loop.submit(first)
    refused = loop.submit(second)
    loop.give_up(second)
    with pytest.raises(MemoryBusy):
        refused.result(60)
    assert llm.sleep_status().state == "draining"
    loop.give_up(first)
    with pytest.raises(SleepRefused, match="given up"):
        answer.result(60)
    assert llm.sleep_status().state == "running"
    llm.engine.abort_request("a")
    assert llm.generate("x", SHORT)[0].finished


def test_two_threads_that_put_it_to_sleep_at_once_are_both_answered(llm: LLM) -> None:
    llm.engine.add_request("a", "x", SHORT)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: llm.sleep(0, mode="wait"), range(2)))
    assert sorted(report.changed for report in reports) == [False, True]
    assert len(drain(llm)["a"].outputs[0].token_ids) == 10
    llm.wake_up()


def test_a_sleep_that_waits_is_given_up_by_a_resume(llm: LLM) -> None:
    loop = llm.engine._loop
    llm.engine.add_request("a", "x", LONG)
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(llm.sleep, 0, mode="wait")
        assert wait_until(lambda: llm.sleep_status().state == "draining")
        llm.resume()
        with pytest.raises(SleepRefused, match="given up"):
            asleep.result(240)
    assert loop is llm.engine._loop
    llm.engine.abort_request("a")
    assert llm.generate("x", SHORT)[0].finished


def test_weights_are_asked_for_one_by_one(either: LLM) -> None:
    asked: list[int] = []

    def weights(count: int, error: Exception | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(count):
            asked.append(number)
            yield f"w{number}", torch.full((300, 1000), number)
        if error is not None:
            raise error

    assert either.update_weights(weights(5)) == 5
    assert asked == list(range(5))
    lost = OSError("the disk is gone")
    with pytest.raises(OSError, match="disk") as raised:
        either.update_weights(weights(2, lost))
    assert raised.value is lost
    with pytest.raises(CorruptWeights, match="pairs of a checkpoint name and a tensor"):
        either.update_weights([("a", 5)])  # type: ignore[list-item]
    with pytest.raises(CorruptWeights, match="pairs of a checkpoint name and a tensor"):
        either.update_weights(5)  # type: ignore[arg-type]
    assert either.update_weights({"a": torch.ones(3)}.items()) == 1


def test_weights_may_be_declared_valid(either: LLM) -> None:
    before = results(either.generate("x", SHORT))
    either.declare_weights_valid()
    assert results(either.generate("x", SHORT)) == before


def test_an_answer_that_is_not_understood_ends_the_engine_and_no_thread_waits_for_it(
    make_llm: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(engine_process=True)
    monkeypatch.setitem(REPLIES, GetStats, int)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="broke off"):
        llm.stats()
    with pytest.raises(EngineDead, match="broke off"):
        llm.sleep_status()


def test_the_tensors_of_an_update_may_ask_how_the_engine_is_and_nothing_else(either: LLM) -> None:
    outputs: dict[str, Any] = {}

    def steps() -> None:
        for _ in range(20):  # Those that have outputs, which came before the update, are not refused.
            outputs.update({output.request_id: output for output in either.engine.step()})

    refused: list[Callable[[], object]] = [
        lambda: either.sleep(0),
        lambda: either.sleep(0, mode="wait"),
        lambda: either.pause(),
        lambda: either.resume(),
        lambda: either.wake_up(),
        lambda: either.update_weights([]),
        lambda: either.reload_weights(),
        lambda: either.generate("x", SHORT),
        lambda: either.embed("x"),
        steps,
    ]
    either.engine.add_request("a", "x", SHORT)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        for ask in refused:
            with pytest.raises(MemoryBusy):
                ask()
        assert either.sleep_status().weights_valid
        assert either.stats().steps >= 0
        yield "b", torch.ones(2)

    assert either.update_weights(weights()) == 2
    outputs |= drain(either)
    assert len(outputs["a"].outputs[0].token_ids) == 10


@pytest.mark.parametrize("settings", [{}, {"engine_process": True}], ids=["inline", "process"])
def test_an_update_whose_tensors_shut_the_engine_down_ends_with_it(
    settings: dict[str, Any], make_llm: Make, nothing_left: None
) -> None:
    llm, asked = make_llm(1, **settings), list[int]()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(9):
            asked.append(number)
            if number == 2:
                llm.shutdown()
            yield f"w{number}", torch.ones(3)

    start = time.monotonic()
    with pytest.raises(EngineDead, match="shut down"):
        llm.update_weights(weights())
    assert time.monotonic() - start < 9, "an engine that is told to end is not waited for until it is killed"
    assert asked == [0, 1, 2]
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("x")


def test_an_interrupt_while_it_waits_gives_up_the_sleep(llm: LLM) -> None:
    llm.engine.add_request("a", "x", LONG)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.sleep(0, mode="wait")
    finally:
        signal.signal(signal.SIGINT, before)
    assert wait_until(lambda: llm.sleep_status().state == "running")
    llm.engine.abort_request("a")
    assert llm.generate("x", SHORT)[0].finished


def test_errors_of_the_start_are_those_of_an_engine_in_this_process(
    make_llm: Make, inline: LLM, nothing_left: None
) -> None:
    with pytest.raises(BackendNotFound, match="abacus") as raised:
        make_llm(engine_process=True, backend="abacus")
    with pytest.raises(BackendNotFound) as expected:
        make_llm(backend="abacus")
    assert str(raised.value) == str(expected.value)


def test_a_full_inbox_and_a_kill_in_a_step_are_one_typed_error_each(
    make_llm: Make, inline: LLM, nothing_left: None
) -> None:
    llm = make_llm(1, seconds=0.02, engine_process=True, max_commands=2)
    expected = results(inline.generate("x", SHORT))

    def one(_: int) -> Any:
        try:
            return results(llm.generate("x", SHORT))
        except InboxFull as error:
            return error

    found: list[Any] = []
    with ThreadPoolExecutor(8) as pool:
        while not any(isinstance(one, InboxFull) for one in found):  # until threads come together
            found += pool.map(one, range(16))
    assert all(one == expected for one in found if not isinstance(one, InboxFull))

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(llm.generate, "x", LONG)]
        assert wait_until(lambda: llm.engine.get_num_unfinished_requests() == 1)
        running.append(pool.submit(llm.sleep, 0, mode="wait"))
        time.sleep(0.1)
        os.kill(pid_of(llm), signal.SIGKILL)
        for waiter in running:
            with pytest.raises(EngineDead, match="SIGKILL"):
                waiter.result(240)
    for call in (lambda: llm.generate("x"), lambda: llm.sleep(0), llm.wake_up, llm.engine.step, llm.stats):
        with pytest.raises(EngineDead):
            call()
    llm.engine.abort_request("offline-0")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("x")


def test_commands_are_refused_when_the_last_events_of_a_process_that_ended_have_come(
    device: str, make_llm: Make, nothing_left: None
) -> None:
    make_llm(0).shutdown()
    arrived: list[Event] = []
    held, go = threading.Event(), threading.Event()

    def deliver(events: list[Event]) -> None:
        arrived.extend(events)
        if not held.is_set():
            held.set()
            assert go.wait(60)

    loop = ProcessLoop(EngineConfig("demo", backend=device, num_device_blocks=512, swap_space=0), deliver)
    try:
        loop.submit(Generate(1, [5, 6, 7], (SequenceSampling(-1, (), 0),), max_tokens=2))
        assert held.wait(60)
        time.sleep(0.5)  # in which its steps are done
        loop.kill()
        assert wait_until(lambda: is_gone(loop.pid))
        time.sleep(0.5)  # in which its end is noticed
        refused = loop.submit(CheckStep())
        assert not refused.done()
        go.set()
        with pytest.raises(EngineDead):
            refused.result(60)
        assert [one.reason for event in arrived if isinstance(event, StepDone) for one in event.ended] == [
            FinishReason.LENGTH
        ]
        with pytest.raises(EngineDead):
            loop.submit(CheckStep())
    finally:
        go.set()
        loop.shutdown()


PROGRAM = """
    import json, os, sys
    sys.path[:0] = {paths!r}
    from hardpoint import LLM, SamplingParams
    llm = LLM("demo", backend={device!r}, num_device_blocks=512, swap_space=0, engine_process=True, executor="multi_process")
    print(json.dumps(llm.engine._loop.pid), flush=True)
    llm.generate("x", SamplingParams(max_tokens=4000, ignore_eos=True))
"""


def test_an_engine_ends_with_its_client_and_is_not_interrupted_with_it(make_llm: Make, device: str) -> None:
    make_llm(1, seconds=0.02).shutdown()
    program = dedent(PROGRAM).format(paths=sys.path, device=device)
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, process_group=0)
    assert client.stdout is not None
    engine = json.loads(client.stdout.readline())
    ranks = children(engine)
    assert len(ranks) == 1
    assert os.getpgid(engine) != os.getpgid(client.pid), "Ctrl-C goes to the client's group"
    os.kill(engine, signal.SIGINT)
    time.sleep(0.2)
    assert not is_gone(engine)
    os.kill(client.pid, signal.SIGKILL)
    client.wait(240)
    client.stdout.close()
    for pid in (engine, *ranks):
        assert wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


def test_a_kill_while_it_is_idle_is_known_to_the_next_command(llm: LLM, make_llm: Make) -> None:
    """The last test here: it ends the module's engine."""
    os.kill(pid_of(llm), signal.SIGKILL)
    assert wait_until(lambda: is_gone(pid_of(llm)))
    with pytest.raises(EngineDead, match="SIGKILL"):
        ask_until_it_fails(llm)
    with pytest.raises(EngineDead, match="SIGKILL"):
        llm.generate("x")
    llm.shutdown()
    assert make_llm(1).generate("x", SHORT)[0].finished
