"""What Ascend's attention asks of the operators, over reference operators that reject what the vendor's reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, DType, StepBatch
from hardpoint.interfaces.errors import InvalidBatch
from hardpoint_ascend import capabilities
from hardpoint_ascend import step as module
from hardpoint_ascend.attention import AscendAttention

from .reference_operators import DEVICE, Rejected, register

LAYER = AttentionLayer(4, 2, 64, 0.125)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> AscendAttention:
    register()
    monkeypatch.setattr(capabilities, "requirements", tuple)
    return AscendAttention(DEVICE)


def plan_of(attention: AscendAttention, **changes: Any) -> AttentionPlan:
    request = AttentionRequest((replace(LAYER, **changes),), DType.FLOAT16, DType.FLOAT16, None, 1024)
    found = attention.plan(request)
    assert isinstance(found, AttentionPlan), found
    return found


def batch_of(queries: list[int], contexts: list[int], blocks: list[list[int]], block_size: int = 128) -> StepBatch:
    """Return the batch of sequences that have the last `queries` of their `contexts` in this step."""
    width = max(map(len, blocks))
    table = np.array([[*owned, *[0] * (width - len(owned))] for owned in blocks], np.int32)
    positions = np.concatenate([np.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)])
    owner = np.repeat(np.arange(len(queries)), queries)
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    none = np.zeros((0, 2), np.int32)
    return StepBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_start=np.cumsum([0, *queries]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        block_table=table,
        rows=np.arange(len(queries), dtype=np.int32),
        seq_ids=np.arange(len(queries)),
        num_decodes=0,
        sample_rows=np.zeros(0, np.int32),
        sample_seq_ids=np.zeros(0, np.int64),
        swap_out=none,
        swap_in=none,
        copies=none,
        preempted=np.zeros(0, np.int64),
    )


def tensors(plan: AttentionPlan, tokens: int, blocks: int) -> SimpleNamespace:
    """Return random queries, keys, values and cache, and an output of ones."""
    generator = torch.Generator().manual_seed(0)
    layer = plan.request.layers[0]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    return SimpleNamespace(
        q=random(tokens, layer.num_heads, layer.head_dim),
        k=random(tokens, layer.num_kv_heads, layer.head_dim),
        v=random(tokens, layer.num_kv_heads, layer.head_dim),
        cache=random(*plan.kv_cache.shape(blocks))[0],
        out=torch.ones(tokens, layer.num_heads, layer.head_dim, dtype=torch.float16),
    )


def compute(attention: AscendAttention, plan: AttentionPlan, batch: StepBatch, given: SimpleNamespace) -> torch.Tensor:
    step = attention.prepare(plan, batch)
    attention.write_kv(0, given.k, given.v, given.cache, step)
    attention.forward(0, given.q, given.k, given.v, given.cache, step, given.out)
    return given.out


@pytest.fixture
def calls(attention: AscendAttention, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each call of the attention operator."""
    made: list[dict[str, Any]] = []
    operator = attention._attend

    def record(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return operator(*args, **kwargs)

    monkeypatch.setattr(attention, "_attend", record)
    return made


def test_prompts_chunks_and_single_tokens_are_one_call(attention: AscendAttention, calls: list[dict[str, Any]]) -> None:
    plan = plan_of(attention)
    batch = batch_of([1, 1, 7, 130], [9, 140, 20, 130], [[3], [0, 5], [1], [2, 4]])
    compute(attention, plan, batch, tensors(plan, 139, 6))
    (call,) = calls
    assert call["actual_seq_qlen"] == [1, 2, 9, 139], "cumulative"
    assert call["actual_seq_kvlen"] == [9, 140, 20, 130], "not cumulative over a paged cache"
    assert call["block_table"].tolist() == [[3, 0], [0, 5], [1, 0], [2, 4]]
    assert (call["input_layout"], call["sparse_mode"], call["block_size"]) == ("TND", 3, 128)
    assert call["pre_tokens"] == call["next_tokens"] == 2**31 - 1


def test_window_is_a_band_that_counts_the_query_itself(attention: AscendAttention, calls: list[dict[str, Any]]) -> None:
    plan = plan_of(attention, sliding_window=16)
    compute(attention, plan, batch_of([5], [40], [[0]]), tensors(plan, 5, 1))
    assert [(call["sparse_mode"], call["pre_tokens"], call["next_tokens"]) for call in calls] == [(4, 15, 0)]


def test_padding_reaches_no_operator(
    attention: AscendAttention, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, write = [], attention._write
    monkeypatch.setattr(attention, "_write", lambda *given, **named: (slots.append(given[4]), write(*given, **named)))
    plan = plan_of(attention)
    given = tensors(plan, 5, 2)
    batch = batch_of([1, 1], [9, 3], [[0], [1]])
    padded = replace(
        batch,
        token_ids=np.zeros(5, np.int64),
        slot_mapping=np.array([*batch.slot_mapping, -1, -1, -1], np.int32),
        query_start=np.array([0, 1, 2, 2, 2, 2], np.int32),
        context_lens=np.array([9, 3, 0, 0, 0], np.int32),
        rows=np.array([0, 1, 0, 0, 0], np.int32),
    )
    before = given.cache.clone()
    out = compute(attention, plan, padded, given)
    assert calls[0]["actual_seq_qlen"] == [1, 2]
    assert bool((out[2:] == 1).all())
    written = (given.cache != before).flatten(2).any(-1)[0].sum().item()
    assert written == 2, "slots of the two tokens alone"
    (given_slots,) = slots
    assert given_slots.tolist() == batch.slot_mapping.tolist(), "the operator's description has slots from 0 alone"


def test_step_of_nothing_is_no_call(attention: AscendAttention, calls: list[dict[str, Any]]) -> None:
    plan = plan_of(attention)
    batch = batch_of([1], [1], [[0]])
    nothing = replace(
        batch,
        slot_mapping=np.array([-1], np.int32),
        query_start=np.zeros(1, np.int32),
        context_lens=np.zeros(0, np.int32),
        rows=np.zeros(0, np.int32),
    )
    out = compute(attention, plan, nothing, tensors(plan, 1, 1))
    assert calls == []
    assert bool((out == 1).all())


def test_sequences_that_share_more_blocks_than_there_are_take_several_calls(
    attention: AscendAttention, calls: list[dict[str, Any]]
) -> None:
    plan = plan_of(attention)
    together, alone = tensors(plan, 3, 4), tensors(plan, 3, 40)
    alone.cache[:, :4] = together.cache
    batch = batch_of([1, 1, 1], [300, 290, 270], [[0, 1, 2], [0, 1, 3], [0, 1, 2]])
    # The third sequence must not write to a block that another one writes to.
    batch = replace(batch, slot_mapping=np.array([*batch.slot_mapping[:2], -1], np.int32))
    divided = compute(attention, plan, batch, together)
    assert [call["actual_seq_kvlen"] for call in calls] == [[300], [290], [270]]
    assert torch.equal(divided, compute(attention, plan, batch, alone))
    assert len(calls) == 4


@pytest.mark.parametrize(("name", "limit"), [("MAX_SEQUENCES", 2), ("MAX_TOKENS", 4)])
def test_steps_beyond_one_calls_limits_are_divided(
    attention: AscendAttention, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    plan = plan_of(attention)
    batch = batch_of([2, 2, 1], [2, 5, 3], [[0], [1], [2]])
    whole = compute(attention, plan, batch, tensors(plan, 5, 3))
    monkeypatch.setattr(module, name, limit)
    assert torch.equal(compute(attention, plan, batch, tensors(plan, 5, 3)), whole)
    assert [call["actual_seq_qlen"] for call in calls] == [[2, 4, 5], [2, 4], [1]]


@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 500)), min_size=1, max_size=12),
    spare=st.integers(0, 8),
    limits=st.tuples(st.integers(1, 5), st.integers(40, 90)),
)
def test_calls_divide_a_step_in_order_and_within_the_limits(
    sequences: list[tuple[int, int]], spare: int, limits: tuple[int, int]
) -> None:
    register()
    queries = [count for count, _ in sequences]
    contexts = [count + before for count, before in sequences]
    blocks = [-(-context // 128) for context in contexts]
    table = [list(range(count)) for count in blocks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "requirements", tuple)
        patch.setattr(module, "MAX_SEQUENCES", limits[0])
        patch.setattr(module, "MAX_TOKENS", limits[1])
        attention = AscendAttention(DEVICE)
        step = attention.prepare(plan_of(attention), batch_of(queries, contexts, table))
        cache = max(blocks) + spare
        found = step.calls(cache)
    present = [index for index, count in enumerate(queries) if count]
    assert [context for call in found for context in call.context_lens] == [contexts[index] for index in present]
    assert [token for call in found for token in range(call.begin, call.end)] == list(range(sum(queries)))
    for call in found:
        assert 0 < len(call.query_ends) == len(call.context_lens) == len(call.block_table) <= limits[0]
        assert call.query_ends[-1] == call.end - call.begin <= limits[1]
        assert call.query_ends == sorted(call.query_ends)
        assert sum(-(-context // 128) for context in call.context_lens) <= cache


def test_blocks_are_copied_in_order_and_within_the_cache(attention: AscendAttention) -> None:
    cache = torch.arange(4.0)[None, None, :, None, None, None].expand(1, 2, 4, 128, 1, 64).clone()
    attention.copy_blocks(cache, np.array([[1, 2], [2, 3]], np.int32))
    assert cache[0, 0, :, 0, 0, 0].tolist() == [0, 1, 1, 1]
    with pytest.raises(InvalidBatch, match="numbered 0 to 3"):
        attention.swap_blocks(cache, torch.zeros_like(cache), np.array([[4, 0]], np.int32))


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {"cache": given.cache[:, :1].clone()}, "the step uses block 1"),
        (lambda given: {"cache": given.cache.bfloat16()}, "of float16, contiguous"),
        (lambda given: {"cache": given.cache.transpose(2, 3)}, "of float16, contiguous"),
        (lambda given: {"q": given.q.float()}, "q is"),
        (lambda given: {"q": given.q[:1]}, "q is"),
        (lambda given: {"k": _transposed(given.k)}, "k is"),
        (lambda given: {"out": given.out[:, :2]}, "out is"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_call(
    attention: AscendAttention,
    calls: list[dict[str, Any]],
    change: Callable[[SimpleNamespace], dict[str, torch.Tensor]],
    message: str,
) -> None:
    plan = plan_of(attention)
    given = tensors(plan, 2, 2)
    given.__dict__.update(change(given))
    with pytest.raises(InvalidBatch, match=message):
        compute(attention, plan, batch_of([1, 1], [9, 3], [[0], [1]]), given)
    assert calls == []


@pytest.mark.parametrize(
    "change",
    [
        {"query_start": np.array([0, 1], np.int32)},
        {"query_start": np.array([0, 1, 3], np.int32)},
        {"query_start": np.array([0, 2, 1], np.int32)},
        {"query_start": np.array([1, 1, 2], np.int32)},
        {"context_lens": np.array([0, 3], np.int32)},
        {"context_lens": np.array([300, 3], np.int32)},
        {"block_table": np.array([[-1], [1]], np.int32)},
        {"block_table": np.array([0, 1], np.int32)},
        {"slot_mapping": np.array([8], np.int32)},
    ],
)
def test_arrays_that_contradict_each_other_are_refused(attention: AscendAttention, change: dict[str, Any]) -> None:
    batch = replace(batch_of([1, 1], [9, 3], [[0], [1]]), **change)
    with pytest.raises(InvalidBatch):
        attention.prepare(plan_of(attention), batch)


def test_sinks_and_slopes_that_were_not_planned_are_refused(attention: AscendAttention) -> None:
    plan = plan_of(attention)
    given, step = tensors(plan, 1, 1), attention.prepare(plan, batch_of([1], [1], [[0]]))
    with pytest.raises(InvalidBatch, match="planned without"):
        attention.forward(0, given.q, given.k, given.v, given.cache, step, given.out, sinks=torch.zeros(4))


# The reference operators reject what the vendor's reject: what the tests above show rests on it.


def accepted() -> dict[str, Any]:
    """Return a call that is right."""
    return {
        "query": torch.rand(3, 4, 64).half(),
        "key": torch.rand(4, 128, 128).half(),
        "value": torch.rand(4, 128, 128).half(),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        "actual_seq_qlen": [1, 3],
        "actual_seq_kvlen": [9, 140],
        "block_table": torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 128,
    }


def attend(call: dict[str, Any]) -> torch.Tensor:
    register()
    out: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score_v2(**call)[0]
    return out


def test_reference_operator_accepts_a_right_call() -> None:
    assert bool(attend(accepted()).isfinite().all())


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"actual_seq_qlen": [1, 2]}, "cumulative|last number"),
        ({"actual_seq_qlen": [3, 1]}, "cumulative"),
        ({"actual_seq_kvlen": [9, 149, 150]}, "B numbers"),
        ({"actual_seq_kvlen": [9, 300]}, "column for each block"),
        ({"actual_seq_kvlen": [0, 140]}, "not more than keys"),
        ({"block_size": 64}, "that of the cache"),
        (
            {"key": torch.rand(8, 64, 128).half(), "value": torch.rand(8, 64, 128).half(), "block_size": 64},
            "multiple of 128",
        ),
        ({"key": torch.rand(2, 128, 128).half(), "value": torch.rand(2, 128, 128).half()}, "no fewer blocks"),
        ({"key": torch.rand(4, 128, 2, 64).half(), "value": torch.rand(4, 128, 2, 64).half()}, "paged cache is"),
        ({"key": torch.rand(4, 128, 128), "value": torch.rand(4, 128, 128)}, "query's dtype"),
        ({"query": torch.rand(3, 4, 64)}, "float16 or bfloat16"),
        ({"query": torch.rand(3, 4, 80).half()}, "D is 64 or 128"),
        ({"query": torch.rand(3, 64, 4).half().transpose(1, 2)}, "not contiguous"),
        ({"block_table": torch.tensor([[0, 0], [1, 2]])}, "int32"),
        ({"block_table": torch.tensor([[0, 9], [1, 9]], dtype=torch.int32)}, "blocks are in the cache"),
        ({"atten_mask": None}, "need a mask"),
        ({"atten_mask": torch.ones(512, 512, dtype=torch.bool).triu(1)}, "2048 x 2048"),
        ({"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).tril(-1)}, "above the diagonal"),
        ({"atten_mask": torch.ones(2048, 2048).triu(1)}, "bool, int8 or uint8"),
        ({"sparse_mode": 2}, "0, 3 or 4"),
        ({"sparse_mode": 4, "pre_tokens": -1, "next_tokens": 0}, "band is not empty"),
        ({"input_layout": "BSH"}, "TND"),
        ({"num_key_value_heads": 3}, "divides"),
        (
            {"num_key_value_heads": 4, "key": torch.rand(4, 128, 256).half(), "value": torch.rand(4, 128, 256).half()},
            "2 to 64",
        ),
    ],
)
def test_reference_operator_rejects_what_the_vendors_rejects(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(Rejected, match=rule):
        attend(accepted() | change)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"slot_mapping": torch.tensor([0, 256], dtype=torch.int32)}, "slots are below"),
        ({"slot_mapping": torch.tensor([5, 5], dtype=torch.int32)}, "twice"),
        ({"slot_mapping": torch.tensor([5], dtype=torch.int32)}, "one slot for each token"),
        ({"cache_mode": "PA_NZ"}, "plain format"),
        ({"key": torch.rand(2, 64, 2).half().transpose(1, 2)}, "not contiguous"),
        ({"key_cache": torch.zeros(2, 2, 128, 64).half()}, "block_size, N, D"),
        ({"value": torch.rand(2, 2, 64).bfloat16()}, "dtypes are the same"),
    ],
)
def test_reference_writer_rejects_what_the_vendors_rejects(change: dict[str, Any], rule: str) -> None:
    register()
    call: dict[str, Any] = {
        "key": torch.rand(2, 2, 64).half(),
        "value": torch.rand(2, 2, 64).half(),
        "key_cache": torch.zeros(2, 128, 2, 64).half(),
        "value_cache": torch.zeros(2, 128, 2, 64).half(),
        "slot_mapping": torch.tensor([3, 200], dtype=torch.int32),
        "cache_mode": "Norm",
    }
    torch.ops.npu.npu_scatter_pa_kv_cache(**call)
    with pytest.raises(Rejected, match=rule):
        torch.ops.npu.npu_scatter_pa_kv_cache(**call | change)
