"""Paged attention against its definition, and the invariances that the engine relies on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.interfaces import Refusal
from hardpoint.interfaces.capabilities import AttentionLayer, AttentionRequest
from hardpoint.interfaces.dtypes import DType
from hardpoint_cpu import _native
from hardpoint_cpu.attention import CpuAttention, InvalidBatch

from .reference import DEVICE, Case, assert_accurate, make_case, with_blocks_moved

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Decodes on both sides of a partition's end, a first token, a prompt, a chunk of one, and a last short chunk.
MIX = [(1, 700), (1, 512), (1, 513), (1, 1), (33, 33), (40, 90), (2, 600)]


@lru_cache(maxsize=1)
def same_case(*lens: tuple[int, int], **options: Any) -> Case:
    """Return the case of the test before, which asked for it on another instruction set: it is judged once. Not to be changed."""
    return make_case(list(lens), **options)


@pytest.fixture(autouse=True)
def _settings():
    """Restore what a test changes. One torch thread: OpenMP stalls when others use the cores too."""
    isa, threads, torch_threads = _native.isa(), _native.num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    _native.set_isa(isa)
    _native.set_num_threads(threads)
    torch.set_num_threads(torch_threads)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "feature",
    [{}, {"window": 17}, {"soft_cap": 4.0}, {"sinks": True}, {"alibi": True}, {"narrow": True}],
    ids=["plain", "window", "soft_cap", "sinks", "alibi", "narrow"],
)
def test_mixed_batch_is_accurate_on_every_instruction_set(isa, dtype, feature):
    _native.set_isa(isa)
    case = same_case(*MIX, dtype=dtype, num_heads=9, num_kv_heads=3, **feature)
    assert_accurate(case, case.run())


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 96, 112, 128, 256])
def test_head_dimensions(isa, dtype, head_dim):
    _native.set_isa(isa)
    case = same_case((1, 70), (20, 50), dtype=dtype, head_dim=head_dim)
    assert_accurate(case, case.run())


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes(block_size, dtype):
    for context in (block_size - 1, block_size, block_size + 1, 3 * block_size + 5):
        case = make_case([(1, context), (min(7, context), context)], dtype=dtype, block_size=block_size)
        assert_accurate(case, case.run())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (5, 1), (8, 2), (12, 4), (14, 2), (71, 1)])
def test_group_sizes(num_heads, num_kv_heads):
    case = make_case([(1, 80), (25, 40)], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=32)
    assert_accurate(case, case.run())


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_window_edges(window, dtype):
    lens = [(1, 40), (1, window), (1, window + 1), (1, max(1, window - 1)), (70, 150), (3, 560)]
    case = make_case(lens, dtype=dtype, window=window, head_dim=32)
    assert_accurate(case, case.run())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_combination(data):
    lens = []
    for _ in range(data.draw(st.integers(1, 5), "sequences")):
        context = data.draw(st.integers(1, 600), "context")
        query = data.draw(st.one_of(st.just(1), st.integers(1, min(context, 150))), "query")
        lens.append((query, context))
    group, kv_heads = data.draw(st.integers(1, 7), "group"), data.draw(st.integers(1, 3), "kv heads")
    _native.set_isa(data.draw(st.sampled_from(_native.available_isas()), "isa"))
    case = make_case(
        lens,
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=data.draw(st.integers(1, 12), "head_dim / 8") * 8,
        block_size=data.draw(st.sampled_from([8, 16, 32, 64]), "block size"),
        window=data.draw(st.one_of(st.none(), st.integers(1, 700)), "window"),
        soft_cap=data.draw(st.sampled_from([None, 2.0, 30.0]), "soft cap"),
        sinks=data.draw(st.booleans(), "sinks"),
        alibi=data.draw(st.booleans(), "alibi"),
        narrow=data.draw(st.booleans(), "narrow"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    assert_accurate(case, case.run())


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_written_in_e4m3_as_torch_rounds_them(isa, dtype):
    """Every number of 16 bits, NaN and both infinities among them, divided by a scale that is no power of two."""
    _native.set_isa(isa)
    case = make_case([(128, 128)], dtype=dtype, num_heads=2, num_kv_heads=2, head_dim=256, narrow=True)
    layer = replace(case.layer, k_scale=0.7, v_scale=1.0)
    case.plan = replace(case.plan, request=replace(case.plan.request, layers=(layer,)))
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16 if dtype is torch.float32 else dtype)
    rows = numbers.to(dtype).view(128, 2, 256)
    step = case.backend.prepare(case.plan, case.batch)
    case.backend.write_kv(0, rows, rows, case.kv_cache, step)
    block, offset = np.divmod(case.batch.slot_mapping, 16)
    for half, scale in ((0, layer.k_scale), (1, layer.v_scale)):
        divided = rows.float() / torch.tensor(scale)
        held = case.kv_cache[half].float()[block, :, offset]
        torch.testing.assert_close(
            held, divided.clamp(-448, 448).to(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 64], ids=["decode", "prefill"])
def test_every_number_in_e4m3_is_read_exactly(isa, dtype, queries):
    """A sequence's first query sees one key, so that its output is that key's value: all 256 bytes, NaN at two of them."""
    _native.set_isa(isa)
    case = make_case([(queries, queries)], dtype=dtype, num_heads=1, num_kv_heads=1, head_dim=256, narrow=True)
    block, offset = divmod(int(case.batch.slot_mapping[0]), 16)
    row = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    case.kv_cache.view(torch.uint8)[1, block, 0, offset] = row.view(torch.uint8)
    expected = (row.float() * case.layer.v_scale).to(dtype)
    torch.testing.assert_close(case.run()[0, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_future_values_never_leak(dtype):
    """A value that is not finite reaches the rows that see it, and no others: weight zero would turn it into NaN."""
    case = make_case([(60, 60)], dtype=dtype)
    block, offset = divmod(int(case.batch.slot_mapping[41]), 16)
    clean = case.run()
    case.kv_cache[1, block, :, offset] = float("inf")
    out = case.run()
    torch.testing.assert_close(out[:41], clean[:41])
    assert not out[41:].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_before_the_window_may_hold_anything(dtype):
    case = make_case([(1, 300), (10, 200)], dtype=dtype, window=20)
    expected = case.run()
    table = case.batch.block_table
    for row, (query, context) in zip(case.batch.rows, case.lens, strict=True):
        first_needed = (context - query - 20 + 1) // 16
        case.kv_cache[:, table[row, :first_needed]] = float("nan")
        table[row, :first_needed] = -1
    assert torch.equal(case.run(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_place_of_blocks_changes_nothing(dtype):
    case = make_case(MIX, dtype=dtype)
    assert torch.equal(case.run(), with_blocks_moved(case).run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", [{}, {"window": 50, "sinks": True}, {"alibi": True, "soft_cap": 5.0}])
def test_sequence_is_independent_of_its_batch(dtype, feature):
    """Bit by bit: each sequence alone gives what it gives in the batch."""
    case = make_case(MIX, dtype=dtype, **feature)
    together = case.run()
    for i, (query, _) in enumerate(case.lens):
        start = int(case.batch.query_start[i])
        tokens = slice(start, start + query)
        batch = replace(
            case.batch,
            token_ids=case.batch.token_ids[tokens],
            slot_mapping=case.batch.slot_mapping[tokens],
            query_start=np.array([0, query], dtype=np.int32),
            context_lens=case.batch.context_lens[i : i + 1],
            rows=case.batch.rows[i : i + 1],
        )
        alone = replace(case, batch=batch, q=case.q[tokens])
        assert torch.equal(alone.run(), together[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_of_threads_changes_nothing(dtype):
    # Of short rows: threads divide sequences, keys and heads.
    case = make_case([(1, 2100), (130, 400), (1, 30)], dtype=dtype, num_heads=9, num_kv_heads=3, head_dim=16)
    _native.set_num_threads(1)
    expected = case.run()
    for threads in (2, 5):
        _native.set_num_threads(threads)
        for _ in range(5):
            assert torch.equal(case.run(), expected)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", [{}, {"window": 33}])
def test_chunked_prefill_equals_one_shot(isa, dtype, feature):
    _native.set_isa(isa)
    case = same_case((300, 300), dtype=dtype, num_heads=6, num_kv_heads=2, **feature)
    whole = case.run()
    parts, begin = [], 0
    for size in (1, 70, 2, 128, 99):
        end = begin + size
        batch = replace(
            case.batch,
            token_ids=case.batch.token_ids[begin:end],
            slot_mapping=case.batch.slot_mapping[begin:end],
            query_start=np.array([0, size], dtype=np.int32),
            context_lens=np.array([end], dtype=np.int32),
        )
        parts.append(replace(case, batch=batch, q=case.q[begin:end]).run())
        begin = end
    chunked = torch.cat(parts)
    assert_accurate(case, chunked)
    # A row's arithmetic does not depend on the rows beside it, so chunks of several tokens repeat it bit by bit.
    assert torch.equal(chunked[1:], whole[1:])


def test_strided_inputs_and_outputs():
    """Queries, keys and values as slices of one fused projection, and an output inside a larger buffer."""
    case = make_case([(1, 40), (9, 25)], num_heads=6, num_kv_heads=2, head_dim=32)
    tokens = case.batch.num_tokens
    qkv = torch.randn(tokens, (6 + 2 + 2) * 32)
    q = qkv[:, : 6 * 32].view(tokens, 6, 32)
    k = qkv[:, 6 * 32 : 8 * 32].view(tokens, 2, 32)
    v = qkv[:, 8 * 32 :].view(tokens, 2, 32)
    q.copy_(case.q)
    wide = torch.full((tokens, 8, 32), -1.0)
    step = case.backend.prepare(case.plan, case.batch)
    case.backend.write_kv(0, k, v, case.kv_cache, step)
    case.backend.forward(0, q, k, v, case.kv_cache, step, wide[:, :6])
    for i, (query, context) in enumerate(case.lens):
        start = int(case.batch.query_start[i])
        case.keys[i][context - query :] = k[start : start + query]
        case.values[i][context - query :] = v[start : start + query]
    assert_accurate(case, wide[:, :6].contiguous())
    assert (wide[:, 6:] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 900])
def test_write_kv_writes_named_slots_only(dtype, tokens):
    case = make_case([(tokens, tokens)], dtype=dtype)
    case.kv_cache.fill_(7)
    expected = case.kv_cache.clone()
    slots = case.batch.slot_mapping
    slots[1::3] = -1
    k, v = torch.randn(2, tokens, 2, 64).to(dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // 16, :, slot % 16] = k[t]
            expected[1, slot // 16, :, slot % 16] = v[t]
    case.backend.write_kv(0, k, v, case.kv_cache, case.backend.prepare(case.plan, case.batch))
    assert torch.equal(case.kv_cache, expected)


def test_padding_rows_are_left_alone():
    """Tokens after the last sequence, with slot -1, are neither read, written nor computed."""
    case = make_case([(1, 20), (1, 30)])
    batch = replace(
        case.batch,
        token_ids=np.zeros(4, dtype=np.int64),
        slot_mapping=np.append(case.batch.slot_mapping, [-1, -1]).astype(np.int32),
    )
    padded = replace(case, batch=batch, q=torch.cat([case.q, torch.full_like(case.q, float("nan"))]))
    out = padded.run()
    assert torch.equal(out[:2], case.run())
    assert out[2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_and_swap_move_whole_blocks(dtype):
    backend = CpuAttention(DEVICE)
    device = torch.randn(3, 2, 10, 2, 16, 8).to(dtype)
    host = torch.randn(3, 2, 6, 2, 16, 8).to(dtype)
    expected_device, expected_host = device.clone(), host.clone()
    # The second pair reads what the first one wrote.
    for source, target in ((1, 4), (4, 9), (0, 2)):
        expected_device[:, :, target] = expected_device[:, :, source]
    backend.copy_blocks(device, np.array([[1, 4], [4, 9], [0, 2]], dtype=np.int32))
    assert torch.equal(device, expected_device)
    expected_host[:, :, 5], expected_host[:, :, 0] = device[:, :, 9], device[:, :, 3]
    backend.swap_blocks(device, host, np.array([[9, 5], [3, 0]], dtype=np.int32))
    assert torch.equal(host, expected_host)
    assert torch.equal(device, expected_device)


def test_copy_outside_the_cache_is_refused_before_any_copy():
    backend = CpuAttention(DEVICE)
    cache = torch.randn(2, 2, 4, 1, 16, 8)
    before = cache.clone()
    for pairs in ([[0, 1], [1, 4]], [[0, 1], [-1, 2]]):
        with pytest.raises(InvalidBatch, match="cannot copy block"):
            backend.copy_blocks(cache, np.array(pairs, dtype=np.int32))
    with pytest.raises(InvalidBatch, match="number of blocks only"):
        backend.swap_blocks(cache, torch.randn(1, 2, 4, 1, 16, 8), np.array([[0, 1]], dtype=np.int32))
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lens": np.array([3, 30], dtype=np.int32)}, "the context includes them"),
        ({"context_lens": np.array([20, 3000], dtype=np.int32)}, "block table row holds"),
        ({"rows": np.array([0, 9], dtype=np.int32)}, "row 9"),
        ({"query_start": np.array([0, 5, 3], dtype=np.int32)}, "must not fall"),
        ({"query_start": np.array([0, 5], dtype=np.int32)}, "query_start has shape"),
        ({"slot_mapping": np.full(6, 10_000, dtype=np.int32)}, "slot 10000"),
        ({"block_table": np.full((3, 4), 99, dtype=np.int32)}, "entry 0 of sequence 0 is 99"),
    ],
)
def test_contradictory_batches_are_refused(change, message):
    case = make_case([(5, 20), (1, 30)])
    with pytest.raises(InvalidBatch, match=message):
        replace(case, batch=replace(case.batch, **change)).run()


def test_wrong_tensors_are_refused():
    case = make_case([(1, 20)], sinks=True)
    for change in (
        {"q": case.q.bfloat16()},
        {"q": case.q[:, :3]},
        {"q": case.q.transpose(1, 2).contiguous().transpose(1, 2)},
        {"kv_cache": case.kv_cache.bfloat16()},
        {"kv_cache": case.kv_cache[:, :, :1]},
        {"sinks": None},
        {"sinks": case.sinks.double()},
        {"alibi": torch.ones(4)},
    ):
        with pytest.raises(InvalidBatch):
            replace(case, **change).run()


def test_plan_refuses_with_every_reason():
    layer = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=60, scale=1.0)
    refusal = CpuAttention(DEVICE).plan(AttentionRequest((layer,), DType.FLOAT32, DType.BFLOAT16, 24, 100))
    assert isinstance(refusal, Refusal)
    text = " ".join(refusal.reasons)
    for word in ("head dimension 60", "KV dtype bfloat16", "block size 24"):
        assert word in text
