"""A kernel set's fused decoder gets the model's weights and steps; its single operators serve the modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import PlainAllocator
from safetensors.torch import load_file
from tiny_models import BLOCK, NATIVE, Runner, assert_equals_transformers, open_and_load, save_tiny, tiny_config
from torch import Tensor, nn
from torch.nn import functional

from hardpoint.interfaces import (
    Activation,
    DecoderProgram,
    DeviceAllocator,
    DType,
    FuseRequest,
    KernelSet,
    Refusal,
)


class TorchKernels(KernelSet):
    """The contract's operators in plain torch; counts their calls."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.requests: list[FuseRequest] = []

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._count("rms_norm")
        assert x.dtype == weight.dtype
        return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._count("add_rms_norm")
        residual += x
        return functional.rms_norm(residual.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._count("rotary")
        half = cos.shape[-1]
        c, s = cos[positions, None], sin[positions, None]
        for x in (q, k):
            a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
            x[..., :half] = a * c - b * s
            x[..., half : 2 * half] = b * c + a * s

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        self._count("gated_activation")
        gate, up = x.chunk(2, dim=-1)
        return (
            functional.silu(gate) if activation is Activation.SILU else functional.gelu(gate, approximate="tanh")
        ) * up

    def argmax(self, logits: Tensor) -> Tensor:
        self._count("argmax")
        return logits.argmax(dim=-1)

    def fuse(self, model: nn.Module, request: FuseRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        self.requests.append(request)
        return Refusal(("not today",))

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


class RecordingProgram(DecoderProgram):
    """Holds weights as the contract says and returns a constant."""

    def __init__(self, model: nn.Module, request: FuseRequest) -> None:
        self.weights = {
            name: torch.full(parameter.shape, float("nan"), dtype=request.dtype.to_torch())
            for name, parameter in model.named_parameters()
        }
        self.loads: list[str] = []

    def load_weight(self, name: str, tensor: Tensor, first_row: int | None = None) -> None:
        rows = self.weights[name] if first_row is None else self.weights[name][first_row : first_row + len(tensor)]
        if tensor.shape != rows.shape:
            raise ValueError(name)
        self.loads.append(name)
        rows.copy_(tensor)

    def read_weight(self, name: str) -> Tensor:
        return self.weights[name].clone()

    def scratch_bytes(self) -> int:
        return 1234

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: object,
        kv_cache: Tensor,
        rows: Tensor,
        embedded: object = None,
        adapters: object = None,
    ) -> Tensor:
        return torch.full((len(rows), 3), 7.0)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def argmax(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0].long()


class FusingKernels(TorchKernels):
    """Offers a recording program."""

    def fuse(self, model: nn.Module, request: FuseRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        self.requests.append(request)
        self.program = RecordingProgram(model, request)
        return self.program


def test_a_fused_decoder_gets_every_weight_merged(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tiny_config("llama"))
    kernels = FusingKernels()
    _, model, plan, attention = open_and_load(tmp_path, kernels=kernels)
    assert (model.path, model.scratch_bytes) == ("fused", 1234)
    (request,) = kernels.requests
    assert (request.max_num_tokens, request.max_num_samples, request.max_context) == (64, 8, 64)
    program, stored = kernels.program, reference.state_dict()
    assert set(program.loads) == set(program.weights)
    assert not any(weight.isnan().any() for weight in program.weights.values())
    layer = "model.layers.2.self_attn"
    expected = torch.cat([stored[f"{layer}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(program.weights[f"{layer}.qkv_proj.weight"], expected)
    gate_up = [stored[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(program.weights["model.layers.0.mlp.gate_up_proj.weight"], torch.cat(gate_up))
    assert torch.equal(program.weights["lm_head.weight"], stored["lm_head.weight"])
    assert model.weight_bytes == sum(weight.nbytes for weight in program.weights.values())
    assert Runner(model, plan, attention).step([(0, [1, 2])], "argmax").tolist() == [7]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_fused_decoder_gets_large_weights_by_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, tiny_config(kind))
    whole, parts = FusingKernels(), FusingKernels()
    open_and_load(tmp_path, kernels=whole)
    monkeypatch.setattr("hardpoint.weights.loading._PIECE_ELEMENTS", 64 * 64)
    open_and_load(tmp_path, kernels=parts)
    assert len(parts.program.loads) > len(whole.program.loads)
    for name, weight in whole.program.weights.items():
        assert torch.equal(parts.program.weights[name], weight), name


def test_norms_stored_as_differences_reach_a_fused_decoder_whole(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tiny_config("gemma"))
    kernels = FusingKernels()
    open_and_load(tmp_path, kernels=kernels)
    stored = reference.state_dict()["model.layers.1.input_layernorm.weight"]
    torch.testing.assert_close(kernels.program.weights["model.layers.1.input_layernorm.weight"], stored + 1)


def test_an_update_of_one_part_keeps_the_rest_of_a_fused_weight(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    kernels = FusingKernels()
    _, model, _, _ = open_and_load(tmp_path, kernels=kernels)
    before = kernels.program.read_weight("model.layers.1.self_attn.qkv_proj.weight")
    kernels.program.loads.clear()
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    assert model.update_weights([(name, tensors[name] + 1)]) == 1
    after = kernels.program.weights["model.layers.1.self_attn.qkv_proj.weight"]
    assert kernels.program.loads == ["model.layers.1.self_attn.qkv_proj.weight"]
    assert torch.equal(after[96:128], before[96:128] + 1)
    assert torch.equal(after[:96], before[:96])
    assert torch.equal(after[128:], before[128:])


def test_a_whole_update_loads_every_fused_weight_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    kernels = FusingKernels()
    _, model, _, _ = open_and_load(tmp_path, kernels=kernels)
    kernels.program.loads.clear()
    tensors = load_file(tmp_path / "model.safetensors")
    assert model.update_weights(tensors.items()) == len(tensors)
    assert sorted(kernels.program.loads) == sorted(kernels.program.weights)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma2"])
def test_a_refused_fused_decoder_leaves_its_operators_to_the_lean_one(name: str, tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    reference = save_tiny(tmp_path, tiny_config(kind, **options))
    kernels = TorchKernels()
    _, model, plan, attention = open_and_load(tmp_path, kernels=kernels)
    assert (model.path, len(kernels.requests)) == ("modules", 1)
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=3)
    assert {"rotary", "gated_activation"} <= set(kernels.calls)
    # Gemma's norms keep float32 weights, which the contract's operators do not take.
    assert ("add_rms_norm" in kernels.calls) == (name != "gemma2")


def test_the_fused_decoder_can_be_passed_over(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    kernels = FusingKernels()
    _, model, _, _ = open_and_load(tmp_path, kernels=kernels, use_fused_decoder=False)
    assert model.path == "modules"
    assert kernels.requests == []


def test_dummy_weights_reach_every_way_of_running_alike(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    kernels = FusingKernels()
    open_and_load(tmp_path, kernels=kernels, load_format="dummy", seed=9)
    _, native, _, _ = open_and_load(tmp_path, load_format="dummy", seed=9)
    for name, weight in kernels.program.weights.items():
        assert torch.equal(weight, native._model.get_parameter(name)), name


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hardpoint.models; "
        "print([name for name in ('torch', 'transformers', 'gguf', 'safetensors') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_reference_attention_reads_blocks_by_the_table() -> None:
    """The reference itself: paged and plain attention agree with every feature on."""
    from reference import ReferenceAttention, attend, step_batch

    from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest

    layer = AttentionLayer(4, 2, 8, 0.3, sliding_window=5, soft_cap=3.0, sinks=True, alibi=True)
    attention = ReferenceAttention()
    plan = attention.plan(AttentionRequest((layer,), DType.FLOAT32, DType.FLOAT32, BLOCK, 64))
    assert isinstance(plan, AttentionPlan)
    torch.manual_seed(0)
    cache = PlainAllocator().empty(plan.kv_cache.shape(20), DType.FLOAT32)
    cache.fill_(float("nan"))
    q, k, v = (torch.randn(11, heads, 8) for heads in (4, 2, 2))
    extra: dict[str, Any] = {"sinks": torch.randn(4), "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}
    outs = []
    for first, last in ((0, 6), (6, 10), (10, 11)):
        batch = step_batch([(list(range(first, last)), first)], [[7, 3, 12]], BLOCK)
        metadata = attention.prepare(plan, batch)
        out = torch.empty(last - first, 4, 8)
        attention.write_kv(0, k[first:last], v[first:last], cache[0], metadata)
        attention.forward(0, q[first:last], k[first:last], v[first:last], cache[0], metadata, out, **extra)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), attend(q, k, v, layer, **extra))
