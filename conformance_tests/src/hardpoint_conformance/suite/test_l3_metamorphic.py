"""Level 3: what must not matter: where blocks lie, what lies beside them, strides, padding, chunks, order, leftovers of earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import (
    Capabilities,
    Determinism,
    DeviceAllocator,
    DType,
    StepBatch,
)
from hardpoint_conformance.batches import (
    DTYPES,
    UNWRITTEN,
    AttentionBench,
    Layout,
    Placement,
    Span,
    check,
    dtypes_claimed,
    layer,
    make_case,
    place,
    placed,
    plain_layer,
    planned,
    request_of,
    same_bits,
    synchronise,
)
from hardpoint_conformance.claims import members
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target

LEVEL = Level.ATTENTION_EXTENDED
NAN = float("nan")
LENGTHS = (37, 70, 1, 140, 64)


def assert_same(
    claims: Capabilities, ones: Sequence[Tensor], others: Sequence[Tensor], least: Determinism = Determinism.RUN_TO_RUN
) -> None:
    """Assert that two results are equal bit by bit, if the backend claims as much determinism as that takes."""
    if claims.attention.determinism >= least:
        for one, other in zip(ones, others, strict=True):
            assert same_bits(one, other)


# Where blocks lie


@clause("attn.blocks.permuted@1", LEVEL, capability="attention", facts="attention test H")
@DTYPES
def test_permuted_blocks(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Which physical blocks hold a sequence does not matter: after a permutation of all blocks the results are the same, bit by bit where
    runs repeat."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    one = AttentionBench(target, case, rng=rng)
    moved = one.placement.moved(rng.permutation(one.placement.num_blocks))
    other = AttentionBench(target, case, rng=rng, placement=moved)
    for spans in case.steps(claims):
        ones, others = one.run(spans), other.run(spans)
        check(case, spans, ones, quality)
        check(case, spans, others, quality)
        assert_same(claims, ones, others)


@clause("attn.blocks.order@1", LEVEL, capability="attention", facts="attention test Q")
@pytest.mark.parametrize("order", ["rising", "falling", "interleaved", "wrapped"])
def test_order_of_blocks(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, order: str
) -> None:
    """Block tables that rise, fall, alternate between sequences or begin again at the cache's start are all followed entry by entry."""
    for dtype in dtypes_claimed(claims):
        case = make_case(rng, plain_layer(claims), dtype, [150, 150])
        block_size = AttentionBench(target, case).plan.block_size
        count = -(-150 // block_size)
        ids = np.arange(2 * count)
        if order == "rising":
            blocks = [ids[:count], ids[count:]]
        elif order == "falling":
            blocks = [ids[count:][::-1], ids[:count][::-1]]
        elif order == "interleaved":
            blocks = [ids[::2], ids[1::2]]
        else:
            blocks = [np.roll(ids[:count], 1), np.roll(ids, count // 2)[count:]]
            taken = set(blocks[0].tolist())
            blocks[1] = np.roll([block for block in ids if block not in taken], count // 2)
        placement = placed(rng, [owned.tolist() for owned in blocks], 2 * count + 1)
        bench = AttentionBench(target, case, rng=rng, placement=placement)
        for spans in (case.last(), case.whole()):
            check(case, spans, bench.run(spans), quality)


@clause("attn.blocks.leftovers@1", LEVEL, capability="attention", facts="attention test Q")
@DTYPES
def test_leftover_entries(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Entries of the block table beyond a sequence's blocks, and rows of no sequence, are not followed: other leftovers there give the
    same bits where runs repeat."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    one = AttentionBench(target, case, rng=rng)
    other = AttentionBench(target, case, rng=rng, placement=_with_leftovers(one.placement, 0))
    for spans in case.steps(claims):
        ones, others = one.run(spans), other.run(spans)
        check(case, spans, others, quality)
        assert_same(claims, ones, others)


def _with_leftovers(placement: Placement, block: int) -> Placement:
    """Return a placement in whose table all that is not a sequence's own names one block."""
    table = np.full_like(placement.table, block)
    for row, owned in zip(placement.rows, placement.blocks, strict=True):
        table[row, : len(owned)] = owned
    return Placement(placement.blocks, placement.num_blocks, placement.rows, table)


@clause("attn.blocks.shared@1", LEVEL, capability="attention", facts="attention test M")
@DTYPES
def test_shared_prefix(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Sequences that share the blocks of a common prefix give the same as sequences with copies of them, bit by bit where runs repeat."""
    block_size = claims.attention.default_block_size
    common = 2 * block_size
    case = make_case(rng, plain_layer(claims), dtype, [common + 10, common + 3, common + block_size])
    bench = AttentionBench(target, case, rng=rng, block_size=block_size)
    for tensors in (case.k, case.v):
        for tensor in tensors[1:]:
            tensor[:common] = tensors[0][:common]
    shared = [
        (*bench.placement.blocks[0][: common // block_size], *blocks[common // block_size :])
        for blocks in bench.placement.blocks
    ]
    other = AttentionBench(target, case, rng=rng, placement=placed(rng, shared, bench.placement.num_blocks))
    ones, others = bench.run(case.last()), other.run(case.last())
    check(case, case.last(), others, quality)
    assert_same(claims, ones, others)


@clause("attn.offset.large@1", LEVEL, capability="attention", facts="attention test C")
def test_large_offsets(
    target: Target,
    claims: Capabilities,
    allocator: DeviceAllocator,
    rng: np.random.Generator,
    quality: Quality,
) -> None:
    """Blocks that lie more than 2^31 elements from the start of a layer's cache are read and written where they are. (In a cache as
    large as the claims and the device's free memory permit.)"""
    dtype = min(dtypes_claimed(claims), key=lambda dtype: dtype.itemsize)
    head_dim = members(claims.attention.head_dims, 256)[-1]
    block_size = members(claims.attention.block_sizes, 256)[-1]
    plain = plain_layer(claims)
    heads = 8 * plain.num_heads // plain.num_kv_heads
    case = make_case(rng, layer(heads, 8, head_dim), dtype, [block_size + 3, 2 * block_size, 5])
    plan = planned(target.attention(), request_of([case.layer], dtype, block_size=block_size))
    bytes_per_block = plan.kv_cache.block_bytes
    wanted = 2**31 // (8 * head_dim * block_size) + 8
    if claims.attention.max_cache_elements is not None:
        wanted = min(wanted, claims.attention.max_cache_elements // (8 * head_dim * block_size))
    num_blocks = min(wanted, int(allocator.memory_info().free * 0.8) // bytes_per_block)
    # Not touched but where the sequences lie: on the host, pages that nobody touches take no memory.
    cache = torch.empty(
        plan.kv_cache.shape(num_blocks), dtype=dtype.to_torch(), device=torch.device(target.device.torch_device)
    )
    last = num_blocks - 1
    placement = placed(rng, [(last, 0), (1, last - 2), (last - 1,)], num_blocks)
    bench = AttentionBench(target, case, rng=rng, block_size=block_size, placement=placement, cache=cache)
    check(case, case.whole(), bench.proceed(case.whole()), quality)
    check(case, case.last(), bench.proceed(case.last()), quality)
    pairs = np.array([(last - 1, 2)], np.int32)
    bench.attention.copy_blocks(bench.cache, pairs)
    view = bench.canonical(bench.cache)
    assert same_bits(view[:, :, 2, :, :5], view[:, :, last - 1, :, :5])


# What lies beside: anything, NaN included


def _poisoned(
    target: Target,
    claims: Capabilities,
    rng: np.random.Generator,
    quality: Quality,
    dtype: DType,
    where: str,
    value: float,
) -> None:
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    block_size = AttentionBench(target, case).plan.block_size
    scattered = place(rng, case.lengths, block_size, first=1)
    bench = AttentionBench(target, case, rng=rng, placement=_with_leftovers(scattered, 0))
    for spans in case.steps(claims):
        clean = bench.image(bench.before(spans))
        bench.load(clean)
        expected = bench.proceed(spans)
        check(case, spans, expected, quality)
        view = bench.canonical(clean)
        if where == "null":
            view[:, :, 0] = value
        elif where == "unused":
            view[:, :, [block for block in bench.spare() if block]] = value
        else:
            for seq, length in enumerate(case.lengths):
                if length % block_size:
                    view[:, :, bench.placement.blocks[seq][-1], :, length % block_size :] = value
        bench.load(clean)
        outs = bench.proceed(spans)
        check(case, spans, outs, quality)
        assert_same(claims, outs, expected)


POISONS = pytest.mark.parametrize("value", [NAN, float("inf")], ids=["nan", "inf"])


@clause("attn.poison.null-block@1", LEVEL, capability="attention", facts="attention test I")
@DTYPES
@POISONS
def test_poison_in_the_null_block(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, value: float
) -> None:
    """A block that fills up the block table behind each sequence's own may hold NaN or infinity: it changes no bit of a result."""
    _poisoned(target, claims, rng, quality, dtype, "null", value)


@clause("attn.poison.unused-block@1", LEVEL, capability="attention", facts="attention test I")
@DTYPES
@POISONS
def test_poison_in_unused_blocks(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, value: float
) -> None:
    """Blocks that no sequence owns may hold NaN or infinity: they change no bit of a result."""
    _poisoned(target, claims, rng, quality, dtype, "unused", value)


@clause("attn.poison.tail@1", LEVEL, capability="attention", facts="attention test I")
@DTYPES
@POISONS
def test_poison_in_tails(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, value: float
) -> None:
    """Slots of a sequence's last block beyond its context may hold NaN or infinity: a weight of zero times NaN would be NaN, so they must
    not be read as values at all."""
    _poisoned(target, claims, rng, quality, dtype, "tail", value)


@clause("attn.poison.window@1", LEVEL, capability="attention.sliding_window", facts="attention test I")
@DTYPES
def test_huge_values_behind_the_window(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Keys and values that the window hides change no bit of a result, even where they are a thousand times as large as all others."""
    window = 20
    case = make_case(rng, plain_layer(claims, window=window), dtype, [130, 45])
    bench = AttentionBench(target, case, rng=rng)
    expected = bench.run(case.last())
    check(case, case.last(), expected, quality)
    for x in (*case.k, *case.v):
        x[: len(x) - window] = 1000.0
    outs = bench.run(case.last())
    check(case, case.last(), outs, quality)
    assert_same(claims, outs, expected)


@clause("attn.window.freed-blocks@1", LEVEL, capability="attention.sliding_window", facts="attention test I")
@DTYPES
@POISONS
def test_freed_blocks_before_the_window(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, value: float
) -> None:
    """Blocks that lie before the window of all of a step's queries were given back: whatever their entries of the block table name, and
    whatever is there, NaN included, changes no bit of a result."""
    window = 20
    case = make_case(rng, plain_layer(claims, window=window), dtype, [130, 45, 200])
    bench = AttentionBench(target, case, rng=rng)
    size, nobody = bench.plan.block_size, bench.spare()[0]
    for queries in (1, 9):
        spans = [Span(seq, length - queries, length) for seq, length in enumerate(case.lengths)]
        expected = bench.run(spans)
        check(case, spans, expected, quality)
        image = bench.image(bench.before(spans))
        table = bench.placement.table.copy()
        for span in spans:
            freed = max(span.begin - window + 1, 0) // size
            bench.canonical(image)[:, :, [nobody, *bench.placement.blocks[span.seq][:freed]]] = value
            table[bench.placement.rows[span.seq], :freed] = nobody
        other = AttentionBench(target, case, rng=rng, placement=replace(bench.placement, table=table))
        other.load(image)
        outs = other.proceed(spans)
        check(case, spans, outs, quality)
        assert_same(claims, outs, expected)


@clause("attn.poison.padding@1", LEVEL, capability="attention", facts="attention test I, attention test J")
@DTYPES
def test_poison_in_padding(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Queries, keys and values of padding tokens may be NaN: they change no result and are not written to the cache."""
    case = make_case(rng, plain_layer(claims), dtype, [37, 70, 64])
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        outs = bench.run(spans, Layout(padding_tokens=5, padding=NAN))
        check(case, spans, outs, quality)
        assert int(bench.cache.isnan().sum()) == 0, "NaN was written to the cache"


# Padding, bounds, strides


@clause("attn.padding.tokens@1", LEVEL, capability="attention", facts="attention test J")
@DTYPES
@pytest.mark.parametrize("tokens", [1, 13])
def test_padding_tokens(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, tokens: int
) -> None:
    """Tokens at the end of a batch that belong to no sequence (slot -1) are not written to the cache, change no result, and leave a finite
    output: what was there, or a number."""
    case = make_case(rng, plain_layer(claims), dtype, [37, 70, 64])
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        bench.load(image := bench.image(bench.before(spans)))
        step = bench.step(spans, Layout(padding_tokens=tokens))
        bench.execute(step)
        check(case, spans, bench.outputs(step), quality)
        assert int((~step.out[0][-tokens:].isfinite()).sum()) == 0, "outputs of padding tokens are not finite"
        assert same_bits(bench.cache, bench.written(image, spans))


@clause("attn.padding.sequences@1", LEVEL, capability="attention", facts="attention test J")
@DTYPES
@pytest.mark.parametrize("seqs", [1, 6])
def test_padding_sequences(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, seqs: int
) -> None:
    """Sequences at the end of a batch without tokens and context change nothing, in the cache or in a result, also beside padding
    tokens."""
    case = make_case(rng, plain_layer(claims), dtype, [37, 70, 64])
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        bench.load(image := bench.image(bench.before(spans)))
        step = bench.step(spans, Layout(padding_tokens=seqs // 2, padding_seqs=seqs))
        bench.execute(step)
        check(case, spans, bench.outputs(step), quality)
        assert same_bits(bench.cache, bench.written(image, spans))


@clause("attn.bounds.sentinels@1", LEVEL, capability="attention", facts="attention test K")
@DTYPES
@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
def test_sentinels(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, strided: bool
) -> None:
    """A step writes its tokens' slots and its outputs' rows and nothing else: neither before or after the cache and the outputs, nor
    between the rows of an output with strides, nor elsewhere in the cache."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        bench.load(image := bench.image(bench.before(spans)))
        step = bench.step(spans, Layout(strided=strided))
        bench.execute(step)
        check(case, spans, bench.outputs(step), quality)
        assert bench.guards_intact(), "bytes beside the cache were written"
        assert step.guards_intact(), "bytes beside the outputs were written"
        assert same_bits(bench.cache, bench.written(image, spans))
        if strided:
            whole, heads = step.buffers[0].tensor, case.layer.num_heads
            assert set(whole[:, :1].flatten().tolist()) == {UNWRITTEN}, "values before the outputs were written"
            assert set(whole[:, 1 + heads :].flatten().tolist()) == {UNWRITTEN}, (
                "values behind the outputs were written"
            )


@clause("attn.layout.strides@1", LEVEL, capability="attention", facts="attention test L")
@DTYPES
def test_strides(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Queries, keys and values that are slices of one fused projection, with strides between tokens and an offset into their storage,
    and outputs inside a wider buffer, give the oracle's result."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        check(case, spans, bench.run(spans, Layout(strided=True)), quality)


# Steps that follow each other


@clause("attn.decode.incremental@1", LEVEL, capability="attention", facts="attention test N")
@DTYPES
def test_token_by_token(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Prompts and then decodes, one token a step over the cache that earlier steps wrote, give what the oracle gives for the whole
    sequences."""
    case = make_case(rng, plain_layer(claims), dtype, [30, 45])
    bench = AttentionBench(target, case, rng=rng)
    bench.load(bench.image([0, 0]))
    starts = (14, 31)
    spans = [Span(seq, 0, start) for seq, start in enumerate(starts)]
    for _ in range(14):
        check(case, spans, bench.proceed(spans), quality)
        spans = [Span(span.seq, span.end, span.end + 1) for span in spans]


@clause("attn.chunking.invariant@1", LEVEL, capability="attention.chunked_prefill", facts="attention test N")
@DTYPES
@pytest.mark.parametrize("pieces", [2, 5, 9])
def test_chunks(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, pieces: int
) -> None:
    """A prompt computed in pieces, cut anywhere, gives for every token what the oracle gives for the prompt in one piece."""
    case = make_case(rng, plain_layer(claims), dtype, [160])
    bench = AttentionBench(target, case, rng=rng)
    bench.load(bench.image([0]))
    cuts = sorted(rng.choice(np.arange(1, 160), pieces - 1, replace=False).tolist())
    for begin, end in zip([0, *cuts], [*cuts, 160], strict=True):
        check(case, [Span(0, begin, end)], bench.proceed([Span(0, begin, end)]), quality)


@clause("attn.batch.order@1", LEVEL, capability="attention", facts="attention test N")
@DTYPES
def test_order_of_sequences(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """The order of sequences in a batch does not matter: each has the oracle's result in any, and the same bits where the backend is
    batch-invariant."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        ones = bench.run(spans)
        others = bench.run(spans, Layout(order=tuple(rng.permutation(len(spans)).tolist())))
        check(case, spans, others, quality)
        assert_same(claims, ones, others, Determinism.BATCH_INVARIANT)


@clause("attn.buffers.reused@1", LEVEL, capability="attention", facts="attention test R")
@DTYPES
def test_host_buffers_are_reused(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """The batch's arrays belong to the scheduler again as soon as `forward` has returned: what is written to them then, before the device
    has finished, changes no result."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    bench = AttentionBench(target, case, rng=rng)
    for spans in case.steps(claims):
        bench.load(bench.image(bench.before(spans)))
        step = bench.step(spans)
        starts = step.batch.query_start.copy()
        bench.execute(step)
        for field in fields(StepBatch):
            array = getattr(step.batch, field.name)
            if isinstance(array, np.ndarray):
                array[...] = 0
        synchronise(bench.device)
        step.batch.query_start[:] = starts
        check(case, spans, bench.outputs(step), quality)


@clause("attn.metadata.fresh@1", LEVEL, capability="attention", facts="attention test P")
@DTYPES
def test_metadata_is_fresh(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """`prepare` looks at the batch anew each time: the same arrays with other contents, as the scheduler's buffers have in the next step,
    give the new step's result."""
    case = make_case(rng, plain_layer(claims), dtype, [30, 61, 50, 45, 90, 33])
    bench = AttentionBench(target, case, rng=rng)
    first = [Span(seq, case.lengths[seq] - 1, case.lengths[seq]) for seq in (0, 1, 2)]
    second = [Span(seq, case.lengths[seq] - 1, case.lengths[seq]) for seq in (4, 5, 3)]
    bench.load(bench.image([length - 1 for length in case.lengths]))
    one, two = bench.step(first), bench.step(second)
    bench.execute(one)
    check(case, first, bench.outputs(one), quality)
    for field in fields(StepBatch):
        array = getattr(one.batch, field.name)
        if isinstance(array, np.ndarray) and array.size:
            array[...] = getattr(two.batch, field.name)
    two.batch = one.batch
    bench.execute(two)
    check(case, second, bench.outputs(two), quality)


@clause("attn.metadata.moved@1", LEVEL, capability="attention", facts="attention test P")
@DTYPES
def test_blocks_move_between_steps(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """A sequence whose blocks were moved between two steps, as after a swap, is read at its new place."""
    case = make_case(rng, plain_layer(claims), dtype, [50, 80])
    bench = AttentionBench(target, case, rng=rng)
    check(case, case.last(), bench.run(case.last()), quality)
    for _ in range(2):
        bench.placement = bench.placement.moved(rng.permutation(bench.placement.num_blocks))
        check(case, case.last(), bench.run(case.last()), quality)


@clause("attn.metadata.smaller@1", LEVEL, capability="attention", facts="attention test P")
@DTYPES
def test_batches_of_other_sizes(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Steps with fewer and with more sequences and tokens than the one before leave nothing of it in their results."""
    case = make_case(rng, plain_layer(claims), dtype, [30, 61, 50, 45, 90, 33])
    bench = AttentionBench(target, case, rng=rng)
    for count in (6, 1, 4, 2, 6):
        for spans in (case.last()[:count], case.whole()[:count]):
            check(case, spans, bench.run(spans), quality)
