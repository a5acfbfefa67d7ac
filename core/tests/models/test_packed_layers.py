"""Linear layers whose weights a kernel set stores in a layout of its own: loaded, updated, and read again through it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_kernels import TorchKernels
from test_rereading import NotingAllocator
from tiny_models import NATIVE, Runner, assert_equals_transformers, open_and_load, save_tiny, tiny_config
from torch import Tensor
from torch.nn import functional

from hardpoint.interfaces import LinearProgram, LinearRequest, Refusal


class ReversedLinear(LinearProgram):
    """Stores the rows of a weight in reverse."""

    def weight_shape(self) -> tuple[int, ...]:
        return (self._request.rows, self._request.columns)

    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        end = len(stored) - row
        stored[end - len(values) : end].copy_(values.flip(0))

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight.flip(0), bias)


class ReversingKernels(TorchKernels):
    """Has a layout of its own for some of the linear layers."""

    def plan_linear(self, request: LinearRequest) -> LinearProgram | Refusal:
        return Refusal(("too wide",)) if request.columns > 48 else ReversedLinear(request)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-attention-bias", "qwen2-moe"])
def test_linear_layers_are_stored_as_the_kernel_set_says(name: str, tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    folders = [tmp_path / str(seed) for seed in range(2)]
    references = [save_tiny(folder, tiny_config(kind, **options), seed=s) for s, folder in enumerate(folders)]
    allocator = NotingAllocator()
    source, model, plan, attention = open_and_load(folders[0], kernels=ReversingKernels(), allocator=allocator)
    assert_equals_transformers(references[0], Runner(model, plan, attention), steps=3)

    # What is stored otherwise than in the file comes by the callback when it is lost.
    model.declare_sources(allocator, source)
    by_callback = {tensor.data_ptr() for tensor, declared in allocator.sources if callable(declared)}
    layer = next(iter(model._model.model.layers.values()))
    assert layer.self_attn.qkv_proj.weight.data_ptr() in by_callback
    assert layer.input_layernorm.weight.data_ptr() not in by_callback
    allocator.vendor_lose_and_restore()
    assert_equals_transformers(references[0], Runner(model, plan, attention), steps=3)

    model.update_weights(load_file(folders[1] / "model.safetensors").items())
    assert_equals_transformers(references[1], Runner(model, plan, attention), steps=3)
