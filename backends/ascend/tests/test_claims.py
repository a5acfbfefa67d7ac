"""What the backend claims, and what it refuses with reasons; no device, and no operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hardpoint.interfaces import (
    AttentionBackend,
    AttentionLayer,
    AttentionRequest,
    Capabilities,
    Collectives,
    DeviceAllocator,
    DType,
    GraphLevel,
    GraphRunner,
    IntSet,
    Refusal,
    Worker,
)
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint_ascend import capabilities as module
from hardpoint_ascend import descriptor
from hardpoint_ascend.attention import AscendAttention
from hardpoint_ascend.capabilities import capabilities

from .reference_operators import DEVICE, register

QWEN = AttentionLayer(16, 8, 128, 128**-0.5)


@pytest.fixture
def with_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "requirements", tuple)


@pytest.fixture
def claims(with_torch_npu: None) -> Capabilities:
    return capabilities(DEVICE)


def request_of(layer: AttentionLayer = QWEN, **changes: Any) -> AttentionRequest:
    return replace(AttentionRequest((layer,), DType.BFLOAT16, DType.BFLOAT16, None, 40960), **changes)


def test_usual_models_are_accepted(claims: Capabilities) -> None:
    for layer in (QWEN, AttentionLayer(14, 2, 64, 0.125), AttentionLayer(32, 4, 128, 0.09, sliding_window=4096)):
        assert claims.explain(request_of(layer)) == ()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (request_of(replace(QWEN, head_dim=256)), "head dimension 256 is not supported (supported: 64, 128)"),
        (request_of(replace(QWEN, head_dim=80)), "head dimension 80 is not supported"),
        (request_of(dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32), "dtype float32 is not supported"),
        (request_of(kv_dtype=DType.FLOAT16), "KV dtype float16 with bfloat16 is not supported"),
        (request_of(kv_dtype=DType.INT8), "KV dtype int8 with bfloat16 is not supported"),
        (request_of(block_size=64), "block size 64 is not supported (supported: 128)"),
        (request_of(max_context=1 << 19), "exceeds the maximum of 262144"),
        (request_of(replace(QWEN, num_heads=1040)), "130 query heads per KV head"),
        (request_of(replace(QWEN, num_heads=8)), "1 query heads per KV head are not supported (supported: 2 to 64)"),
        (request_of(replace(QWEN, sliding_window=0)), "sliding window of 0 keys"),
        (request_of(replace(QWEN, sinks=True)), "sinks is not supported"),
        (request_of(replace(QWEN, soft_cap=30.0)), "soft_cap is not supported"),
        (request_of(replace(QWEN, alibi=True)), "alibi is not supported"),
        (request_of(AttentionLayer(320, 8, 128, 1.0)), "320 query heads exceed the operator's 256"),
        (
            request_of(AttentionLayer(2048, 1024, 64, 1.0)),
            "1024 KV heads of 64 exceed the operator's 65535 elements a token",
        ),
    ],
)
def test_what_the_operators_cannot_do_is_refused_with_its_reason(
    with_torch_npu: None, request_: AttentionRequest, reason: str
) -> None:
    register()
    answer = AscendAttention(DEVICE).plan(request_)
    assert isinstance(answer, Refusal)
    assert any(reason in given for given in answer.reasons), answer.reasons


def test_what_no_hardware_has_shown_is_said(claims: Capabilities) -> None:
    notes = " ".join(claims.notes)
    for words in ("no hardware has run it", "reference operators", "sinks: refused", "plain format"):
        assert words in notes
    assert claims.attention.graph_level is GraphLevel.NONE
    assert claims.memory.sleep_levels == {0, 1, 2}
    assert (8 in claims.tensor_parallel, 9 in claims.tensor_parallel) == (True, False)
    assert claims.collectives == ("hccl",)


def test_graphs_are_claimed_where_they_are_asked_for(with_torch_npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, level in (("1", GraphLevel.UNIFORM_DECODE), ("0", GraphLevel.NONE), ("", GraphLevel.NONE)):
        monkeypatch.setenv(module.GRAPHS_VARIABLE, asked)
        found = capabilities(DEVICE)
        assert found.attention.graph_level is level
        (note,) = (note for note in found.notes if note.startswith("graphs: "))
        assert "no hardware has run them" in note
        assert ("asks for them" in note) == (level is not GraphLevel.NONE)


def test_other_words_than_yes_and_no_are_refused(with_torch_npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.GRAPHS_VARIABLE, "true")
    with pytest.raises(ConfigError, match="HARDPOINT_ASCEND_GRAPHS=true was asked for"):
        capabilities(DEVICE)


@pytest.mark.parametrize("name", ["Ascend910B4", "Ascend910_9382"])
def test_chips_that_the_operators_are_described_for_are_claimed(with_torch_npu: None, name: str) -> None:
    assert capabilities(replace(DEVICE, name=name)).explain(request_of()) == ()


@pytest.mark.parametrize("name", ["Ascend310P3", "Ascend910A", "Ascend950PR_9579"])
def test_other_chips_are_refused_by_name(with_torch_npu: None, name: str) -> None:
    device = replace(DEVICE, name=name)
    assert capabilities(device).explain(request_of())
    (reason,) = module.reasons(device)
    assert (
        reason
        == f"the device is {name}, and torch_npu describes the attention operator for Ascend910B* and Ascend910_93*"
    )
    assert capabilities(device).memory.sleep_levels == {0, 1, 2}, "its memory works"


def test_without_torch_npu_there_is_memory_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_torch_npu", lambda: False)
    claims, backend = capabilities(DEVICE), descriptor.hardpoint_backend()
    assert claims.explain(request_of())
    assert (claims.tensor_parallel, claims.collectives) == (IntSet(), ())
    assert claims.notes == ("no attention: torch_npu is not installed, whose operators compute on the device",)
    assert issubclass(backend.allocator(), DeviceAllocator)
    for part in (backend.attention, backend.worker):
        with pytest.raises(CapabilityRefused, match="torch_npu is not installed"):
            part()


def test_every_part_is_there(with_torch_npu: None) -> None:
    backend = descriptor.hardpoint_backend()
    parts = {
        "allocator": DeviceAllocator,
        "attention": AttentionBackend,
        "worker": Worker,
        "graph_runner": GraphRunner,
        "collectives": Collectives,
    }
    for name, contract in parts.items():
        assert issubclass(getattr(backend, name)(), contract), name
