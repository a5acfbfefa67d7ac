"""Level 2: attention core, what every model needs: plans, caches, prefill and decode within the oracle's bounds."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hardpoint.interfaces import (
    AttentionBackend,
    AttentionRequest,
    Capabilities,
    DType,
    IntSet,
    Refusal,
)
from hardpoint_conformance.batches import (
    DTYPES,
    UNWRITTEN,
    AttentionBench,
    Layout,
    Span,
    check,
    check_steps,
    dtypes_claimed,
    layer,
    make_case,
    plain_layer,
    planned,
    request_of,
    same_bits,
    synchronise,
)
from hardpoint_conformance.claims import members
from hardpoint_conformance.clauses import clause, over
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target

LEVEL = Level.ATTENTION_CORE
ARRAYS = ("query_start", "context_lens", "block_table", "rows", "slot_mapping", "positions")
LARGEST_HEAD_DIM = 1024
LARGEST_BLOCK = 1024


def edges(block_size: int) -> list[int]:
    """Return the lengths at which a block begins and ends."""
    return [1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size, 3 * block_size + 2]


# Plans


@clause("attn.claims.agree@1", LEVEL, capability="attention")
def test_claims_agree(attention: AttentionBackend, claims: Capabilities) -> None:
    """The attention object claims the same as its descriptor does for the device."""
    assert attention.capabilities() == claims.attention


@clause("attn.plan.spec@1", LEVEL, capability="attention")
@over(block_size=lambda claims: [*members(claims.attention.block_sizes, LARGEST_BLOCK), "default"])
def test_plan_keeps_to_the_request(attention: AttentionBackend, claims: Capabilities, block_size: int | str) -> None:
    """The plan of a request within the claims has the request's layers, KV heads, head dimension and KV dtype, and its block size, or a
    claimed one where none was asked for; the cache's axes are the five of a layer in some order."""
    dtype, numbers = dtypes_claimed(claims)[0], plain_layer(claims)
    asked = None if isinstance(block_size, str) else block_size
    request = request_of([numbers] * 3, dtype, block_size=asked, max_context=claims.attention.max_context)
    plan = planned(attention, request)
    spec = plan.kv_cache
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (3, numbers.num_kv_heads, numbers.head_dim)
    assert spec.dtype is dtype
    if asked is None:
        assert spec.block_size in claims.attention.block_sizes
    else:
        assert spec.block_size == asked
    assert sorted(spec.axes) == sorted(("kv", "block", "head", "token", "dim"))
    assert plan.request == request
    assert plan.graph_level <= claims.attention.graph_level


def _outside(numbers: IntSet) -> int:
    return next((number for number in range(1, 4096) if number not in numbers), 0)


def _changed(what: str, request: AttentionRequest, claims: Capabilities) -> AttentionRequest:
    """Return a request with one thing in it that the claims exclude."""
    (one,), attention = request.layers, claims.attention
    match what:
        case "dtype":
            return replace(request, dtype=DType.INT32, kv_dtype=DType.INT32)
        case "kv-dtype":
            return replace(request, kv_dtype=DType.INT64)
        case "head-dim":
            return replace(request, layers=(replace(one, head_dim=_outside(attention.head_dims)),))
        case "block-size":
            return replace(request, block_size=_outside(attention.block_sizes))
        case "group":
            group = _outside(attention.group_sizes)
            return replace(request, layers=(replace(one, num_heads=one.num_kv_heads * group),))
        case "ragged-heads":
            return replace(request, layers=(replace(one, num_heads=one.num_kv_heads + 1),))
        case "context":
            return replace(request, max_context=attention.max_context + 1)
        case "mixed-heads":
            group = one.num_heads // one.num_kv_heads
            other = replace(one, num_heads=3 * group, num_kv_heads=3)
            return replace(request, layers=(one, other))
        case _:
            return replace(request, layers=(replace(one, sliding_window=0),))


REFUSED = (
    "dtype",
    "kv-dtype",
    "head-dim",
    "block-size",
    "group",
    "ragged-heads",
    "context",
    "mixed-heads",
    "empty-window",
)


@clause("attn.plan.refusal@1", LEVEL, capability="attention")
@pytest.mark.parametrize("what", REFUSED)
def test_plan_refuses(attention: AttentionBackend, claims: Capabilities, what: str) -> None:
    """A request outside the claims gets a `Refusal` with its reasons, from `plan`: not an exception, and not a plan."""
    request = request_of([plain_layer(claims)], dtypes_claimed(claims)[0])
    planned(attention, request)
    answer = attention.plan(_changed(what, request, claims))
    assert isinstance(answer, Refusal), f"{what}: {answer}"
    assert answer.reasons, "refused without a reason"
    assert [reason for reason in answer.reasons if not (isinstance(reason, str) and reason.strip())] == []


@clause("attn.plan.reasons@1", LEVEL, capability="attention")
def test_plan_names_every_obstacle(attention: AttentionBackend, claims: Capabilities) -> None:
    """A refusal names every obstacle of a request, and the values that were asked for, so that one answer is enough."""
    request = request_of([plain_layer(claims)], dtypes_claimed(claims)[0])
    for what in ("head-dim", "block-size", "context"):
        request = _changed(what, request, claims)
    asked = {request.layers[0].head_dim, request.block_size, request.max_context}
    answer = attention.plan(request)
    assert isinstance(answer, Refusal)
    assert len(answer.reasons) >= 3, answer.reasons
    for number in asked:
        named = any(re.search(rf"\b{number}\b", reason) for reason in answer.reasons)
        assert named, f"no reason names {number}: {answer.reasons}"


# Results


@clause("attn.prefill.whole@1", LEVEL, capability="attention", facts="attention test A, attention test F")
@DTYPES
def test_prefill(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """A prompt's every token attends to itself and all tokens before it, within the oracle's bounds, at lengths of one token, a block
    less one, a block, a block and one, and several blocks."""
    block_size = claims.attention.default_block_size
    for length in edges(block_size):
        case = make_case(rng, plain_layer(claims), dtype, [length])
        check(case, case.whole(), AttentionBench(target, case, rng=rng).run(case.whole()), quality)


@clause("attn.prefill.batch@1", LEVEL, capability="attention", facts="attention test A")
@DTYPES
def test_prefill_of_several(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Prompts of different lengths in one step do not see each other's tokens."""
    case = make_case(rng, plain_layer(claims), dtype, [5, 1, 70, 33, 2])
    check(case, case.whole(), AttentionBench(target, case, rng=rng).run(case.whole()), quality)


@clause("attn.decode.single@1", LEVEL, capability="attention", facts="attention test A3")
@DTYPES
def test_decode(target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType) -> None:
    """A decode's one query attends to all keys in the cache and its own, at contexts on all sides of a block's end and of several
    hundred keys."""
    block_size = claims.attention.default_block_size
    case = make_case(rng, plain_layer(claims), dtype, [2, *edges(block_size)[1:], 300, 700])
    check(case, case.last(), AttentionBench(target, case, rng=rng).run(case.last()), quality)


@clause("attn.decode.long@1", LEVEL, capability="attention", facts="attention test A3")
@DTYPES
@over(length=lambda claims: [n for n in (511, 512, 513, 1024, 2500) if n <= claims.attention.max_context])
def test_long_decode(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, length: int
) -> None:
    """A decode over a context that a backend may split into parts merges them to the oracle's result."""
    case = make_case(rng, plain_layer(claims), dtype, [length])
    check(case, case.last(), AttentionBench(target, case, rng=rng).run(case.last()), quality)


@clause("attn.prefill.chunk@1", LEVEL, capability="attention.chunked_prefill", facts="attention test A2")
@DTYPES
def test_chunk(target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType) -> None:
    """A chunk of a prompt attends to the cached context before it and, causally, to itself, wherever in a block it begins."""
    block_size = claims.attention.default_block_size
    case = make_case(rng, plain_layer(claims), dtype, [3 * block_size + 5] * 4)
    starts = [1, block_size - 1, block_size, 2 * block_size + 3]
    spans = [Span(seq, start, case.lengths[seq] - seq) for seq, start in enumerate(starts)]
    check(case, spans, AttentionBench(target, case, rng=rng).run(spans), quality)


@clause(
    "attn.decode.several@1", LEVEL, capability="attention.chunked_prefill", facts="attention test A5, attention test A6"
)
@DTYPES
@pytest.mark.parametrize("queries", [2, 3, 5, 8])
def test_several_queries(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, queries: int
) -> None:
    """A few queries at the end of a context, as speculative decoding has them, each see exactly the keys up to their own."""
    case = make_case(rng, plain_layer(claims), dtype, [queries + 1, 37, 64, 260])
    check(case, case.last(queries), AttentionBench(target, case, rng=rng).run(case.last(queries)), quality)


@clause("attn.heads.group@1", LEVEL, capability="attention", facts="attention test B")
@over(group=lambda claims: [group for group in (1, 2, 3, 4, 7, 8, 16) if group in claims.attention.group_sizes])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_groups(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, group: int, kv_heads: int
) -> None:
    """Query head h attends with KV head h // group: multi-head, grouped and multi-query attention of every claimed size."""
    head_dim = plain_layer(claims).head_dim
    for dtype in dtypes_claimed(claims):
        check_steps(target, make_case(rng, layer(group * kv_heads, kv_heads, head_dim), dtype, [9, 40]), rng, quality)


@clause("attn.heads.dim@1", LEVEL, capability="attention", facts="attention test B")
@DTYPES
@over(head_dim=lambda claims: members(claims.attention.head_dims, LARGEST_HEAD_DIM))
def test_head_dims(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, head_dim: int
) -> None:
    """Every claimed head dimension gives the oracle's result, in prefill and decode."""
    numbers = replace(plain_layer(claims), head_dim=head_dim, scale=head_dim**-0.5)
    check_steps(target, make_case(rng, numbers, dtype, [11, 21]), rng, quality)


@clause("attn.block.size@1", LEVEL, capability="attention", facts="attention test C")
@DTYPES
@over(block_size=lambda claims: members(claims.attention.block_sizes, LARGEST_BLOCK))
def test_block_sizes(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, block_size: int
) -> None:
    """Every claimed block size gives the oracle's result at the lengths where a block begins and ends."""
    case = make_case(rng, plain_layer(claims), dtype, edges(block_size))
    check_steps(target, case, rng, quality, block_size=block_size)


@clause("attn.scale.custom@1", LEVEL, capability="attention", facts="attention test E")
@pytest.mark.parametrize("scale", [0.02, 0.25, 1.0])
def test_scale(target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, scale: float) -> None:
    """Logits are multiplied by the layer's scale, whatever the head dimension is."""
    for dtype in dtypes_claimed(claims):
        check_steps(target, make_case(rng, plain_layer(claims, scale=scale), dtype, [20, 50]), rng, quality)


# Numbers that are hard


@clause("attn.data.large-logits@1", LEVEL, capability="attention", facts="attention test G")
@DTYPES
def test_large_logits(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Products of queries and keys of ten thousand and more neither overflow nor turn into NaN: the largest logit is taken off before
    the exponential."""
    numbers = plain_layer(claims)
    case = make_case(rng, numbers, dtype, [30, 90])
    # Whole multiples of a power of two: rounding the logits to half precision does not make the bound wide.
    direction = np.sign(rng.standard_normal(numbers.head_dim)).astype(np.float32)
    length = float(2 ** round(np.log2(3e4 / numbers.head_dim) / 2))
    unit = torch.from_numpy(direction * length).to(dtype.to_torch())
    q, k = [], []
    for tokens in case.lengths:
        sign = torch.from_numpy(rng.choice([-1.0, 1.0], (tokens, numbers.num_heads, 1))).to(dtype.to_torch())
        level = torch.from_numpy(rng.integers(-4, 5, (tokens, numbers.num_kv_heads, 1)) / 4).to(dtype.to_torch())
        q.append(unit * sign)
        k.append(unit * level)
    check_steps(target, replace(case, q=tuple(q), k=tuple(k)), rng, quality)


@clause("attn.data.extreme@1", LEVEL, capability="attention", facts="attention test G")
@DTYPES
@pytest.mark.parametrize("data", ["dominating-key", "equal-keys", "zero-queries", "subnormal", "negative-zero", "tiny"])
def test_extreme_data(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, data: str
) -> None:
    """One key that takes all the weight, keys that are all equal, queries of zero, subnormal numbers and negative zeros give the
    oracle's result."""
    case = make_case(rng, plain_layer(claims), dtype, [1, 33, 80])
    kind = torch.finfo(dtype.to_torch())
    if data == "dominating-key":
        for q, k in zip(case.q, case.k, strict=True):
            q[:], k[0] = 4.0, 4.0
    elif data == "equal-keys":
        for k in case.k:
            k[:] = k[:1]
    elif data == "zero-queries":
        for q in case.q:
            q[:] = 0.0
    elif data == "subnormal":
        for x in (*case.k, *case.v):
            x.mul_(kind.tiny / 8)
    elif data == "tiny":
        for x in (*case.k, *case.v):
            x.mul_(kind.tiny * (64 if dtype is DType.FLOAT16 else 2**14))
    else:
        for x in (*case.q, *case.k, *case.v):
            x[x < 0.5] = -0.0
    check_steps(target, case, rng, quality)


@clause("attn.accumulate.values@1", LEVEL, capability="attention", facts="attention test F")
@DTYPES
def test_sums_of_values(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Weighted values and weights are summed over long rows in float32 or better: two thousand keys of about equal weight and values of
    one sign, of which a sum in half precision loses the small parts."""
    case = make_case(rng, plain_layer(claims), dtype, [min(2048, claims.attention.max_context)])
    for q, v in zip(case.q, case.v, strict=True):
        q.mul_(1 / 64)
        v.abs_().add_(0.5)
    bench = AttentionBench(target, case, rng=rng)
    check(case, case.last(), bench.run(case.last()), quality)
    if target.claims_to("attention.chunked_prefill"):
        check(case, case.last(20), bench.run(case.last(20)), quality)


@clause("attn.accumulate.products@1", LEVEL, capability="attention", facts="attention test F")
@DTYPES
def test_sums_of_products(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """The products of a query and a key are summed over the head dimension in float32 or better: large products that cancel leave the
    small difference exact."""
    numbers = plain_layer(claims)
    head_dim = max(dim for dim in members(claims.attention.head_dims, 256) if dim % 2 == 0)
    case = make_case(rng, replace(numbers, head_dim=head_dim, scale=0.125), dtype, [17, 60])
    half = head_dim // 2
    for q, k in zip(case.q, case.k, strict=True):
        q[..., half:] = q[..., :half]
        k.mul_(4.0)
        k[..., half:] = -k[..., :half]
        # What is left of the product: an eighth of a small whole number.
        q[..., -1], q[..., half - 1] = 1.0, 0.0
        k[..., -1] = k[..., -1].mul(2.0).round().div(2.0)
    check_steps(target, case, rng, quality)


# The cache


@clause("attn.kv.write@1", LEVEL, capability="attention", facts="attention test O")
@DTYPES
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_write_kv(target: Target, claims: Capabilities, rng: np.random.Generator, dtype: DType, step: str) -> None:
    """`write_kv` puts each token's key and value, bit by bit, into the slot that the mapping names, and changes nothing else in the
    cache."""
    case = make_case(rng, plain_layer(claims), dtype, [300, 40, 2])
    bench = AttentionBench(target, case, rng=rng)
    spans = case.whole() if step == "prefill" else case.last()
    bench.load(before := bench.image(bench.before(spans)))
    laid_out = bench.step(spans)
    bench.write(laid_out, bench.attention.prepare(bench.plan, laid_out.batch))
    assert same_bits(bench.cache, bench.written(before, spans))
    assert bench.guards_intact(), "bytes beside the cache were written"


@clause("attn.kv.idempotent@1", LEVEL, capability="attention", facts="attention test O")
@DTYPES
def test_write_kv_again(target: Target, claims: Capabilities, rng: np.random.Generator, dtype: DType) -> None:
    """Writing the same step's keys and values again changes no bit of the cache."""
    case = make_case(rng, plain_layer(claims), dtype, [50, 3])
    bench = AttentionBench(target, case, rng=rng)
    bench.load(bench.image([0, 0]))
    step = bench.step(case.whole())
    metadata = bench.attention.prepare(bench.plan, step.batch)
    bench.write(step, metadata)
    once = bench.cache.cpu().clone()
    bench.write(step, metadata)
    assert same_bits(bench.cache, once)


@clause("attn.kv.no-slot@1", LEVEL, capability="attention", facts="attention test J")
@DTYPES
def test_slot_of_minus_one(target: Target, claims: Capabilities, rng: np.random.Generator, dtype: DType) -> None:
    """A token whose slot is -1 is not written, whatever stands beside it in the batch."""
    case = make_case(rng, plain_layer(claims), dtype, [20, 20, 20])
    bench = AttentionBench(target, case, rng=rng)
    bench.load(before := bench.image([0, 0, 0]))
    step = bench.step(case.whole(), Layout(silent=frozenset({0, 2})))
    bench.write(step, bench.attention.prepare(bench.plan, step.batch))
    assert same_bits(bench.cache, bench.written(before, [case.whole()[1]]))


@clause("attn.kv.layers@1", LEVEL, capability="attention")
def test_layers_apart(target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality) -> None:
    """Each layer reads and writes its own slice of the cache only."""
    for dtype in dtypes_claimed(claims):
        cases = [make_case(rng, plain_layer(claims), dtype, [20, 45]) for _ in range(3)]
        bench = AttentionBench(target, *cases, rng=rng)
        for spans in cases[0].steps(claims):
            bench.load(bench.image(bench.before(spans)))
            step = bench.step(spans)
            bench.execute(step)
            for index, case in enumerate(cases):
                check(case, spans, bench.outputs(step, index), quality)


@clause("attn.kv.copy@1", LEVEL, capability="attention")
@DTYPES
def test_copy_blocks(target: Target, claims: Capabilities, rng: np.random.Generator, dtype: DType) -> None:
    """`copy_blocks` copies whole blocks in all layers, keys and values, bit by bit, and changes no other block; one block may be the
    source of several copies; no pairs are no work."""
    cases = [make_case(rng, plain_layer(claims), dtype, [100]) for _ in range(2)]
    bench = AttentionBench(target, *cases, rng=rng)
    bench.load(before := bench.image([100]))
    bench.attention.copy_blocks(bench.cache, np.zeros((0, 2), np.int32))
    assert same_bits(bench.cache, before)
    owned, spare = bench.placement.blocks[0], bench.spare()
    pairs = [(owned[0], spare[0]), (owned[0], spare[1]), (owned[-1], spare[2])]
    bench.attention.copy_blocks(bench.cache, np.array(pairs, np.int32))
    view = bench.canonical(before)
    for source, destination in pairs:
        view[:, :, destination] = view[:, :, source]
    assert same_bits(bench.cache, before)
    assert bench.guards_intact(), "bytes beside the cache were written"


@clause("attn.kv.copy-chained@1", LEVEL, capability="attention")
def test_copies_follow_one_another(target: Target, claims: Capabilities, rng: np.random.Generator) -> None:
    """`copy_blocks` copies pairs in their order: a block that one pair has written may be read, and written again, by a later one."""
    dtype = dtypes_claimed(claims)[0]
    tokens = max(100, 2 * claims.attention.default_block_size)
    bench = AttentionBench(target, make_case(rng, plain_layer(claims), dtype, [tokens]), rng=rng)
    bench.load(before := bench.image([tokens]))
    owned, spare = bench.placement.blocks[0], bench.spare()
    pairs = [(owned[0], spare[0]), (spare[0], spare[1]), (owned[1], spare[0]), (spare[0], spare[2])]
    bench.attention.copy_blocks(bench.cache, np.array(pairs, np.int32))
    view = bench.canonical(before)
    for source, destination in pairs:
        view[:, :, destination] = view[:, :, source]
    assert same_bits(bench.cache, before)


@clause("attn.kv.swap@1", LEVEL, capability="attention")
@DTYPES
def test_swap_blocks(target: Target, claims: Capabilities, rng: np.random.Generator, dtype: DType) -> None:
    """`swap_blocks` copies whole blocks in all layers between the device's cache and one on the host, whose number of blocks is another,
    bit by bit and in both directions."""
    cases = [make_case(rng, plain_layer(claims), dtype, [100]) for _ in range(2)]
    bench = AttentionBench(target, *cases, rng=rng)
    bench.load(device := bench.image([100]))
    host = torch.full(bench.spec.shape(2), UNWRITTEN, dtype=dtype.to_torch())
    expected_host = host.clone()
    owned, spare = bench.placement.blocks[0], bench.spare()
    out, back = [(owned[-1], 1), (owned[0], 0)], [(0, spare[2]), (1, spare[0])]
    bench.attention.swap_blocks(bench.cache, host, np.array(out, np.int32))
    synchronise(bench.device)
    for source, destination in out:
        bench.canonical(expected_host)[:, :, destination] = bench.canonical(device)[:, :, source]
    assert same_bits(host, expected_host)
    assert same_bits(bench.cache, device)
    bench.attention.swap_blocks(host, bench.cache, np.array(back, np.int32))
    synchronise(bench.device)
    for source, destination in back:
        bench.canonical(device)[:, :, destination] = bench.canonical(host)[:, :, source]
    assert same_bits(bench.cache, device)
    assert same_bits(host, expected_host)


@clause("attn.batch.empty@1", LEVEL, capability="attention")
def test_empty_batch(target: Target, claims: Capabilities, rng: np.random.Generator) -> None:
    """A step without sequences and tokens is no work and no error."""
    case = make_case(rng, plain_layer(claims), dtypes_claimed(claims)[0], [10])
    bench = AttentionBench(target, case, rng=rng)
    bench.load(before := bench.image([10]))
    assert bench.proceed([]) == []
    assert same_bits(bench.cache, before)


@clause("attn.inputs.untouched@1", LEVEL, capability="attention")
@DTYPES
def test_inputs_are_read_only(target: Target, claims: Capabilities, rng: np.random.Generator, dtype: DType) -> None:
    """`forward` writes to its output alone: queries, keys, values, the cache and the batch's arrays keep every bit."""
    case = make_case(rng, plain_layer(claims), dtype, [40, 25])
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        bench.load(bench.image(bench.before(spans)))
        step = bench.step(spans)
        tensors = (step.q[0], step.k[0], step.v[0])
        inputs = [x.cpu().clone() for x in tensors]
        arrays = {name: getattr(step.batch, name).copy() for name in ARRAYS}
        metadata = bench.attention.prepare(bench.plan, step.batch)
        bench.write(step, metadata)
        cache = bench.cache.cpu().clone()
        bench.forward(step, metadata)
        assert same_bits(bench.cache, cache)
        for tensor, early in zip(tensors, inputs, strict=True):
            assert same_bits(tensor, early)
        changed = [name for name, array in arrays.items() if not np.array_equal(getattr(step.batch, name), array)]
        assert changed == [], "arrays of the batch were written"
