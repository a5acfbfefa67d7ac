"""Several engines behind one interface, over a device in simulated time: as one engine, for requests and for everything else."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.engine.commands import Generate, ReloadWeights
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.data_parallel import DataParallelLoop, engine_configs
from hardpoint.engine.process_loop import ProcessLoop
from hardpoint.interfaces.errors import (
    BackendNotFound,
    ConfigError,
    EngineDead,
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


def test_streams_run_side_by_side_and_the_death_of_one_engine_is_that_of_all(device: str) -> None:
    async def run() -> None:
        async with AsyncLLM("demo", backend=device, num_device_blocks=200, data_parallel_size=2) as engine:

            async def one(text: str) -> int:
                return [len(output.outputs[0].token_ids) async for output in engine.generate(text, SHORT)][-1]

            assert await asyncio.gather(*map(one, PROMPTS[:8])) == [10] * 8
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
