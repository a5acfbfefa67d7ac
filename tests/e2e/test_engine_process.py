"""A model in a process of its own, with its rank in another one: the same tokens, sleeps that call back, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.tests.executor.helpers import is_gone
from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, EngineDead, MemoryBusy, ParticipantError
from hardpoint.models import open_model
from tests.leaks import Belongings
from tests.warm_processes import children_by

PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, logprobs=2),
]


@pytest.fixture(scope="module")
def llm(shallow_demo: str) -> Iterator[LLM]:
    before = Belongings.now()
    with children_by(subprocess.Popen):  # whose environment is looked at
        llm = LLM(
            shallow_demo,
            backend="cpu",
            dtype="float32",
            max_model_len=1024,
            num_device_blocks=256,
            engine_process=True,
            executor="multi_process",
        )
    yield llm
    llm.shutdown()
    assert Belongings.now().new_since(before) == []


class Witness:
    """Calls the engine from within its sleeps, and fails when it is told to."""

    name = "witness"

    def __init__(self, llm: LLM) -> None:
        self.told: list[tuple[str, Any]] = []
        self.fails: BaseException | None = None
        self._llm = llm

    def before_sleep(self, plan: Any) -> str:
        self.told.append(("sleep", threading.current_thread().name))
        assert self._llm.stats().steps > 0
        with pytest.raises(MemoryBusy):
            self._llm.wake_up()
        if self.fails is not None:
            raise self.fails
        return "nobody asks for this"

    def after_wake(self, tags: frozenset[str]) -> None:
        assert "weights" in tags
        self.told.append(("wake", threading.current_thread().name))

    def resident_bytes(self) -> int:
        return 17


def _tokens(llm: LLM) -> list[Any]:
    outputs = llm.generate(["The capital of France is"] * 2, PARAMS)
    return [[(list(c.token_ids), c.cumulative_logprob) for c in output.outputs] for output in outputs]


def test_tokens_are_those_of_an_engine_in_this_process(llm: LLM, make_engine: Any, shallow_demo: str) -> None:
    with make_engine(shallow_demo) as inline:
        assert _tokens(llm) == _tokens(inline)


def test_participants_and_callbacks_live_in_the_clients_process_and_may_call_the_engine(llm: LLM) -> None:
    witness = Witness(llm)
    llm.register_participant(witness)
    with pytest.raises(ConfigError, match="witness"):
        llm.register_participant(Witness(llm))
    expected = _tokens(llm)
    progress: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        progress.append((done, total))
        assert llm.sleep_status().state == "sleeping"

    report = llm.sleep(1, mode="keep", progress=note)
    assert report.residual["witness"] == 17
    assert progress[-1][0] == progress[-1][1] > 1 << 20
    assert llm.wake_up().changed
    assert witness.told == [("sleep", "MainThread"), ("wake", "MainThread")]

    witness.fails = KeyError("not now")
    with pytest.raises(ParticipantError, match="not now") as raised:
        llm.sleep()
    assert isinstance(raised.value.__cause__, KeyError)
    witness.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.sleep()
    witness.fails = None

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        llm.sleep(progress=stop)
    assert llm.sleep_status().state == "running"
    assert _tokens(llm) == expected


def test_threads_of_torch_wait_asleep_beside_those_of_the_kernels(llm: LLM) -> None:
    environment = Path(f"/proc/{llm.engine._loop.pid}/environ").read_bytes().split(b"\0")
    assert f"OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'passive')}".encode() in environment


def test_weights_are_replaced_one_by_one(llm: LLM, shallow_demo: str) -> None:
    expected = _tokens(llm)
    checkpoint = open_model(shallow_demo).checkpoint
    names = list(checkpoint.shapes())[:3]
    assert llm.update_weights((name, checkpoint.read(name)) for name in names) == 3
    assert _tokens(llm) == expected

    def asking() -> Iterator[Any]:
        for ask in (lambda: llm.sleep(1), lambda: _tokens(llm), lambda: llm.reload_weights()):
            with pytest.raises(MemoryBusy):
                ask()
        assert llm.sleep_status().weights_valid
        yield from ((name, checkpoint.read(name)) for name in names)

    assert llm.update_weights(asking()) == 3
    assert _tokens(llm) == expected
    with pytest.raises(CorruptWeights, match="nobody"):
        llm.update_weights([("nobody", checkpoint.read(names[0]))])
    assert _tokens(llm) == expected


def test_a_kill_in_a_sleep_is_one_typed_error_and_ends_its_ranks(llm: LLM) -> None:
    """The last test here: it ends the module's engine."""
    pid = llm.engine._loop.pid
    ranks = [
        int(rank) for task in Path(f"/proc/{pid}/task").iterdir() for rank in (task / "children").read_text().split()
    ]
    assert len(ranks) == 1

    def kill(done: int, total: int) -> None:
        os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineDead, match="SIGKILL"):
        llm.sleep(progress=kill)
    end = time.monotonic() + 120
    while not is_gone(ranks[0]):
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(EngineDead, match="SIGKILL"):
        llm.wake_up()
