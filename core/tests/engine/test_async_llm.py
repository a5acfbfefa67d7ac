"""The asynchronous client, over a device that computes in simulated time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardpoint import LLM, RequestOutput, SamplingParams
from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.commands import Generate
from hardpoint.engine.loops import Inbox
from hardpoint.engine.request_maker import unseeded
from hardpoint.engine.sleep import SleepReport
from hardpoint.interfaces.errors import (
    DrainTimeout,
    EngineAsleep,
    EngineDead,
    InboxFull,
    InvalidRequest,
    MemoryBusy,
    SleepRefused,
    WorkerError,
)
from hardpoint.sampling import RequestOutputKind

PARAMS = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)


@pytest.fixture
def run(make_llm: Callable[..., LLM], device: str) -> Callable[..., Any]:
    """Return what runs a coroutine with an asynchronous engine."""
    make_llm().shutdown()

    def with_engine(body: Any, **settings: Any) -> Any:
        async def whole() -> Any:
            llm = AsyncLLM("demo", backend=device, num_device_blocks=512, max_num_seqs=64, swap_space=0, **settings)
            try:
                return await asyncio.wait_for(body(llm), 60)
            finally:
                await asyncio.wait_for(llm.close(), 60)

        return asyncio.run(whole())

    return with_engine


@pytest.fixture
def slow_steps(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a request of 2,000 tokens take at least two seconds, so that it is not done before it is ended."""
    monkeypatch.setenv("HARDPOINT_SIMULATED_STEP", "0.001")


async def tokens(llm: AsyncLLM, prompt: str, params: SamplingParams = PARAMS) -> list[int]:
    outputs = [output async for output in llm.generate(prompt, params)]
    return list(outputs[-1].outputs[0].token_ids)


def test_requests_are_served_side_by_side_as_the_synchronous_client_does(
    run: Callable[..., Any], make_llm: Callable[..., LLM]
) -> None:
    prompts = ["x", "Dear Sir", "one two three"] * 4
    expected = [list(o.outputs[0].token_ids) for o in make_llm().generate(prompts, PARAMS)]

    async def body(llm: AsyncLLM) -> list[list[int]]:
        assert (await llm.embed("x")).finished
        return await asyncio.gather(*(tokens(llm, prompt) for prompt in prompts))

    assert run(body) == expected


def test_deltas_come_one_by_one_and_leaving_early_aborts(run: Callable[..., Any], slow_steps: None) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = PARAMS.clone(output_kind=RequestOutputKind.DELTA, max_tokens=2000)
        seen = 0
        stream = llm.generate("x", params)
        async for output in stream:
            seen += len(output.outputs[0].token_ids)
            if seen >= 5:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(tokens(llm, "y", params))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await llm.stats()).blocks_used == 0
        assert len(await tokens(llm, "x")) == 20

    run(body)


def test_many_words_become_tokens_in_another_thread(run: Callable[..., Any]) -> None:
    """The event loop serves all other requests meanwhile."""

    async def body(llm: AsyncLLM) -> None:
        words = PARAMS.clone(bad_words=[f"word {number}" for number in range(3000)])
        here, everywhere = time.thread_time(), time.process_time()
        async with llm.stream("x", words):
            here, everywhere = time.thread_time() - here, time.process_time() - everywhere
        assert here < everywhere / 3

    run(body)


@pytest.mark.parametrize("which", ["name", "all", "close"])
def test_a_request_that_is_still_being_made_is_found(run: Callable[..., Any], which: str) -> None:
    """Words become tokens in another thread before the engine hears of the request."""

    async def body(llm: AsyncLLM) -> None:
        async def last() -> RequestOutput:
            async for output in llm.generate("x", PARAMS.clone(bad_words=["some words"], max_tokens=40), "named"):
                found = output
            return found

        task = asyncio.create_task(last())
        await asyncio.sleep(0)
        if which == "close":
            await llm.close()
        else:
            llm.abort("named" if which == "name" else None)
        (text,) = (await task).outputs
        assert (len(text.token_ids), text.finish_reason) == ((40, "length") if which == "close" else (0, "abort"))

    run(body)


def test_requests_are_seeded_in_the_order_in_which_they_come(run: Callable[..., Any]) -> None:
    """One that is made in another thread has the seed that it would have without."""
    seeds = {}

    async def body(llm: AsyncLLM) -> None:
        made = llm._maker.generation

        def generation(*arguments: Any) -> Any:
            request, command = made(*arguments)
            seeds[request.request_id] = command.sampling[0].seed
            return request, command

        llm._maker.generation = generation  # type: ignore[method-assign]

        async def one(name: str, words: list[str]) -> None:
            async for _ in llm.generate("x", PARAMS.clone(seed=None, bad_words=words), name):
                pass

        await asyncio.gather(one("0", [f"word {number}" for number in range(300)]), one("1", ["word"]), one("2", []))

    run(body)
    assert seeds == {str(number): unseeded(0, number) for number in range(3)}


def test_an_id_can_be_used_again_once_its_request_has_ended(run: Callable[..., Any]) -> None:
    """Though whoever read the first one has not left it yet, or has not read its last output."""

    async def body(llm: AsyncLLM) -> None:
        for _ in range(3):
            async for output in llm.generate("x", PARAMS, "mine"):
                if output.finished:
                    break
        late = llm.generate("x", PARAMS, "mine")
        first = await anext(late)
        while (await llm.stats()).running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        again = asyncio.create_task(tokens_of(llm, "mine"))
        await asyncio.sleep(0)
        assert [first, *[output async for output in late]][-1].finished
        assert len(await again) == 20

    run(body)


@pytest.mark.parametrize("asleep", ["paused", "asleep", "queued"])
def test_an_engine_that_serves_nobody_can_be_closed(run: Callable[..., Any], slow_steps: None, asleep: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        if asleep == "queued":
            await llm.sleep(0)
        reading = asyncio.create_task(tokens(llm, "x", PARAMS.clone(max_tokens=2000)))
        while not (await llm.stats()).running + (await llm.stats()).waiting:
            await asyncio.sleep(0)
        if asleep != "queued":
            await (llm.pause() if asleep == "paused" else llm.sleep(level=0, mode="keep"))
        await llm.close()
        assert len(await reading) < 2000

    run(body, sleeping_requests="queue")


async def tokens_of(llm: AsyncLLM, request_id: str) -> list[int]:
    return [list(output.outputs[0].token_ids) async for output in llm.generate("x", PARAMS, request_id)][-1]


def test_a_request_is_aborted_by_its_id(run: Callable[..., Any], slow_steps: None) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate("x", PARAMS.clone(max_tokens=2000), "mine")
        await anext(stream)
        llm.abort("mine")
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
        assert (await llm.stats()).blocks_used == 0

    run(body)


@pytest.mark.parametrize("timeout", ["5", 0, -1.0, float("nan"), True])
def test_a_timeout_that_is_none_is_refused(run: Callable[..., Any], timeout: Any) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequest, match="seconds must be"):
            await anext(llm.generate("x", PARAMS, timeout=timeout))

    run(body)


async def check_two_sleeps_at_once(llm: AsyncLLM) -> None:
    task = asyncio.create_task(tokens(llm, "x", PARAMS.clone(max_tokens=2000)))
    while not (await llm.stats()).blocks_used:
        pass
    found = await asyncio.gather(*(llm.sleep(level=0, mode="wait") for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in found] == [SleepReport, MemoryBusy]
    assert len(await task) == 2000
    await llm.wake_up()
    assert len(await tokens(llm, "x")) == 20


def test_the_second_of_two_sleeps_at_once_is_refused(run: Callable[..., Any], slow_steps: None) -> None:
    run(check_two_sleeps_at_once)


async def until(holds: Callable[[], Any]) -> None:
    while not await holds():
        await asyncio.sleep(0)


async def drains(llm: AsyncLLM) -> bool:
    return (await llm.sleep_status()).state == "draining"


async def begun(llm: AsyncLLM, max_tokens: int) -> asyncio.Task[list[int]]:
    task = asyncio.create_task(tokens(llm, "x", PARAMS.clone(max_tokens=max_tokens)))
    await until(lambda: blocks_used(llm))
    return task


async def blocks_used(llm: AsyncLLM) -> int:
    return (await llm.stats()).blocks_used


async def are_waiting(llm: AsyncLLM, count: int) -> bool:
    return (await llm.stats()).waiting == count


def test_requests_that_come_while_a_sleep_waits_are_queued_for_the_wake(
    run: Callable[..., Any], slow_steps: None
) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = await begun(llm, 1500)
        sleeping = asyncio.create_task(llm.sleep(level=0, mode="wait"))
        await until(lambda: drains(llm))
        late = [asyncio.create_task(tokens(llm, prompt)) for prompt in ("x", "y", "z")]
        await until(lambda: are_waiting(llm, 3))
        with pytest.raises(EngineAsleep, match="3 requests are queued"):
            await tokens(llm, "x")
        late.pop().cancel()
        await until(lambda: are_waiting(llm, 2))
        embedding = asyncio.create_task(llm.embed("x"))
        report = await sleeping
        assert first.done()
        assert (report.changed, report.kept) == (True, 3)
        assert await are_waiting(llm, 3)
        with pytest.raises(EngineAsleep, match="3 requests are queued"):
            await tokens(llm, "x")
        await llm.wake_up()
        assert [len(each) for each in await asyncio.gather(*late)] == [20, 20]
        assert (await embedding).finished

    run(body, sleeping_requests="queue", max_queued_while_asleep=3)


@pytest.mark.parametrize("end", ["resume", "cancel", "timeout"])
def test_requests_that_come_while_a_sleep_waits_begin_where_it_does_not_come(
    end: str, run: Callable[..., Any], slow_steps: None
) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = await begun(llm, 2000)
        timeout = 0.2 if end == "timeout" else None
        sleeping = asyncio.create_task(llm.sleep(level=0, mode="wait", drain_timeout=timeout))
        await until(lambda: drains(llm))
        late = asyncio.create_task(tokens(llm, "y"))
        if end == "resume":
            await llm.resume()
        elif end == "cancel":
            sleeping.cancel()
        with pytest.raises((SleepRefused, asyncio.CancelledError, DrainTimeout)):
            await sleeping
        assert len(await late) == 20
        assert not first.done()
        first.cancel()

    run(body, sleeping_requests="queue")


def test_requests_that_come_while_a_sleep_waits_end_with_the_engine(run: Callable[..., Any], slow_steps: None) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = await begun(llm, 2000)
        sleeping = asyncio.create_task(llm.sleep(level=0, mode="wait"))
        await until(lambda: drains(llm))
        late = asyncio.create_task(tokens(llm, "y"))
        await until(lambda: are_waiting(llm, 1))
        llm.shutdown()
        for one in (first, sleeping, late):
            with pytest.raises(EngineDead):
                await one

    run(body, sleeping_requests="queue")


async def check_that_a_wait_can_be_cancelled(llm: AsyncLLM) -> None:
    first = await begun(llm, 2000)
    for asked in (llm.sleep(level=0, mode="wait"), llm.pause(mode="wait")):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 0.05)
        assert (await llm.sleep_status()).state == "running"
        assert len(await tokens(llm, "y")) == 20
    # One that the engine did not begin gives nothing up.
    waits = asyncio.create_task(llm.sleep(level=0, mode="wait"))
    await until(lambda: drains(llm))
    never = asyncio.create_task(llm.sleep(level=0, mode="wait"))
    never.cancel()
    with pytest.raises(asyncio.CancelledError):
        await never
    assert await drains(llm)
    # Nor does one that the engine refuses when nobody awaits it any more.
    refused = asyncio.create_task(llm.sleep(level=0, mode="wait"))
    await asyncio.sleep(0)
    refused.cancel()
    with pytest.raises((asyncio.CancelledError, MemoryBusy)):
        await refused
    assert await drains(llm)
    assert (await waits).changed
    assert len(await first) == 2000
    await llm.wake_up()


def test_a_sleep_or_pause_that_nobody_awaits_any_more_does_not_come(run: Callable[..., Any], slow_steps: None) -> None:
    run(check_that_a_wait_can_be_cancelled)


def test_sleep_waits_and_wake_goes_on(run: Callable[..., Any]) -> None:
    async def body(llm: AsyncLLM) -> None:
        task = asyncio.create_task(tokens(llm, "x"))
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        report = await llm.sleep(level=0, mode="wait")
        assert report.changed
        assert len(await task) == 20
        assert (await llm.sleep_status()).state == "sleeping"
        await llm.wake_up()
        assert len(await tokens(llm, "x")) == 20

    run(body)


def test_refusals_are_typed_and_a_closed_engine_says_so(run: Callable[..., Any]) -> None:
    kept: list[AsyncLLM] = []

    async def body(llm: AsyncLLM) -> None:
        kept.append(llm)
        with pytest.raises(InvalidRequest):
            await tokens(llm, "")
        await llm.close()
        for call in (tokens(llm, "x"), llm.stats(), llm.sleep(level=0)):
            with pytest.raises(EngineDead):
                await call

    run(body)


def test_a_full_inbox_is_an_error_and_nothing_else_is_lost(run: Callable[..., Any]) -> None:
    async def body(llm: AsyncLLM) -> None:
        results = await asyncio.gather(*(tokens(llm, "x") for _ in range(40)), return_exceptions=True)
        assert {type(r) for r in results} <= {list, InboxFull}
        assert all(len(r) == 20 for r in results if isinstance(r, list))
        assert len(await tokens(llm, "x")) == 20

    run(body, max_commands=1)


def test_what_the_inbox_refuses_takes_no_room_in_it(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def put(inbox: Inbox, command: object) -> Any:
        told.append(command)
        raise InboxFull("the engine's inbox is full")

    async def body(llm: AsyncLLM) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Inbox, "put", put)
            with pytest.raises(InboxFull):
                await tokens(llm, "x")
        assert [type(command) for command in told] == [Generate]
        assert len(await tokens(llm, "x")) == 20

    run(body)


async def check_a_client_that_stops_reading(llm: AsyncLLM) -> None:
    whole = await tokens(llm, "x")
    stream = llm.generate("x", PARAMS.clone(output_kind=RequestOutputKind.DELTA))
    outputs = [await anext(stream)]
    while len(await tokens(llm, "Dear Sir")) != 20:
        pass
    outputs += [output async for output in stream if not outputs[-1].finished]
    assert len(outputs) <= 2, "of twenty steps"
    assert [t for output in outputs for t in output.outputs[0].token_ids] == whole
    assert outputs[-1].finished


def test_a_client_that_stops_reading_is_given_one_output_of_all_that_came(run: Callable[..., Any]) -> None:
    run(check_a_client_that_stops_reading)


def test_everything_that_the_synchronous_client_can_do(run: Callable[..., Any]) -> None:
    async def body(llm: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "What is 2+2?"}]
        outputs = [output async for output in llm.chat(messages, PARAMS)]
        assert outputs[-1].prompt is not None
        assert "What is 2+2?" in outputs[-1].prompt
        assert len(outputs[-1].outputs[0].token_ids) == 20
        with pytest.raises(InvalidRequest):
            llm.chat(5)  # type: ignore[arg-type]
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.get_tokenizer() is not None
        assert await llm.update_weights([("a", torch.ones(2))]) == 1
        assert await llm.reload_weights() == 0
        await llm.declare_weights_valid()
        await llm.reset_prefix_cache()
        assert (await llm.pause()).changed
        assert await llm.is_sleeping()
        with pytest.raises(EngineAsleep):
            await tokens(llm, "x")
        await llm.resume()
        assert not await llm.is_sleeping()
        with pytest.raises(SleepRefused):
            await llm.pause("abruptly")
        assert len(await tokens(llm, "x")) == 20

    run(body)


def test_an_engine_in_a_process_is_cancelled_and_killed_like_one_in_a_thread(
    run: Callable[..., Any], make_llm: Callable[..., LLM]
) -> None:
    slow = make_llm(seconds=0.001)  # so that long requests are not done before they are ended
    expected = [list(o.outputs[0].token_ids) for o in slow.generate(["x", "Dear Sir"], PARAMS)]

    async def body(llm: AsyncLLM) -> None:
        assert await asyncio.gather(tokens(llm, "x"), tokens(llm, "Dear Sir")) == expected
        long = PARAMS.clone(max_tokens=3000)
        for seconds in (0, 0.02):
            task = asyncio.create_task(tokens(llm, "y", long))
            await asyncio.sleep(seconds)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await llm.stats()).blocks_used == 0
        await check_two_sleeps_at_once(llm)
        await check_that_a_wait_can_be_cancelled(llm)
        await check_a_client_that_stops_reading(llm)
        pid: int = llm._loop.pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)  # or it takes commands as fast as they come
        asked = asyncio.gather(*(tokens(llm, "x") for _ in range(20)), return_exceptions=True)
        await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        assert {type(r) for r in await asked} == {list, InboxFull}
        assert await llm.update_weights((f"w{n}", torch.ones(300, 1000)) for n in range(3)) == 3
        waiters = [asyncio.create_task(tokens(llm, prompt, long)) for prompt in ("x", "y")]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for waiter in waiters:
            with pytest.raises(EngineDead, match="SIGKILL"):
                await waiter
        with pytest.raises(EngineDead, match="SIGKILL"):
            await llm.stats()

    run(body, engine_process=True, max_commands=8)


def test_an_engine_is_a_context_manager(make_llm: Callable[..., LLM], device: str) -> None:
    make_llm().shutdown()

    async def body() -> AsyncLLM:
        async with AsyncLLM("demo", backend=device, num_device_blocks=512, max_num_seqs=64, swap_space=0) as llm:
            assert len(await tokens(llm, "x")) == PARAMS.max_tokens
        return llm

    async def whole() -> None:
        llm = await body()
        with pytest.raises(EngineDead):
            await tokens(llm, "x")

    asyncio.run(whole())


@pytest.mark.parametrize("depth", ["0", "2"])
def test_log_probabilities_of_prompts_whose_chunks_overlap(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, depth: str
) -> None:
    monkeypatch.setenv("HARDPOINT_SIMULATED_DEPTH", depth)
    prompts = ["one two three four five six seven " * length for length in (1, 9, 30)]
    params = SamplingParams(max_tokens=30, prompt_logprobs=0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    async def body(llm: AsyncLLM) -> None:
        async def check(prompt: str) -> None:
            (output,) = [output async for output in llm.generate(prompt, params)]
            assert output.prompt_logprobs is not None
            # This device says of each token what it is.
            told = [
                round(-1e3 * entry[token].logprob)
                for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            assert told == list(output.prompt_token_ids[1:])

        await asyncio.gather(*map(check, prompts))

    run(body, max_num_batched_tokens=64)


def test_a_worker_that_scores_no_prompts_fails_such_requests_alone(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARDPOINT_SIMULATED_NO_SCORES", "1")

    async def body(llm: AsyncLLM) -> None:
        other = asyncio.create_task(tokens(llm, "x"))
        with pytest.raises(WorkerError, match="no log probabilities of the prompt"):
            await tokens(llm, "one two", SamplingParams(prompt_logprobs=1, max_tokens=1))
        assert len(await other) == 20
        stats = await llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    run(body)
