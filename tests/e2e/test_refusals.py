"""What a backend does not claim is refused when an engine starts, with every reason and with what would work; no device is needed.

The claims are each backend's own, for a device with all that it needs; the rest of the engine runs on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM
from hardpoint.interfaces import (
    AttentionFeature,
    AttentionPlan,
    BackendDescriptor,
    Capabilities,
    Device,
    KVCacheSpec,
    Refusal,
    WorkerConfig,
    WorkerContext,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.plugins import Resolved, resolve_backend
from hardpoint.triton.build import TorchBuild
from hardpoint.worker import StandardWorker

BACKENDS = ("ascend", "cpu", "cuda", "rocm")
CHIP = "Ascend910B3"
"""A device for which Ascend's operator is described."""
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "sliding_window": 128,
}


class HostWorker(StandardWorker):
    """The core's worker, unchanged."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """A backend whose claims are its own, and whose other parts are the host's; `backend.descriptor` makes them."""
    name = request.param
    monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())
    monkeypatch.setattr("hardpoint_ascend.capabilities.requirements", tuple)
    descriptor: BackendDescriptor = import_module(f"hardpoint_{name}.descriptor").hardpoint_backend()
    return on_the_host(
        descriptor, Device(name, 0, CHIP if name == "ascend" else f"a device of {name}", "cpu"), monkeypatch
    )


def on_the_host(
    descriptor: BackendDescriptor, device: Device, monkeypatch: pytest.MonkeyPatch, **parts: Any
) -> Resolved:
    host = resolve_backend("cpu")
    claims = parts.get("capabilities", descriptor.capabilities)

    class Planning(host.descriptor.attention()):  # type: ignore[misc]
        def plan(self, request: Any) -> AttentionPlan | Refusal:
            reasons = claims(device).explain(request)
            first = request.layers[0]
            spec = KVCacheSpec(1, request.block_size or 32, first.num_kv_heads, first.head_dim, request.kv_dtype)
            return Refusal(reasons) if reasons else AttentionPlan(request, spec)

    made = replace(
        descriptor,
        allocator=host.descriptor.allocator,
        attention=lambda: Planning,
        worker=lambda: HostWorker,
        platform=host.descriptor.platform,
        kernels=None,
        graph_runner=None,
        **parts,
    )
    resolved = Resolved(made, device)
    monkeypatch.setattr("hardpoint.engine.startup.resolve_backend", lambda *args, **named: resolved)
    return resolved


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Write a model's configuration and return its folder; its weights are made up."""

    def write(**changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        return str(tmp_path)

    return write


def refused(model: str, **settings: Any) -> str:
    """Return what the engine says to these settings."""
    settings = {"load_format": "dummy", "dtype": "float16", "skip_tokenizer_init": True, **settings}
    with pytest.raises(CapabilityRefused) as caught:
        LLM(model, **settings)
    return str(caught.value)


def test_head_dimension(backend: Resolved, model: Callable[..., str]) -> None:
    said = refused(model(head_dim=20))
    assert f"head dimension 20 is not supported (supported: {claims_of(backend).attention.head_dims})" in said


def test_block_size(backend: Resolved, model: Callable[..., str]) -> None:
    said = refused(model(), block_size=24)
    assert f"block size 24 is not supported (supported: {claims_of(backend).attention.block_sizes})" in said


def test_element_type_of_the_cache(backend: Resolved, model: Callable[..., str]) -> None:
    said = refused(model(), kv_dtype="float32")
    assert "KV dtype float32 with float16 is not supported (supported: " in said
    assert "float16" in said.split("(supported: ")[1]


def test_group_size(backend: Resolved, model: Callable[..., str]) -> None:
    said = refused(model(num_attention_heads=256, head_dim=64, hidden_size=16384, num_key_value_heads=1))
    assert (
        f"256 query heads per KV head are not supported (supported: {claims_of(backend).attention.group_sizes})" in said
    )


def test_all_reasons_come_at_once(backend: Resolved, model: Callable[..., str]) -> None:
    said = refused(model(head_dim=20), block_size=24, kv_dtype="float32")
    for reason in ("head dimension 20", "block size 24", "KV dtype float32"):
        assert reason in said
    assert f"the {backend.descriptor.name} backend cannot run" in said


def test_window(backend: Resolved, model: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    claims = claims_of(backend)
    without = claims.attention.features - {AttentionFeature.SLIDING_WINDOW}
    plain = replace(claims, attention=replace(claims.attention, features=without))
    on_the_host(backend.descriptor, backend.device, monkeypatch, capabilities=lambda device: plain)
    assert "sliding_window is not supported" in refused(model())
    assert "sliding window of 0 keys is not positive" in refused(model(sliding_window=0))


def test_number_of_ranks(backend: Resolved, model: Callable[..., str]) -> None:
    config = WorkerConfig(
        model(), load_format="dummy", world_size=64, tensor_parallel_size=64, init_method="tcp://localhost:1"
    )
    worker = HostWorker(WorkerContext(backend.descriptor, backend.device, config))
    with pytest.raises(CapabilityRefused) as caught:
        worker.start()
    supported = claims_of(backend).tensor_parallel
    assert f"64 tensor-parallel ranks are not supported (supported: {supported})" in str(caught.value)
    assert 1 in supported


def claims_of(backend: Resolved) -> Capabilities:
    return backend.descriptor.capabilities(backend.device)
