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
    Device,
    DeviceAllocator,
    DType,
    GraphLevel,
    GraphRunner,
    Refusal,
    Worker,
)
from hardpoint_ascend import descriptor
from hardpoint_ascend.attention import AscendAttention
from hardpoint_ascend.capabilities import capabilities

from .reference_operators import register

DEVICE = Device("ascend", 0, "any", "cpu", simulated=True)
QWEN = AttentionLayer(16, 8, 128, 128**-0.5)


@pytest.fixture
def claims() -> Capabilities:
    return capabilities(DEVICE)


def request_of(layer: AttentionLayer = QWEN, **changes: Any) -> AttentionRequest:
    return replace(AttentionRequest((layer,), DType.BFLOAT16, DType.BFLOAT16, None, 40960), **changes)


def test_usual_models_are_accepted(claims: Capabilities) -> None:
    for layer in (QWEN, AttentionLayer(14, 2, 64, 0.125), AttentionLayer(32, 32, 128, 0.09, sliding_window=4096)):
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
        (request_of(replace(QWEN, sliding_window=0)), "sliding window of 0 keys"),
        (request_of(replace(QWEN, sinks=True)), "sinks is not supported"),
        (request_of(replace(QWEN, soft_cap=30.0)), "soft_cap is not supported"),
        (request_of(replace(QWEN, alibi=True)), "alibi is not supported"),
        (request_of(AttentionLayer(320, 8, 128, 1.0)), "320 query heads exceed the operator's 256"),
        (
            request_of(AttentionLayer(1024, 1024, 64, 1.0)),
            "1024 KV heads of 64 exceed the operator's 65535 elements a token",
        ),
    ],
)
def test_what_the_operators_cannot_do_is_refused_with_its_reason(request_: AttentionRequest, reason: str) -> None:
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


def test_every_part_is_there() -> None:
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
