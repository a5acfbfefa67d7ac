"""When FlashInfer is chosen and when it is not, and how it is called; over a reference FlashInfer (simulated) beside plain attention."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, Device, DType, Refusal, StepBatch
from hardpoint.interfaces.errors import BackendBroken, InvalidBatch
from hardpoint.triton import triton_attention_capabilities
from hardpoint_cuda.flashinfer import flashinfer_attention_capabilities
from hardpoint_cuda.flashinfer.attention import FlashInferAttention
from hardpoint_cuda.flashinfer.signatures import CALLS
from hardpoint_cuda.flashinfer.wrappers import FlashInferStep, Wrapper

from .plain_base import PlainBase

DEVICE = Device("cuda", 0, "reference FlashInfer on the host", "cpu", simulated=True)
LAYER = AttentionLayer(4, 2, 64, 0.125)
REQUEST = AttentionRequest((LAYER,), DType.FLOAT16, DType.FLOAT16, 16, 64)
MOOD = "HARDPOINT_TEST_FLASHINFER"

pytestmark = pytest.mark.usefixtures("flashinfer")


class SlowBase(PlainBase):
    """A base that is slower than any reference."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.1)
        super().forward(*args, **kwargs)


def automatic(base: type[PlainBase] = SlowBase) -> FlashInferAttention:
    """Return an attention that chooses by its trial."""
    return FlashInferAttention(DEVICE, base(triton_attention_capabilities()))


def named() -> FlashInferAttention:
    """Return an attention for which FlashInfer was asked for."""
    return FlashInferAttention(DEVICE, PlainBase(flashinfer_attention_capabilities()), is_named=True)


def planned(attention: FlashInferAttention, request: AttentionRequest = REQUEST) -> AttentionPlan:
    plan = attention.plan(request)
    assert isinstance(plan, AttentionPlan), plan
    return plan


def batch_of(contexts: list[int], queries: list[int], decodes: int) -> StepBatch:
    """Return a batch of sequences whose blocks follow one another; nothing is written."""
    blocks = [-(-context // 16) for context in contexts]
    table = np.zeros((len(contexts), max(blocks)), np.int32)
    table[np.arange(max(blocks)) < np.array(blocks)[:, None]] = np.arange(sum(blocks))
    tokens, nothing = sum(queries), np.zeros((0, 2), np.int32)
    return StepBatch(
        token_ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        slot_mapping=np.full(tokens, -1, np.int32),
        query_start=np.cumsum([0, *queries]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        block_table=table,
        rows=np.arange(len(contexts), dtype=np.int32),
        seq_ids=np.arange(len(contexts)),
        num_decodes=decodes,
        sample_rows=np.zeros(0, np.int32),
        sample_seq_ids=np.zeros(0, np.int64),
        swap_out=nothing,
        swap_in=nothing,
        copies=nothing,
        preempted=np.zeros(0, np.int64),
    )


def attended(attention: FlashInferAttention, plan: AttentionPlan) -> tuple[Any, torch.Tensor]:
    """Return the metadata and the result of a step of two decodes and a chunk over a random cache."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(plan.kv_cache.shape(8)[1:], generator=generator).half()
    q = torch.randn(7, LAYER.num_heads, LAYER.head_dim, generator=generator).half()
    step, out = attention.prepare(plan, batch_of([20, 33, 9], [1, 1, 5], decodes=2)), torch.zeros_like(q)
    attention.forward(0, q, q[:, :2], q[:, :2], cache, step, out)
    return step, out


# The choice


def test_faster_flashinfer_attends_and_the_notes_have_the_times_of_both() -> None:
    attention = automatic()
    plan = planned(attention)
    (note,) = plan.notes[1:]
    assert note.startswith("flashinfer attends: a decode step of 2 sequences with up to 40 tokens takes ")
    assert note.count(" ms and not ") == 2
    step, out = attended(attention, plan)
    assert isinstance(step, FlashInferStep)
    base = PlainBase(triton_attention_capabilities())
    expected = attended(base, planned(base))[1]  # type: ignore[arg-type]
    assert expected.abs().max() > 0
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("mood", "base", "note"),
    [
        ("slow", PlainBase, "no flashinfer: it is not faster: a decode step"),
        (
            "wrong",
            SlowBase,
            "no flashinfer: it failed in its trial (BackendBroken: FlashInfer's result of a decode step",
        ),
        ("broken", SlowBase, "no flashinfer: it failed in its trial (RuntimeError: Could not find nvcc)"),
    ],
)
def test_any_other_flashinfer_leaves_it_to_the_base(
    mood: str, base: type[PlainBase], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MOOD, mood)
    attention = automatic(base)
    plan = planned(attention)
    assert plan.notes[1].startswith(note), plan.notes
    monkeypatch.delenv(MOOD)
    assert not isinstance(attended(attention, plan)[0], FlashInferStep)


def test_missing_module_leaves_it_to_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "failed in its trial (ModuleNotFoundError" in planned(automatic()).notes[1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"layers": (replace(LAYER, sinks=True),)}, "sinks is not supported"),
        ({"layers": (replace(LAYER, alibi=True),)}, "alibi is not supported"),
        ({"layers": (replace(LAYER, head_dim=80),)}, "head dimension 80 is not supported"),
        ({"dtype": DType.FLOAT32, "kv_dtype": DType.FLOAT32}, "dtype float32 is not supported"),
    ],
)
def test_what_flashinfer_does_not_do_is_the_bases_and_refused_where_it_was_named(
    changed: dict[str, Any], reason: str
) -> None:
    request = replace(REQUEST, **changed)
    assert planned(automatic(), request).notes[1].startswith(f"no flashinfer: {reason}")
    refusal = named().plan(request)
    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].startswith(reason)


@pytest.mark.parametrize("mood", ["wrong", "broken"])
def test_failure_of_a_named_flashinfer_is_an_error(mood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOOD, mood)
    with pytest.raises(BackendBroken, match=r"HARDPOINT_ATTENTION=flashinfer was asked for.*unset HARDPOINT_ATTENTION"):
        named().plan(REQUEST)


def test_named_flashinfer_attends_even_if_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOOD, "slow")
    attention = named()
    plan = planned(attention)
    assert plan.notes[1].startswith("flashinfer attends")
    assert isinstance(attended(attention, plan)[0], FlashInferStep)


@pytest.mark.parametrize("layer", [3, 7])
def test_one_wrong_layer_among_many_is_found(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(replace(LAYER, sliding_window=5 + index if index > 2 else None) for index in range(8))
    decode = import_module("flashinfer.decode")
    right = decode.attend

    def attend(*args: Any, planned: dict[str, Any], **kwargs: Any) -> None:
        off = planned["window_left"] == layers[layer].sliding_window - 1  # type: ignore[operator]
        right(*args, planned=planned | {"window_left": planned["window_left"] + off}, **kwargs)

    monkeypatch.setattr(decode, "attend", attend)
    note = planned(automatic(PlainBase), replace(REQUEST, layers=layers)).notes[1]
    assert note.startswith("no flashinfer: it failed in its trial (BackendBroken")
    assert f"sliding_window={5 + layer}" in note


def test_a_request_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = automatic()
    first = planned(attention)
    monkeypatch.setenv(MOOD, "broken")
    assert planned(attention) == first


# The calls


def test_calls_are_those_that_installed_releases_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[tuple[str, str], set[str]] = defaultdict(set)
    for call in CALLS:
        owner = getattr(import_module("flashinfer"), call.owner)
        method = getattr(owner, call.method)

        def recorded(self: Any, *args: Any, _call: Any = call, _method: Any = method, **kwargs: Any) -> Any:
            places = ("q", "paged_kv_cache")[: len(args)]
            made[_call.owner, _call.method] |= {*places, *kwargs}
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(owner, call.method, recorded)
    layer = replace(LAYER, k_scale=0.5)
    planned(named(), replace(REQUEST, layers=(layer,), kv_dtype=DType.FLOAT8_E4M3))
    for call in CALLS:
        given = made.pop((call.owner, call.method))
        assert given == set(call.arguments), (call.owner, call.method)
    assert not made


def test_metadata_are_those_of_the_last_step() -> None:
    attention = named()
    plan = planned(attention)
    cache, q = torch.zeros(plan.kv_cache.shape(8)[1:]).half(), torch.zeros(1, 4, 64).half()
    old = attention.prepare(plan, batch_of([3], [1], decodes=1))
    attention.prepare(plan, batch_of([4], [1], decodes=1))
    with pytest.raises(InvalidBatch, match="another one was prepared since"):
        attention.forward(0, q, q, q, cache, old, torch.zeros_like(q))


def test_a_plan_waits_until_the_last_ones_numbers_were_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def synchronize(self) -> None:
            order.append("wait")

        def record(self) -> None:
            order.append("record")

    class Planner:
        run = None

        def plan(self) -> None:
            order.append("plan")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    wrapper = Wrapper(Planner(), torch.device("cuda"))
    wrapper.plan()
    wrapper.plan()
    assert order == ["wait", "plan", "record"] * 2
