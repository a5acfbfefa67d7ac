"""Ctrl-C at any moment of a call, on one rank and on two: afterwards the same tokens, or a refusal that a wake and a reload end."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import EngineAsleep, WeightsMissing
from hardpoint_conformance.tiny_model import Model, Shape, tiny_model
from tests.interrupts import InterruptAfter, InterruptAt

PROMPTS = [{"prompt_token_ids": [5, 9, 22, 7]}, {"prompt_token_ids": [100, 3, 3]}]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class Subject:
    """An engine, and what it gives when nothing happens."""

    def __init__(self, model: Model, ranks: int) -> None:
        self.ranks = ranks
        self.llm = LLM(
            model.path,
            backend="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=4,
            num_device_blocks=16,
            tensor_parallel_size=ranks,
        )
        self.weights = model.weights
        self.expected = self.tokens(), self.embedding()

    def tokens(self) -> list[list[int]]:
        outputs = self.llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def embedding(self) -> list[float]:
        vector: list[float] = self.llm.embed(PROMPTS[:1], use_tqdm=False)[0].outputs.embedding.tolist()
        return vector

    def check(self) -> None:
        """Serve what is right, or refuse and say so, and mend what was refused."""
        status = self.llm.sleep_status()
        try:
            assert self.tokens() == self.expected[0]
            assert not status.asleep
            assert status.weights_valid
        except EngineAsleep:
            assert status.asleep
            self._mend()
        except WeightsMissing:
            assert not status.weights_valid
            self._mend()
        assert self.embedding() == self.expected[1]
        assert self.llm.stats().blocks_used == 0

    def _mend(self) -> None:
        self.llm.wake_up()
        assert not self.llm.sleep_status().asleep
        if not self.llm.sleep_status().weights_valid:
            self.llm.reload_weights()
        assert self.tokens() == self.expected[0]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(tiny_model(Shape()), request.param)
    yield subject
    subject.llm.shutdown()


CALLS: dict[str, tuple[Callable[[Subject], Any], Callable[[Subject], Any], int]] = {
    "generate": (lambda one: None, lambda one: one.tokens(), 19),
    "embed": (lambda one: None, lambda one: one.embedding(), 11),
    "sleep at level 1": (lambda one: None, lambda one: one.llm.sleep(level=1), 7),
    "sleep at level 2": (lambda one: None, lambda one: one.llm.sleep(level=2), 7),
    "wake of level 1": (lambda one: one.llm.sleep(level=1), lambda one: one.llm.wake_up(), 7),
    "wake of level 2": (lambda one: one.llm.sleep(level=2), lambda one: one.llm.wake_up(), 7),
    "update": (lambda one: None, lambda one: one.llm.update_weights(one.weights.items()), 29),
    "reload": (lambda one: None, lambda one: one.llm.reload_weights(), 67),
}
"""What is done before, the call, and of how many lines one is tried."""

MORE = dict.fromkeys(CALLS, 9) | {"embed": 3, "reload": 1}
"""How many times as many lines it takes on two ranks."""


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_leaves_nothing_wrong_to_serve(subject: Subject, name: str) -> None:
    before, call, stride = CALLS[name]
    stride = stride if subject.ranks == 1 else MORE[name] * stride
    trials, finished = 0, False
    while not finished:
        before(subject)
        with InterruptAt(1 + trials * stride, returns=True) as interrupt:
            call(subject)
        subject.check()
        trials, finished = trials + 1, not interrupt.came
    assert trials > 30 // subject.ranks, "that many lines are run at least"


def test_an_interrupted_update_leaves_no_keys_and_values_of_the_weights_before(subject: Subject) -> None:
    """Ranks elsewhere may have made all of it, though nobody waited for their answers."""
    prompt = [{"prompt_token_ids": list(range(40))}]
    others = {name: weight.flip(0) for name, weight in subject.weights.items()}

    def tokens() -> list[int]:
        return list(subject.llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

    def change(weights: Any) -> list[int]:
        subject.llm.update_weights(weights.items())
        return tokens()

    right = [change(others), change(subject.weights)]
    assert right[0] != right[1]
    trials, finished = 0, False
    while not finished:
        with InterruptAt(1 + trials * (97 if subject.ranks == 1 else 211), returns=True) as interrupt:
            subject.llm.update_weights(others.items())
        with contextlib.suppress(WeightsMissing):
            assert tokens() in right
        assert change(subject.weights) == right[1]
        trials, finished = trials + 1, not interrupt.came
    assert trials > 5


@pytest.mark.parametrize("name", ["generate", "sleep at level 2"])
def test_a_signal_at_any_moment_leaves_nothing_wrong_to_serve(subject: Subject, name: str) -> None:
    before, call, _ = CALLS[name]
    rng, tries, came = random.Random(0), 0, 0
    start = time.perf_counter()
    call(subject)
    usual = time.perf_counter() - start  # of one that something held up; shorter ones below take its place
    subject.check()
    # On a busy machine many signals come after a call of a few milliseconds.
    while tries < 60 // subject.ranks or (came <= 10 // subject.ranks and tries < 600):
        before(subject)
        start = time.perf_counter()
        with InterruptAfter(rng.uniform(0, usual)) as interrupt:
            call(subject)
        if not interrupt.came:
            usual = min(usual, time.perf_counter() - start)
        subject.check()
        tries, came = tries + 1, came + interrupt.came
    assert came > 10 // subject.ranks


def sleeps_and_reports(subject: Subject, interrupt: Callable[..., None]) -> None:
    subject.llm.sleep(level=1, progress=interrupt)


def updates(subject: Subject, interrupt: Callable[..., None]) -> None:
    def weights() -> Iterator[Any]:
        items = iter(subject.weights.items())
        yield next(items)
        interrupt()

    subject.llm.update_weights(weights())


@pytest.mark.parametrize("call", [sleeps_and_reports, updates])
def test_what_a_caller_does_in_a_call_is_interrupted_at_once(
    subject: Subject, call: Callable[[Subject, Callable[..., None]], None]
) -> None:
    went_on = []

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(subject, interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not went_on
    subject.check()


def test_the_process_ends_cleanly_while_a_daemon_thread_generates() -> None:
    program = """
import threading
from hardpoint import LLM, SamplingParams
from hardpoint_conformance.tiny_model import Shape, tiny_model
llm = LLM(tiny_model(Shape()).path, backend="cpu", dtype="float32", skip_tokenizer_init=True, num_device_blocks=16, max_model_len=64)
params, begun = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True), threading.Event()

def generate():
    while True:
        llm.generate({"prompt_token_ids": [5, 9, 22]}, params, use_tqdm=False)
        begun.set()

threading.Thread(target=generate, daemon=True).start()
begun.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (0, "")
