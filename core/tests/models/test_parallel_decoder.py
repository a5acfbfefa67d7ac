"""Ranks that share a native decoder compute what one rank does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_scale_models import scale_checkpoint
from thread_ranks import run_ranks
from tiny_models import FIRST, HYBRIDS, NATIVE, SECOND, Runner, decode_two, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces import DType
from hardpoint.models import ParallelRank, Ranks

SHAPES = {
    # The vocabulary is no multiple of anything, and three KV heads are no multiple of two ranks.
    "uneven": {
        "vocab_size": 125,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 88,
    },
    "even": {},
    "eight heads": {"num_attention_heads": 8},
}
STEPS = 5


def forced(runner: Runner, first: list[int], second: list[int], output: str) -> Iterator[torch.Tensor]:
    """Run a chunked prompt, then another one beside its decodes, with given tokens in place of the sampled ones."""
    half = len(FIRST) // 2
    yield runner.step([(0, FIRST[:half])], output)
    yield runner.step([(0, FIRST[half:])], output)
    yield runner.step([(0, first[:1]), (1, SECOND)], output)
    for one, other in zip(first[1:], second, strict=False):
        yield runner.step([(0, [one]), (1, [other])], output)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str, shape: str) -> Path:
        kind, options = NATIVE[name]
        folder = tmp_path_factory.mktemp("model")
        save_tiny(folder, tiny_config(kind, **{**options, **SHAPES[shape]}))
        return folder

    return make


def results(
    folder: Path, tensor: int, stages: int, first: list[int], second: list[int], output: str, **options: Any
) -> list[list[torch.Tensor]]:
    """Return what each rank of the last stage gave in each step."""

    def work(place: ParallelRank, ranks: Ranks) -> list[torch.Tensor]:
        _, model, plan, attention = open_and_load(folder, rank=place, ranks=ranks, **options)
        assert model.path == "modules"
        given = list(forced(Runner(model, plan, attention), first, second, output))
        if not place.is_last:
            assert not any(map(len, given)), "a stage before the last has nothing to give"
        return given

    return run_ranks(tensor, stages, work)[(stages - 1) * tensor :]


@pytest.fixture(scope="module")
def one_rank(tiny: Any) -> Any:
    """Of a family: what one rank samples for two sequences, and its logits when it is given these tokens."""

    @cache
    def run(name: str) -> tuple[list[int], list[int], list[torch.Tensor]]:
        _, model, plan, attention = open_and_load(tiny(name, "uneven"))
        (first, _), (second, _) = decode_two(Runner(model, plan, attention), FIRST, SECOND, STEPS)
        return first, second, list(forced(Runner(model, plan, attention), first, second, "logits"))

    return run


@pytest.mark.parametrize(
    ("name", "tensor", "stages"),
    [
        (name, tensor, stages)
        for name in NATIVE
        for tensor, stages in ([(2, 1), (3, 1)] if name in HYBRIDS else [(3, 1), (1, 3), (2, 2)])
    ],
)
def test_ranks_give_the_logits_of_one(tiny: Any, one_rank: Any, name: str, tensor: int, stages: int) -> None:
    first, second, expected = one_rank(name)
    for found in results(tiny(name, "uneven"), tensor, stages, first, second, "logits"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 3), (2, 2)])
def test_ranks_compute_with_the_kv_scales_of_their_layers(tiny: Any, tmp_path: Path, tensor: int, stages: int) -> None:
    plain = tiny("llama", "even")
    scaled = scale_checkpoint(plain, tmp_path / "scaled")
    expected, found = (
        results(
            folder,
            tensor,
            stages,
            [5] * 4,
            [9] * 4,
            "logits",
            dtype=DType.BFLOAT16,
            kv_dtype=DType.FLOAT8_E4M3,
        )
        for folder in (plain, scaled)
    )
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("output", ["argmax", "hidden"])
def test_ranks_give_the_tokens_and_hidden_states_of_one(tiny: Any, output: str) -> None:
    folder = tiny("llama", "uneven")
    _, model, plan, attention = open_and_load(folder)
    expected = list(forced(Runner(model, plan, attention), [5] * 4, [9] * 4, output))
    for found in results(folder, 3, 2, [5] * 4, [9] * 4, output):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(
    ("name", "shape", "tensor"), [("gemma2", "eight heads", 4), ("llama-attention-bias", "even", 6)]
)
def test_more_ranks_than_kv_heads_repeat_them(tiny: Any, name: str, shape: str, tensor: int) -> None:
    folder = tiny(name, shape)
    _, model, plan, attention = open_and_load(folder)
    expected = list(forced(Runner(model, plan, attention), [5] * 3, [9] * 3, "logits"))
    for found in results(folder, tensor, 1, [5] * 3, [9] * 3, "logits"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * max(1.0, float(other.abs().max())))


def test_dummy_weights_are_those_of_one_rank(tiny: Any) -> None:
    folder = tiny("phi3", "uneven")
    options: dict[str, Any] = {"load_format": "dummy", "seed": 7, "dtype": DType.FLOAT32}
    _, model, plan, attention = open_and_load(folder, **options)
    expected = list(forced(Runner(model, plan, attention), [5] * 3, [9] * 3, "logits"))
    for found in results(folder, 2, 2, [5] * 3, [9] * 3, "logits", **options):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
