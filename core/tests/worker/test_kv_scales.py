"""A worker whose KV cache is fp8: the checkpoint's scales hold in every step, over sleep and wake, and for every reload.

Run with the CPU's attention and its fused decoder, and where kernels are interpreted (`make test-triton`) with Triton's attention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.tests.kv_scale_models import SCALES, scale_checkpoint
from hardpoint.interfaces import KV_CACHE, WEIGHTS, DType, Policy, SleepPlan, WeightWrite
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Shape, tiny_model
from hardpoint_conformance.worker_bench import WorkerBench, running, sleep, wake

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
PLAIN = tiny_model(Shape(head_dim=16, layers=3))
Start = Callable[[str | Path], AbstractContextManager[WorkerBench]]


def _triton() -> Any:
    from hardpoint.triton import TritonAttention

    return TritonAttention


@pytest.fixture(params=["cpu", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])])
def start(request: pytest.FixtureRequest) -> Start:
    """Start a worker with a model folder and an fp8 cache."""
    target = Target.find("cpu")
    if request.param == "triton":
        target = target.with_descriptor(attention=_triton, kernels=None)

    @contextmanager
    def started(folder: str | Path) -> Iterator[WorkerBench]:
        model = replace(PLAIN, path=str(folder))
        with running(target, model, dtype=DType.BFLOAT16, kv_dtype=DType.FLOAT8_E4M3, block_size=16) as bench:
            yield bench

    return started


def answers(bench: WorkerBench) -> list[tuple[list[int], list[float]]]:
    """Return what the prompts give: tokens and their log probabilities."""
    served = bench.generate(PROMPTS, 3, logprobs=1)
    return [(one.generated, [float(entry.logprobs[0]) for entry in one.logprobs]) for one in served]


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    return scale_checkpoint(Path(PLAIN.path), tmp_path / "scaled")


def test_scales_hold_in_every_step_and_over_every_sleep(start: Start, scaled: Path) -> None:
    with start(PLAIN.path) as bench:
        expected = answers(bench)
    with start(scaled) as bench:
        planned = bench.info.attention
        assert [(layer.k_scale, layer.v_scale) for layer in planned.request.layers] == list(SCALES)
        assert answers(bench) == expected
        for weights in (Policy.PRESERVE, Policy.DISCARD):
            bench.sleep_and_wake(SleepPlan(policies={WEIGHTS: weights, KV_CACHE: Policy.DISCARD}))
            if weights is Policy.DISCARD:
                bench.worker.write_weights(WeightWrite.RELOAD)
            assert answers(bench) == expected
        sleep(bench.worker, SleepPlan(tags=frozenset({KV_CACHE}), policies={KV_CACHE: Policy.DISCARD}))
        wake(bench.worker, (KV_CACHE,))
        assert answers(bench) == expected


def test_a_sequence_goes_on_after_a_sleep_that_preserves_its_scaled_keys(start: Start, scaled: Path) -> None:
    with start(scaled) as bench:
        expected = bench.generate(PROMPTS[:1], 4)[0].generated
        sequence = bench.begin(PROMPTS[0])
        bench.run([sequence], 2)
        bench.sleep_and_wake(SleepPlan(policies={}, live_blocks=tuple(sequence.blocks)))
        bench.run([sequence], 4)
        assert sequence.generated == expected
