"""Loaded weights can be read again: from extents of their files, by a callback, by a reload; each gives the same bytes or refuses."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import PlainAllocator
from safetensors.torch import load_file, save_file
from test_kernels import FusingKernels
from tiny_models import FALLBACK, NATIVE, Runner, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces import DType, FileExtent
from hardpoint.interfaces.errors import BackupCorrupt, CorruptWeights, ModelError
from hardpoint.models import ModelSource, RunnableModel, open_model

PROMPT = [3, 17, 90, 4, 55]
KINDS = ["llama", "llama-tied", "qwen2", "phi3", "gemma2", "gpt2"]


class NotingAllocator(PlainAllocator):
    """Notes the declared sources."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[torch.Tensor, Sequence[FileExtent] | Callable[[], None]]] = []

    def declare_source(self, tensor: torch.Tensor, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        self.sources.append((tensor, source))

    def vendor_lose_and_restore(self) -> None:
        """Do what a sleep with the tier `source`, and the wake after it, do to the declared tensors."""
        with torch.no_grad():
            for tensor, source in self.sources:
                tensor.view(-1).view(torch.uint8).fill_(0xFF)
                if not callable(source):
                    _read_extents(tensor, source)
            for callback in {id(source): source for _, source in self.sources if callable(source)}.values():
                callback()


def _read_extents(tensor: torch.Tensor, extents: Sequence[FileExtent]) -> None:
    raw = tensor.view(-1).view(torch.uint8)
    covered = 0
    for extent in extents:
        assert extent.start == covered
        with open(extent.path, "rb") as file:
            file.seek(extent.offset)
            content = bytearray(file.read(extent.size))
        assert len(content) == extent.size
        raw[extent.start : extent.start + extent.size] = torch.frombuffer(content, dtype=torch.uint8)
        covered += extent.size
    assert covered == tensor.nbytes


def _save(kind: str, folder: Path, seed: int = 0) -> None:
    model_type, options = {**NATIVE, **FALLBACK}[kind]
    save_tiny(folder, tiny_config(model_type, **options), seed=seed)


def _load(
    folder: Path, **options: Any
) -> tuple[ModelSource, RunnableModel, NotingAllocator, Callable[[], torch.Tensor]]:
    """Return a loaded model, and what computes logits of a prompt with its present weights."""
    allocator = NotingAllocator()
    source, model, plan, attention = open_and_load(folder, allocator=allocator, **options)
    return source, model, allocator, lambda: Runner(model, plan, attention).step([(0, PROMPT)])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    _save("llama", tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_lost_weights_are_read_again_from_their_source(kind: str, tmp_path: Path) -> None:
    _save(kind, tmp_path)
    source, model, allocator, logits = _load(tmp_path)
    before = logits()
    model.declare_sources(allocator, source)
    assert sum(tensor.nbytes for tensor, _ in allocator.sources) == model.weight_bytes
    allocator.vendor_lose_and_restore()
    assert torch.equal(logits(), before)


def test_a_lean_decoders_fused_rows_are_extents_of_each_checkpoint_tensor(llama: Path) -> None:
    source, model, allocator, _ = _load(llama)
    model.declare_sources(allocator, source)
    extents = [declared for _, declared in allocator.sources if not callable(declared)]
    assert len(extents) == len(allocator.sources)
    assert sorted({len(parts) for parts in extents}) == [1, 2, 3]
    assert {Path(part.path) for parts in extents for part in parts} == {llama / "model.safetensors"}


def test_weights_in_another_dtype_than_the_files_come_by_the_callback(llama: Path) -> None:
    source, model, allocator, logits = _load(llama, dtype=DType.BFLOAT16)
    before = logits()
    model.declare_sources(allocator, source)
    assert all(callable(declared) for _, declared in allocator.sources)
    allocator.vendor_lose_and_restore()
    assert torch.equal(logits(), before)


def test_a_fused_decoders_memory_has_one_callback_which_loads_everything(llama: Path) -> None:
    kernels = FusingKernels()
    source, model, allocator, _ = _load(llama, kernels=kernels)
    program = kernels.program
    memory = tuple(program.weights.values())
    program.weight_memory = lambda: memory  # type: ignore[method-assign]
    before = {name: weight.clone() for name, weight in program.weights.items()}
    model.declare_sources(allocator, source)
    assert len(allocator.sources) == len(memory)
    assert len({id(declared) for _, declared in allocator.sources}) == 1
    allocator.vendor_lose_and_restore()
    assert all(torch.equal(program.weights[name], weight) for name, weight in before.items())


def test_dummy_weights_are_made_again(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    source, model, allocator, logits = _load(tmp_path, load_format="dummy", seed=5)
    before = logits()
    model.declare_sources(allocator, source)
    allocator.vendor_lose_and_restore()
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
@pytest.mark.parametrize("change", ["content", "removed", "touched"])
def test_a_callback_refuses_a_checkpoint_that_has_changed(kind: str, change: str, tmp_path: Path) -> None:
    _save(kind, tmp_path)
    source, model, allocator, _ = _load(tmp_path)
    model.declare_sources(allocator, source)
    file = tmp_path / "model.safetensors"
    if change == "content":
        save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    elif change == "removed":
        file.unlink()
    else:
        os.utime(file, ns=(1, 1))
    callback = next(declared for _, declared in allocator.sources if callable(declared))
    with pytest.raises(BackupCorrupt, match="reload_weights"):
        callback()


def test_a_source_keeps_neither_the_model_nor_its_files_alive(tmp_path: Path) -> None:
    _save("gemma2", tmp_path)
    source, model, allocator, logits = _load(tmp_path)
    model.declare_sources(allocator, source)
    (callback,) = {declared for _, declared in allocator.sources if callable(declared)}
    gone = weakref.ref(model)
    source.close_weights()
    del model, logits
    allocator.sources.clear()
    gc.collect()
    assert gone() is None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    callback()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reload_takes_the_weights_of_another_checkpoint_of_the_same_model(kind: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _save(kind, old, seed=1)
    _save(kind, new, seed=2)
    _, model, _, logits = _load(old)
    before = logits()
    written: set[str] = set()
    assert model.reload(open_model(str(new)), written) == len(model.weight_names())
    assert written == model.weight_names()
    assert torch.equal(logits(), _load(new)[3]())
    model.reload(open_model(str(old)))
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_dummy_weights_give_way_to_a_checkpoint(kind: str, tmp_path: Path) -> None:
    _save(kind, tmp_path)
    _, model, _, logits = _load(tmp_path, load_format="dummy", seed=3)
    model.reload(open_model(str(tmp_path)))
    assert torch.equal(logits(), _load(tmp_path)[3]())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _save(kind, old, seed=1)
    _save(kind, new, seed=2)
    tensors = load_file(new / "model.safetensors")
    tensors.pop(next(name for name in tensors if ".2." in name))
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    _, model, _, logits = _load(old)
    before = logits()
    written: set[str] = set()
    with pytest.raises(CorruptWeights, match="missing"):
        model.reload(open_model(str(new)), written)
    assert not written
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("kind", ["llama", "gpt-neox"])
def test_another_model_is_no_checkpoint_of_this_one(kind: str, tmp_path: Path) -> None:
    _save(kind, tmp_path)
    _, model, _, logits = _load(tmp_path)
    before = logits()
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="not a checkpoint of the model"):
        model.reload(open_model(str(tmp_path)))
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2"])
def test_names_of_weights_are_those_that_updates_write(kind: str, tmp_path: Path) -> None:
    _save(kind, tmp_path)
    _, model, _, _ = _load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    written: set[str] = set()
    model.update_weights(tensors.items(), written)
    assert written == model.weight_names()


def test_an_update_that_breaks_off_tells_what_it_wrote(llama: Path) -> None:
    _, model, _, _ = _load(llama)
    tensors = load_file(llama / "model.safetensors")
    first = next(iter(tensors))

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield first, tensors[first]
        raise ConnectionError("the trainer is gone")

    written: set[str] = set()
    with pytest.raises(ConnectionError):
        model.update_weights(weights(), written)
    assert written == {first}
    with pytest.raises(CorruptWeights):
        model.update_weights([("nonsense", tensors[first])], nothing := set())
    assert not nothing
