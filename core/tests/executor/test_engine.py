"""The engine's core over ranks: what it asks of them, and what it makes of their failures."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from hardpoint.engine.commands import Added, Finish, Generate, GetStats, ShutDown, Sleep, StepDone, UpdateWeights, Wake
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.core import EngineCore
from hardpoint.engine.sleep import EngineState, SleepRequest
from hardpoint.executor import InProcessExecutor, RankLimits, RemoteExecutor
from hardpoint.interfaces import SequenceSampling
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, EngineDead, RankFailed, WorkerError
from tests.leaks import Belongings

Make = Callable[..., EngineCore]


@pytest.fixture
def make_core(fake: ModuleType) -> Iterator[Make]:
    made: list[EngineCore] = []

    def make(*orders: dict[str, Any], **settings: Any) -> EngineCore:
        made.append(EngineCore(EngineConfig(json.dumps(orders), backend="fakeranks", **settings)))
        return made[-1]

    yield make
    for core in made:
        core.shutdown()


_keys = itertools.count()


def add(core: EngineCore, tokens: int = 5) -> int:
    key = next(_keys)
    core.execute(Generate(key, list(range(tokens)), (SequenceSampling(-1, (), 0),), max_tokens=20))
    (added,) = core.take_events()
    assert added == Added(key, added.first_seq_id)
    return added.first_seq_id


def step(core: EngineCore) -> StepDone:
    """Go one step on and return what it brought; raises what it failed with."""
    core.advance()
    (event,) = core.take_events()
    if not isinstance(event, StepDone):
        raise event.error
    return event


def test_one_rank_runs_in_this_process_unless_it_is_asked_for(make_core: Make) -> None:
    assert isinstance(make_core().executor, InProcessExecutor)
    apart = make_core(executor="multi_process")
    assert isinstance(apart.executor, RemoteExecutor)
    add(apart)
    assert len(step(apart).token_ids) == 1


def test_the_rank_with_the_least_room_decides_and_sizes_add_up(make_core: Make) -> None:
    core = make_core(tensor_parallel_size=2)
    block = 2 * 2 * 16 * 2 * 8 * 4
    least = (int((1 << 30) * 0.4) - (1 << 20) - (1 << 20)) // block
    assert core.info.num_device_blocks == least
    assert core.info.kv_bytes == 2 * least * block
    assert core.info.weight_bytes == 2 << 20
    assert (core.info.num_ranks, core.info.tensor_parallel_size, core.info.pipeline_parallel_size) == (2, 2, 1)


@pytest.mark.parametrize(
    ("order", "text"),
    [({"does": "fail_weights"}, "no weights"), ({"does": "fail_output", "rank": 0}, "OutputFailed: rank 0: no token")],
    ids=["all alike", "the driver's output"],
)
def test_a_step_that_leaves_ranks_in_step_ends_its_sequences_alone(
    order: dict[str, Any], text: str, make_core: Make
) -> None:
    core = make_core({"call": "collect", **order}, tensor_parallel_size=2)
    lost = add(core)
    with pytest.raises(WorkerError, match=text):
        step(core)
    assert core.lifecycle.state is EngineState.RUNNING
    other = add(core)
    assert other != lost
    assert step(core).seq_ids.tolist() == [other]


def test_sequences_that_ended_before_a_failed_step_are_forgotten_with_the_next(
    make_core: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    seen: list[tuple[int, ...]] = []
    submit = core.executor.submit

    def failing_once(step: Any) -> Any:
        seen.append(step.finished_seq_ids)
        if len(seen) == 1:
            raise RuntimeError("before the worker looked at it")
        return submit(step)

    monkeypatch.setattr(core.executor, "submit", failing_once)
    ended = [add(core), add(core)]
    core.execute(Finish(tuple(ended)))
    add(core)
    with pytest.raises(WorkerError):
        step(core)
    core.execute(Finish((add(core),)))
    add(core)
    step(core)
    step(core)
    assert [len(ids) for ids in seen] == [2, 4, 0]
    assert seen[1][:2] == seen[0] == tuple(ended)


def test_a_gone_rank_is_a_dead_engine(make_core: Make) -> None:
    orders = {"call": "collect", "does": "kill", "rank": 1, "after": 1}
    core = make_core(orders, pipeline_parallel_size=2)
    add(core)
    step(core)
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 failed"):
        step(core)
    assert time.monotonic() - start < 45
    assert not core.scheduler.has_unfinished()
    assert core.lifecycle.death is not None
    assert core.lifecycle.state is EngineState.FAILED
    with pytest.raises(EngineDead, match="rank 1 failed"):
        step(core)
    with pytest.raises(EngineDead, match="Make a new engine"):
        core.lifecycle.check_admission(0, 5)
    core.shutdown()
    core.shutdown()


@pytest.mark.parametrize(("call", "after"), [("begin", 1), ("commit", 1), ("status", 0), ("status", 1)])
def test_a_rank_that_is_gone_in_a_wake_is_named_with_its_last_words(call: str, after: int, make_core: Make) -> None:
    """By the wake itself, whatever it was doing, and by everything after it."""
    after += 2 * (call == "status")  # of the sleep
    core = make_core({"call": call, "does": "exit", "rank": 1, "after": after}, tensor_parallel_size=2)
    core.execute(Sleep(SleepRequest()))
    wake = Wake()
    for attempt in (lambda: core.execute(wake), lambda: core.execute(wake), lambda: add(core)):
        with pytest.raises(RankFailed) as raised:
            attempt()
        assert (raised.value.rank, raised.value.ended) == (1, "its process ended with exit code 3")
        assert "the last words of this rank" in raised.value.output


@pytest.mark.parametrize("settings", [{}, {"executor": "multi_process"}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("then", ["goes on", "ends", "raises"])
def test_an_update_whose_tensors_shut_the_engine_down_ends_with_it(
    settings: dict[str, Any], then: str, make_core: Make
) -> None:
    before = Belongings.now()
    core, asked = make_core(**settings), list[int]()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(9):
            asked.append(number)
            if number == 2:
                core.execute(ShutDown())
                with pytest.raises(EngineDead, match="shut down"):
                    core.execute(GetStats())
                if then == "raises":
                    raise OSError("the trainer is gone")
                if then == "ends":
                    return
            yield f"w{number}", torch.ones(70_000)

    with pytest.raises(EngineDead, match="the engine was shut down"):
        core.execute(UpdateWeights(weights()))
    assert asked == [0, 1, 2]
    assert core.lifecycle.state is EngineState.FAILED
    with pytest.raises(EngineDead, match="shut down"):
        add(core)
    assert Belongings.now().new_since(before) == []


@pytest.mark.parametrize("call", ["load", "profile", "initialize_kv", "warm_up"])
def test_ranks_that_cannot_start_leave_nothing(call: str, make_core: Make) -> None:
    before = Belongings.now()
    with pytest.raises(Exception, match="fakeMalloc") as raised:
        make_core({"call": call, "does": "fail"}, executor="multi_process")
    assert raised.type.__name__ == "DriverError"
    del raised
    assert Belongings.now().new_since(before) == []


def test_sizes_that_the_backend_does_not_claim_are_refused_with_reasons(make_core: Make) -> None:
    before = Belongings.now()
    with pytest.raises(CapabilityRefused) as raised:
        make_core(tensor_parallel_size=3)
    assert raised.value.reasons == ("3 tensor-parallel ranks are not supported (supported: 1, 2)",)
    with pytest.raises(ConfigError, match="4 ranks need 4 devices"):
        make_core(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert Belongings.now().new_since(before) == []


def test_ray_where_it_is_not_installed_is_refused_with_what_to_do(
    make_core: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray cannot be imported.*pip install 'hardpoint\[ray\]'"):
        make_core(tensor_parallel_size=2, executor="ray")


def test_limits_of_the_configuration_hold(make_core: Make) -> None:
    core = make_core({"call": "collect", "does": "hang"}, executor="multi_process", rank_limits={"step": 0.5})
    add(core)
    with pytest.raises(RankFailed, match=r"it has not answered 'step' within 0\.5 s"):
        step(core)
    assert EngineConfig("m", rank_limits=RankLimits(step=2)).rank_limits == RankLimits(step=2)
