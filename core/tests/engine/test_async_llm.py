"""The asynchronous client, over a device that computes in simulated time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.commands import Generate
from hardpoint.engine.loops import Inbox
from hardpoint.engine.sleep import SleepReport
from hardpoint.interfaces.errors import (
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
