"""Ranks read their parts of a checkpoint, and take their parts of updates, reloads and sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from test_gguf import _write
from test_rereading import PROMPT, NotingAllocator, _save
from thread_ranks import run_ranks
from tiny_models import NATIVE, Runner, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces.errors import CorruptWeights
from hardpoint.models import ParallelRank, Ranks, open_model

KINDS = ["llama-attention-bias", "llama-tied", "phi3", "gemma2"]
TENSOR, STAGES = 2, 2

Work = Callable[[Any, NotingAllocator, Any], None]


def logits_of_ranks(folder: Path, work: Work = lambda model, allocator, source: None, **options: Any) -> torch.Tensor:
    """Load a model on all ranks, have each do `work`, and return the driver's logits of a prompt."""

    def rank(place: ParallelRank, ranks: Ranks) -> torch.Tensor:
        allocator = NotingAllocator()
        source, model, plan, attention = open_and_load(folder, rank=place, ranks=ranks, allocator=allocator, **options)
        work(model, allocator, source)
        return Runner(model, plan, attention).step([(0, PROMPT)])

    return run_ranks(TENSOR, STAGES, rank)[TENSOR]


def logits_of_one(folder: Path, **options: Any) -> torch.Tensor:
    _, model, plan, attention = open_and_load(folder, **options)
    return Runner(model, plan, attention).step([(0, PROMPT)])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))


@pytest.fixture
def two(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Two models of one configuration."""
    for seed in range(2):
        _save(request.param, tmp_path / str(seed), seed=seed)
    return tmp_path / "0", tmp_path / "1"


both = pytest.mark.parametrize("two", KINDS, indirect=True)


@both
def test_updates_with_whole_tensors_give_the_other_model(two: tuple[Path, Path]) -> None:
    weights = load_file(two[1] / "model.safetensors")

    def update(model: Any, allocator: NotingAllocator, source: Any) -> None:
        written: set[str] = set()
        assert model.update_weights(weights.items(), written) == len(weights)
        assert written == model.weight_names()
        assert written < set(weights)

    assert_close(logits_of_ranks(two[0], update), logits_of_one(two[1]))


@both
def test_a_reload_gives_the_other_model(two: tuple[Path, Path]) -> None:
    def reload(model: Any, allocator: NotingAllocator, source: Any) -> None:
        written: set[str] = set()
        other = open_model(str(two[1]))
        assert model.reload(other, written) == len(other.describe(other.dtype).checkpoint_shapes)
        assert written == model.weight_names()

    assert_close(logits_of_ranks(two[0], reload), logits_of_one(two[1]))


@both
def test_lost_weights_are_read_again_from_their_source(two: tuple[Path, Path]) -> None:
    """Rows that lie together are extents of the files, columns come by the callback."""

    def restore(model: Any, allocator: NotingAllocator, source: Any) -> None:
        model.declare_sources(allocator, source)
        assert sum(tensor.nbytes for tensor, _ in allocator.sources) == model.weight_bytes
        by_extents = {tensor.data_ptr() for tensor, declared in allocator.sources if not callable(declared)}
        layer = next(iter(model._model.model.layers.values()))
        assert layer.self_attn.qkv_proj.weight.data_ptr() in by_extents
        assert layer.mlp.gate_up_proj.weight.data_ptr() in by_extents
        assert layer.self_attn.o_proj.weight.data_ptr() not in by_extents
        allocator.vendor_lose_and_restore()

    assert torch.equal(logits_of_ranks(two[0], restore), logits_of_ranks(two[0]))


@both
def test_tensors_of_the_wrong_shape_or_name_are_refused_on_every_rank(two: tuple[Path, Path]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    def update(model: Any, allocator: NotingAllocator, source: Any) -> None:
        for key, values in ((name, torch.zeros(3, 3)), ("model.layers.0.mlp.sideways_proj.weight", torch.zeros(2))):
            written: set[str] = set()
            with pytest.raises(CorruptWeights):
                model.update_weights([(key, values)], written)
            assert not written

    logits_of_ranks(two[0], update)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_ranks_of_a_gguf_file_are_the_model(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, name, gguf.GGMLQuantizationType[kind])
    assert_close(logits_of_ranks(path), logits_of_one(path))


def test_rows_of_a_checkpoint_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save_tiny(folder, tiny_config(NATIVE["qwen2"][0]))
    path = tmp_path / "model.gguf"
    _write(path, "llama", gguf.GGMLQuantizationType.Q8_0)
    dummy = open_model(str(folder), load_format="dummy")
    shapes = open_model(str(folder)).checkpoint.shapes()
    for checkpoint in (
        open_model(str(folder)).checkpoint,
        open_model(str(path)).checkpoint,
        dummy.dummy_checkpoint(dict(shapes), 3),
    ):
        for name, shape in checkpoint.shapes().items():
            whole = checkpoint.read(name)
            for begin, end in ((0, shape[0]), (1, shape[0] - 1), (shape[0] // 2, shape[0] // 2 + 1)):
                parts = list(checkpoint.rows(name, begin, end))
                assert parts[0][0] == begin
                assert torch.equal(torch.cat([values for _, values in parts]), whole[begin:end]), name
