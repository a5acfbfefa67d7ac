"""Several engines behind one interface, over a device in simulated time: as one engine, for requests and for everything else."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.engine.commands import (
    CheckStep,
    Command,
    DeclareWeightsValid,
    Generate,
    GetStatus,
    Pause,
    ReloadWeights,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.data_parallel import DataParallelLoop, engine_configs
from hardpoint.engine.process_loop import ProcessLoop
from hardpoint.engine.sleep import SleepMode, SleepRequest
from hardpoint.interfaces.errors import (
    BackendNotFound,
    CapabilityRefused,
    ConfigError,
    DrainTimeout,
    EngineAsleep,
    EngineDead,
    InboxFull,
    MemoryBusy,
    SleepRefused,
    UnknownTag,
    WeightsMissing,
)
from tests.leaks import Belongings

Make = Callable[..., LLM]

PROMPTS = ["The capital of France is", "Once upon a time", "one two three", "Dear Sir"] * 4
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True, seed=3),
    SamplingParams(max_tokens=12, n=3, seed=5),
    SamplingParams(max_tokens=25, stop=["ing", "er"], ignore_eos=True, seed=4),
    SamplingParams(max_tokens=9, n=1, best_of=2, logprobs=0, ignore_eos=True, seed=9, prompt_logprobs=0),
] * 4
SHORT = SamplingParams(max_tokens=10, seed=2, ignore_eos=True)
WAIT = Pause(SleepMode.WAIT)


@pytest.fixture(scope="module")
def llm(make_shared_llm: Make) -> LLM:
    return make_shared_llm(1, seconds=0.001, num_device_blocks=200, data_parallel_size=2)


@pytest.fixture(scope="module")
def inline(make_shared_llm: Make) -> LLM:
    return make_shared_llm(1, num_device_blocks=200)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[int]:
    """Return to which of the engines requests go."""
    engines: list[int] = []
    submit = ProcessLoop.submit

    def noted(loop: ProcessLoop, command: Any) -> Any:
        if isinstance(command, Generate):
            engines.append(loop_of(llm)._engines.index(loop))
        return submit(loop, command)

    monkeypatch.setattr(ProcessLoop, "submit", noted)
    return engines


def loop_of(llm: LLM) -> DataParallelLoop:
    loop = llm.engine._loop
    assert isinstance(loop, DataParallelLoop)
    return loop


def results(outputs: Any) -> Any:
    return [[(c.index, c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def fail_on(engine: int, kind: type, error: Exception, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Let a command fail on one of the engines."""
    loop, submit = loop_of(llm)._engines[engine], ProcessLoop.submit

    def failing(one: ProcessLoop, command: Any) -> Any:
        if one is not loop or not isinstance(command, kind):
            return submit(one, command)
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    monkeypatch.setattr(ProcessLoop, "submit", failing)


def states(llm: LLM) -> list[str]:
    """Return where each of the engines stands."""
    return [one.call(GetStatus()).state.value for one in loop_of(llm)._engines]


@contextmanager
def waiting(llm: LLM) -> Iterator[Future[Any]]:
    """Let a sleep wait for the request of one engine, while the other has none and has paused; afterwards the engines run again."""
    llm.engine.add_request("long", "x", SamplingParams(max_tokens=4000, ignore_eos=True))
    answer = loop_of(llm).submit(WAIT)
    while sorted(states(llm)) != ["draining", "sleeping"]:
        assert not answer.done()
        time.sleep(0.01)
    yield answer
    llm.engine.abort_request("long")
    answer.exception(60)
    llm.wake_up()


def test_outputs_are_those_of_one_engine_and_all_engines_have_a_part(llm: LLM, inline: LLM, sent: list[int]) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert results(outputs) == results(inline.generate(PROMPTS, PARAMS))
    assert [one.prompt_logprobs is not None for one in outputs] == [p.prompt_logprobs is not None for p in PARAMS]
    assert 6 <= sum(sent) <= 10
    assert len(sent) == 16
    vectors = [one.embed([{"prompt_token_ids": [7] * n} for n in (3, 50, 9)]) for one in (llm, inline)]
    assert [list(o.outputs.embedding) for o in vectors[0]] == [list(o.outputs.embedding) for o in vectors[1]]
    # What has ended is not counted as load any more.
    assert set(loop_of(llm)._loads.values()) == {0}
    assert llm.info.data_parallel_size == 2
    assert llm.info.num_device_blocks == 400


def test_a_prompt_goes_where_its_beginning_is_cached_until_that_engine_is_much_busier(
    llm: LLM, sent: list[int]
) -> None:
    llm.reset_prefix_cache()
    long = {"prompt_token_ids": list(range(100, 180))}
    other = {"prompt_token_ids": list(range(300, 380))}
    for prompt in (long, other, long, other, long):
        llm.generate(prompt, SHORT)
    assert len(set(sent[0::2])) == 1
    hits = llm.stats().prefix_hits
    assert llm.generate(long, SHORT)[0].num_cached_tokens >= 64
    assert llm.stats().prefix_hits > hits
    sent.clear()
    llm.generate([long] * 30, SHORT)
    assert 10 <= sum(sent) <= 20


def test_aborted_requests_are_no_load(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3000, n=2, ignore_eos=True)
    for number in range(6):
        llm.engine.add_request(str(number), PROMPTS[number], params)
    assert sum(loop_of(llm)._loads.values()) == 6
    llm.engine.step()
    llm.engine.abort_request(map(str, range(6)))
    assert sum(loop_of(llm)._loads.values()) == 0
    assert llm.generate("a", SHORT)[0].finished


def test_engines_with_unlike_weights_answer_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_on(0, ReloadWeights, ConfigError("no"), patch, llm)
        with pytest.raises(ConfigError, match="no"):
            llm.reload_weights()
    with pytest.raises(WeightsMissing, match="unlike weights"):
        llm.generate("a", SHORT)
    llm.reload_weights()
    assert llm.generate("a", SHORT)[0].finished


@pytest.mark.parametrize(
    "command",
    [
        Wake(),
        Sleep(SleepRequest(level=0)),
        Pause(),
        WAIT,
        ReloadWeights(),
        UpdateWeights([]),
        DeclareWeightsValid(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_while_a_sleep_waits_for_requests_nothing_else_changes_memory(llm: LLM, command: Command) -> None:
    loop = loop_of(llm)
    with waiting(llm) as answer:
        before = states(llm)
        with pytest.raises(MemoryBusy, match="cannot be changed from within a sleep or wake: the engine is draining"):
            loop.call(command)
        assert states(llm) == before
        assert llm.sleep_status().state == "draining"
        assert not llm.is_sleeping()
        assert loop.call(CheckStep())
        llm.engine.abort_request("long")
        assert answer.result(60).changed
        assert states(llm) == ["sleeping"] * 2
    assert all(one.finished for one in llm.generate(PROMPTS, SHORT))


def test_while_a_sleep_waits_for_requests_new_ones_are_refused_by_all_engines_alike(llm: LLM) -> None:
    with waiting(llm):
        for number in range(4):
            with pytest.raises(EngineAsleep, match=r"the engine is draining. Call resume\(\) first"):
                llm.engine.add_request(str(number), PROMPTS[number], SHORT)
    assert set(loop_of(llm)._loads.values()) == {0}


def test_a_resume_gives_up_a_sleep_that_waits_on_all_engines(llm: LLM) -> None:
    with waiting(llm) as answer:
        llm.resume()
        # What follows finds them running.
        assert llm.pause().changed
        with pytest.raises(SleepRefused, match="the sleep that waited for requests was given up"):
            answer.result(60)
        assert states(llm) == ["sleeping"] * 2
        llm.resume()
        assert states(llm) == ["running"] * 2
    assert all(one.finished for one in llm.generate(PROMPTS, SHORT))


def test_a_sleep_that_waits_is_given_up_by_its_own_key_alone(llm: LLM) -> None:
    loop = loop_of(llm)
    with waiting(llm) as answer:
        loop.give_up(Pause(SleepMode.WAIT))
        loop.give_up(Sleep(SleepRequest(level=0, mode=SleepMode.WAIT)))
        assert llm.sleep_status().state == "draining"
        loop.give_up(WAIT)
        with pytest.raises(SleepRefused, match="given up"):
            answer.result(60)
        assert states(llm) == ["running"] * 2


def test_a_resume_right_after_a_sleep_that_waits_ends_it_on_all_engines(llm: LLM) -> None:
    loop = loop_of(llm)
    for number in range(20):
        llm.engine.add_request(str(number), "x", SamplingParams(max_tokens=1 + number % 3, ignore_eos=True))
        answer = loop.submit(WAIT)
        time.sleep(number * 0.0005)
        loop.call(Resume())
        # It was given up, or was done before.
        assert isinstance(answer.exception(60), SleepRefused | None)
        assert states(llm) == ["running"] * 2
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


def test_a_sleep_that_has_waited_too_long_ends_it_on_all_engines(llm: LLM) -> None:
    llm.engine.add_request("long", "x", SamplingParams(max_tokens=4000, ignore_eos=True))
    with pytest.raises(DrainTimeout, match="1 in progress"):
        llm.pause("wait", drain_timeout=0.05)
    assert states(llm) == ["running"] * 2
    llm.engine.abort_request("long")


def test_a_sleep_that_is_not_possible_is_refused_before_it_waits(llm: LLM) -> None:
    llm.engine.add_request("long", "x", SamplingParams(max_tokens=4000, ignore_eos=True))
    with pytest.raises((UnknownTag, CapabilityRefused)):
        llm.sleep(1, mode="wait", tags=["nothing"])
    assert states(llm) == ["running"] * 2
    assert llm.engine.has_unfinished_requests()
    llm.engine.abort_request("long")


def test_a_sleep_that_one_engine_has_no_room_for_is_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    second, submit = loop_of(llm)._engines[1], ProcessLoop.submit

    def full(loop: ProcessLoop, command: Any) -> Any:
        if loop is second and isinstance(command, Sleep):
            raise InboxFull("no room")
        return submit(loop, command)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessLoop, "submit", full)
        with pytest.raises(InboxFull, match="no room"):
            llm.sleep(0)
    assert states(llm) == ["running"] * 2


@pytest.mark.parametrize("ended", ["draining", "sleeping"])
def test_an_engine_that_dies_ends_a_sleep_that_waits(make_llm: Make, ended: str) -> None:
    llm = make_llm(1, seconds=0.001, num_device_blocks=200, data_parallel_size=2, skip_tokenizer_init=True)
    llm.engine.add_request("long", [1, 2], SamplingParams(max_tokens=4000, ignore_eos=True))
    answer = loop_of(llm).submit(WAIT)
    while sorted(now := states(llm)) != ["draining", "sleeping"]:
        assert not answer.done()
        time.sleep(0.01)
    os.kill(loop_of(llm).pids[now.index(ended)], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"has ended.*SIGKILL"):
        answer.result(60)
    with pytest.raises(EngineDead, match="has ended"):
        llm.stats()


def test_streams_run_side_by_side_and_the_death_of_one_engine_is_that_of_all(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARDPOINT_SIMULATED_STEP", "0.001")

    async def run() -> None:
        async with AsyncLLM("demo", backend=device, num_device_blocks=200, data_parallel_size=2) as engine:

            async def one(text: str) -> int:
                return [len(output.outputs[0].token_ids) async for output in engine.generate(text, SHORT)][-1]

            assert await asyncio.gather(*map(one, PROMPTS[:8])) == [10] * 8
            # Those that are cancelled before an engine has taken them are aborted all the same.
            endless = SamplingParams(max_tokens=4000, ignore_eos=True)
            cancelled = [asyncio.ensure_future(anext(engine.generate("a", endless))) for _ in range(8)]
            while len(engine._requests) < len(cancelled):
                await asyncio.sleep(0)
            for task in cancelled:
                task.cancel()
            await asyncio.gather(*cancelled, return_exceptions=True)
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            loop = engine._loop
            assert isinstance(loop, DataParallelLoop)
            long = engine.generate("a", SamplingParams(max_tokens=4000, ignore_eos=True))
            await anext(long)
            os.kill(loop.pids[1], signal.SIGKILL)
            assert "engine 1 of 2 has ended" in str(await engine.died)
            with pytest.raises(EngineDead, match="engine 1 of 2 has ended"):
                async for _ in long:
                    pass
            with pytest.raises(EngineDead, match="engine 1 of 2 has ended"):
                await engine.stats()

    asyncio.run(run())


def test_engines_end_with_the_last_reference_to_them(device: str) -> None:
    before = Belongings.now()
    llm = LLM("demo", backend=device, num_device_blocks=50, data_parallel_size=2, skip_tokenizer_init=True)
    assert llm.generate([[1, 2]], SHORT)[0].finished
    del llm
    gc.collect()
    assert Belongings.now().new_since(before) == []


def test_what_cannot_be_is_one_typed_error(make_llm: Make) -> None:
    with pytest.raises(BackendNotFound):
        make_llm(data_parallel_size=2, backend="abacus")


def test_engines_on_accelerators_have_devices_of_their_own_and_those_on_the_host_share_it() -> None:
    config = EngineConfig("demo", backend="cpu", data_parallel_size=2, threads=5)
    assert [(one.device, one.threads, one.engine_process) for one in engine_configs(config)] == [(0, 2, True)] * 2
