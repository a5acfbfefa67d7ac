"""The engine over captured steps: the tokens of eager steps in real schedules with preemption, prefixes, samples, sleep; its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conformance_tests.tests.recorded_graphs import (
    GraphedAttention,
    Hungry,
    MixedAttention,
    Recorder,
    StaleAttention,
    graphed,
)
from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import GRAPHS, DeviceAllocator, Platform
from hardpoint.interfaces.errors import KVCacheTooSmall, WorkerError
from hardpoint.plugins import Resolved
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import shape_for, tiny_model

SHARED = [5, 6, 7, 8] * 8
PROMPTS = [[*SHARED, index, index + 1] for index in range(6)] + [[9], [11, 12, 13]]


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, target: Target | None = None, **settings: Any) -> Iterator[LLM]:
    """An engine on the host whose decodes can be captured, with too few KV blocks for all prompts at once."""
    target = target or graphed()
    monkeypatch.setattr(
        "hardpoint.engine.startup.resolve_backend", lambda *args, **named: Resolved(target.descriptor, target.device)
    )
    Recorder.replays.clear()
    sizes = {"num_device_blocks": 26, "max_num_seqs": 6, "max_model_len": 160}
    llm = LLM(
        tiny_model(shape_for(target.claims)).path,
        dtype="float32",
        skip_tokenizer_init=True,
        use_fused_decoder=False,
        block_size=8,
        enable_sleep_mode=True,
        **sizes | settings,
    )
    try:
        yield llm
    finally:
        llm.shutdown()


def tokens(llm: LLM) -> list[list[list[int]]]:
    """Return the tokens of all prompts, before and after a sleep, greedy and sampled."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    served = llm.generate(prompts, greedy) + llm.generate(prompts[:3], sampled)
    llm.sleep(level=1)
    llm.wake_up()
    served += llm.generate(prompts[3:], greedy)
    return [[list(one.token_ids) for one in output.outputs] for output in served]


@pytest.fixture(scope="module")
def eager() -> list[list[list[int]]]:
    with pytest.MonkeyPatch.context() as monkeypatch, engine(monkeypatch, enforce_eager=True) as llm:
        found = tokens(llm)
        assert llm.stats().preemptions > 0
    assert not Recorder.replays
    return found


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tokens_are_those_of_eager_steps(eager: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with engine(monkeypatch, preemption_mode=mode) as llm:
        assert tokens(llm) == eager
        assert llm.stats().preemptions > 0
    assert set(Recorder.replays) == {1, 2, 4, 6}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("budget", [None, 16], ids=["whole", "chunks"])
def test_tokens_of_captured_steps_with_prompts_are_those_of_eager_steps(
    eager: Any, monkeypatch: pytest.MonkeyPatch, mode: str, budget: int | None
) -> None:
    budgets = {} if budget is None else {"max_num_batched_tokens": budget}
    with engine(monkeypatch, graphed(MixedAttention), preemption_mode=mode, **budgets) as llm:
        assert tokens(llm) == eager
        stats = llm.stats()
        assert stats.preemptions > 0
        assert len(Recorder.replays) > 0.9 * stats.steps
    assert set(Recorder.replays) >= {1, 2, 4, 6, -16}


def test_graphs_with_old_metadata_show_in_the_tokens(eager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, graphed(attention=StaleAttention)) as llm:
        try:
            found = tokens(llm)
        except WorkerError:  # what lies in blocks that nobody wrote may be no number
            return
        assert found != eager


TOTAL, STEP = 64 << 20, 8 << 20
"""Bytes of a small device, and what its largest step takes."""


def budgeted(runner: type = Hungry, attention: Any = GraphedAttention) -> Target:
    """A target whose device has its memory to itself, all of it in the allocator's books."""
    target = graphed(attention, runner)

    class Budgeted(Platform):
        def total_and_used(self, allocator: DeviceAllocator, ranks: int) -> tuple[int, int]:
            return TOTAL, allocator.stats().allocated

        def peak_growth(self, step: Callable[[], object], allocator: DeviceAllocator) -> int:
            step()
            return STEP

    return target.with_descriptor(platform=lambda: Budgeted)


@pytest.mark.parametrize(
    ("most", "graphs", "attention"),
    [(1, 1, GraphedAttention), (6, 4, GraphedAttention), (40, 7, GraphedAttention), (40, 13, MixedAttention)],
    ids=["1", "6", "40", "40-mixed"],
)
def test_kv_cache_leaves_room_for_the_graphs_that_follow_it(
    monkeypatch: pytest.MonkeyPatch, most: int, graphs: int, attention: Any
) -> None:
    """Of all sizes 4 are captured for the estimate, which is exact where all but the largest take the same."""
    sizes = {"num_device_blocks": None, "max_num_seqs": most, "memory_utilization": 0.5, "swap_space": 0}
    sizes["max_num_batched_tokens"] = 250
    with engine(monkeypatch, budgeted(), enforce_eager=True, **sizes) as llm:
        eager = llm.info.num_device_blocks
    with engine(monkeypatch, budgeted(attention=attention), **sizes) as llm:
        block = llm.info.kv_bytes // llm.info.num_device_blocks
        (status,) = llm.engine._loop.core.executor.call("status")
        held = status.memory
        taken = held.tags[GRAPHS].allocated
        assert taken > Hungry.first + (graphs - 1) * Hungry.other
        assert abs((eager - llm.info.num_device_blocks) * block - taken) < block
        logits = most * llm.engine._loop.core.model.vocab_size * 4
        assert 0 <= TOTAL // 2 - held.allocated - STEP < block + logits
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy)
    assert 1 in Recorder.replays


def test_graphs_that_leave_no_room_for_one_request_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(Hungry):
        first = TOTAL

    target = budgeted(Greedy)
    with (
        pytest.raises(KVCacheTooSmall, match=r"\d{8,} for captured steps"),
        engine(monkeypatch, target, num_device_blocks=None, memory_utilization=0.5),
    ):
        pass
