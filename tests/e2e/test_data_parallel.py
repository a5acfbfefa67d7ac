"""Several engines behind one interface, on the CPU backend: what needs real memory and a real model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, BeamSearchParams, LoRARequest, SamplingParams
from hardpoint.engine.commands import GetStatus, ListAdapters, LoadAdapter, ReloadWeights, Sleep, Wake
from hardpoint.engine.process_loop import ProcessLoop
from hardpoint.engine.sleep import SleepMode, SleepRequest
from hardpoint.interfaces.errors import (
    AdapterInUse,
    ConfigError,
    DrainTimeout,
    EngineAsleep,
    EngineDead,
    InvalidRequest,
    InvalidSamplingParams,
    MemoryBusy,
    RanksDiverged,
    SleepRefused,
)
from hardpoint_conformance.tiny_model import Model
from tests.adapter_folders import adapter_tensors, write_adapter

PROMPTS = [{"prompt_token_ids": [5, 9, 22, 7 + number]} for number in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_shallow: Callable[..., LLM]) -> Iterator[LLM]:
    with make_shallow(data_parallel_size=2) as made:
        yield made


def tokens(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS)]


def states(llm: LLM) -> list[str]:
    return [one.call(GetStatus()).state.value for one in llm.engine._loop._engines]  # type: ignore[attr-defined]


def sleep_that_waits(llm: LLM, level: int) -> Future[Any]:
    """Let a sleep wait for a request of one engine, while the other has none."""
    llm.engine.add_request("long", PROMPTS[0], LONG)
    answer = llm.engine._loop.submit(Sleep(SleepRequest(level=level, mode=SleepMode.WAIT)))  # type: ignore[arg-type]
    while sorted(states(llm)) != ["draining", "sleeping"]:
        assert not answer.done()
        time.sleep(0.005)
    return answer


@contextmanager
def failing(
    kind: type,
    llm: LLM,
    where: Callable[[Any], bool] = lambda command: True,
    error: Exception | None = None,
) -> Iterator[None]:
    """Let commands of a kind fail on the second engine, before it does anything."""
    second, submit = llm.engine._loop._engines[1], ProcessLoop.submit  # type: ignore[attr-defined]

    def fail(loop: ProcessLoop, command: Any) -> Any:
        if loop is not second or not isinstance(command, kind) or not where(command):
            return submit(loop, command)
        failed: Future[Any] = Future()
        failed.set_exception(error or ConfigError("no"))
        return failed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessLoop, "submit", fail)
        yield


def test_tokens_and_beams_are_those_of_one_engine(llm: LLM, make_shallow: Callable[..., LLM]) -> None:
    beams = BeamSearchParams(beam_width=3, max_tokens=5)
    with make_shallow() as one:
        assert tokens(llm) == tokens(one)
        found, expected = (some.beam_search(PROMPTS, beams) for some in (llm, one))
        assert [[s.tokens for s in o.sequences] for o in found] == [[s.tokens for s in o.sequences] for o in expected]
        assert llm.info.weight_bytes == 2 * one.info.weight_bytes
        assert llm.info.weight_formats == {format: 2 * count for format, count in one.info.weight_formats.items()}
    assert set(llm.engine._loop._loads.values()) == {0}  # type: ignore[attr-defined]
    with pytest.raises(InvalidSamplingParams, match="data_parallel_size=2"):
        llm.generate(PROMPTS, SamplingParams(logits_processors=[lambda tokens, logits: logits]))


def test_all_engines_sleep_and_wake_together(llm: LLM) -> None:
    expected = tokens(llm)
    steps: list[tuple[int, int]] = []
    report = llm.sleep(1, progress=lambda done, total: steps.append((done, total)))
    assert report.tags >= {"weights", "kv_cache"}
    assert report.freed == sum(one.unmapped for one in report.ranks)
    assert len(report.ranks) == 2
    assert steps[-1][0] == steps[-1][1] >= llm.info.weight_bytes
    status = llm.sleep_status()
    assert (status.level, status.memory["weights"].mapped) == (1, 0)
    with pytest.raises(EngineAsleep):
        llm.generate(PROMPTS, PARAMS)
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    llm.wake_up()
    assert tokens(llm) == expected
    llm.sleep(2)
    llm.wake_up()
    llm.reload_weights()
    assert tokens(llm) == expected
    assert llm.stats().sleep.sleeps == 2


def test_where_one_engine_does_not_sleep_none_does(llm: LLM) -> None:
    expected = tokens(llm)
    with failing(Sleep, llm):
        for level in (0, 1):
            with pytest.raises(ConfigError, match="no"):
                llm.sleep(level)
            assert not llm.is_sleeping()
            assert tokens(llm) == expected
        with pytest.raises(RanksDiverged, match="rank 1: ConfigError: no"):
            llm.sleep(2)
    llm.wake_up()
    llm.reload_weights()
    assert tokens(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_waits_takes_no_memory_before_all_requests_have_ended(llm: LLM, level: int) -> None:
    expected, sleeps = tokens(llm), llm.stats().sleep.sleeps
    answer = sleep_that_waits(llm, level)
    for command in (Wake(), ReloadWeights()):
        with pytest.raises(MemoryBusy, match="the engine is draining"):
            llm.engine._loop.call(command)
    status = llm.sleep_status()
    assert (status.state, status.level, status.asleep, status.weights_valid) == ("draining", None, frozenset(), True)
    llm.engine.abort_request("long")
    report = answer.result(60)
    assert (report.changed, report.level, report.mode, report.kept) == (True, level, "wait", 0)
    assert report.freed >= llm.info.weight_bytes
    assert llm.sleep_status().memory["weights"].mapped == 0
    assert llm.stats().sleep.sleeps == sleeps + 1
    llm.wake_up()
    if level == 2:
        llm.reload_weights()
    assert tokens(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_is_given_up_or_waited_too_long_leaves_all_engines_as_they_were(llm: LLM, level: int) -> None:
    expected, sleeps = tokens(llm), llm.stats().sleep.sleeps
    answer = sleep_that_waits(llm, level)
    llm.resume()
    with pytest.raises(SleepRefused, match="given up"):
        answer.result(60)
    assert states(llm) == ["running"] * 2
    llm.engine.abort_request("long")
    llm.engine.add_request("long", PROMPTS[0], LONG)
    with pytest.raises(DrainTimeout, match="1 in progress"):
        llm.sleep(level, mode="wait", drain_timeout=0.05)
    assert states(llm) == ["running"] * 2
    llm.engine.abort_request("long")
    assert tokens(llm) == expected
    assert llm.stats().sleep.sleeps == sleeps


def test_where_one_engine_does_not_sleep_after_its_requests_all_run_on(llm: LLM) -> None:
    expected = tokens(llm)
    with failing(Sleep, llm, lambda command: command.request.level > 0):
        answer = sleep_that_waits(llm, 1)
        llm.engine.abort_request("long")
        with pytest.raises(ConfigError, match="no"):
            answer.result(60)
    assert states(llm) == ["running"] * 2
    assert tokens(llm) == expected


def test_a_wake_that_one_engine_refuses_is_asked_for_again(llm: LLM) -> None:
    expected = tokens(llm)
    llm.sleep(1)
    with failing(Wake, llm), pytest.raises(RanksDiverged, match="cannot wake on every rank"):
        llm.wake_up()
    assert llm.is_sleeping()
    llm.wake_up()
    assert tokens(llm) == expected


def test_an_engine_that_dies_in_a_sleep_or_wake_is_told_as_its_death(llm: LLM) -> None:
    expected = tokens(llm)
    death = EngineDead("its process was ended")
    with failing(Sleep, llm, error=death), pytest.raises(EngineDead, match="its process was ended"):
        llm.sleep(2)
    llm.sleep(2)
    with failing(Wake, llm, error=death), pytest.raises(EngineDead, match="its process was ended"):
        llm.wake_up()
    # In truth none died.
    llm.wake_up()
    llm.reload_weights()
    assert tokens(llm) == expected


def test_weights_come_to_all_engines_and_are_read_once(llm: LLM, shallow: Model) -> None:
    expected = tokens(llm)
    read: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in shallow.weights.items():
            read.append(name)
            yield name, -tensor

    assert llm.update_weights(weights()) == len(read) == len(shallow.weights)
    changed = tokens(llm)
    assert changed != expected
    # Both engines have them.
    assert [tokens(llm) for _ in range(3)] == [changed] * 3

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        raise OverflowError("mine")
        yield

    with pytest.raises(OverflowError, match="mine"):
        llm.update_weights(failing())

    llm.reload_weights()
    assert tokens(llm) == expected


CALLS: dict[str, Callable[[LLM], object]] = {
    "stats": lambda llm: llm.stats(),
    "generate": tokens,
    "sleep": lambda llm: llm.sleep(1),
    "shutdown": lambda llm: llm.shutdown(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_the_engines_wait_for_cannot_call_them(llm: LLM, shallow: Model, call: Callable[[LLM], object]) -> None:
    """They run it in a thread of theirs, while the one that called them has their lock."""
    expected = tokens(llm)

    def asking() -> Iterator[tuple[str, torch.Tensor]]:
        call(llm)
        yield next(iter(shallow.weights.items()))

    with pytest.raises(InvalidRequest, match="Call them before or after it"):
        llm.update_weights(asking())
    llm.reload_weights()
    refused: list[str] = []

    def progress(done: int, total: int) -> None:
        try:
            call(llm)
        except InvalidRequest as error:
            refused.append(str(error))

    llm.sleep(1, progress=progress)
    llm.wake_up()
    assert refused
    assert all("Call them before or after it" in error for error in refused)
    assert tokens(llm) == expected


def test_a_profile_has_a_file_of_each_engine(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(str(tmp_path))
    tokens(llm)
    assert sorted(map(Path, llm.stop_profile())) == sorted(tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


def test_all_engines_have_the_same_adapters(make_shallow: Callable[..., LLM], shallow: Model, tmp_path: Path) -> None:
    """What one engine refuses, the other has not done: requests of a name would find unlike adapters, or none."""
    own = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", adapter_tensors(shallow.weights, 0))))
    with make_shallow(data_parallel_size=2, enable_lora=True) as llm:
        plain = tokens(llm)
        llm.load_adapter(own)

        def adapted() -> list[list[int]]:
            return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, lora_request="own")]

        expected = adapted()
        assert expected != plain
        # One engine has a request that goes through it.
        llm.engine.add_request("long", PROMPTS[0], LONG, lora_request="own")
        with pytest.raises(AdapterInUse, match="1 requests in progress"):
            llm.unload_adapter("own")
        assert adapted() == expected
        llm.engine.abort_request("long")
        llm.unload_adapter("own")
        with failing(LoadAdapter, llm), pytest.raises(ConfigError, match="no"):
            llm.load_adapter(own)
        assert [one.call(ListAdapters()) for one in llm.engine._loop._engines] == [[], []]  # type: ignore[attr-defined]
        llm.load_adapter(own)
        assert adapted() == expected
