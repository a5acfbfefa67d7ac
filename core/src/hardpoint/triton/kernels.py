"""Attention kernels in Triton: one source for every device that Triton compiles for, and for its interpreter.

A layer's cache is [2, blocks, kv_heads, block_size, head_dim]; `keys` and `values` point to its two halves, `block_stride` is
kv_heads * block_size * head_dim. Work is split over (sequence, KV head): the query heads of a group are rows of one tile, row r being
head r % GROUP of token r // GROUP, so that keys and values are read once for all of them. The softmax is the online one of
FlashAttention (Dao et al., 2022) in powers of two, in float32; a context is split over programs and merged as in Flash-Decoding (Dao et
al., 2023). Offsets into a cache have 64 bits.

A result depends on the sequence alone: tiles begin at multiples of BLOCK_N of its positions, and `_split_length` depends on nothing but
its length and constants. `hardpoint.triton.work` mirrors it on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1.0e30)
"""Below every logit, and finite: the difference of two is not NaN."""


@triton.jit
def _tanh(x):
    """Hyperbolic tangent, accurate near zero where 1 - exp(-2x) cancels: there the Taylor series to x^9, elsewhere by the exponential."""
    y = x * x
    series = x * (
        1.0
        + y * (-0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * 0.021869488536155203)))
    )
    e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(y < 0.0625, series, tl.where(x < 0.0, -large, large))


@triton.jit
def _dot(a, b, accumulator, SINGLE: tl.constexpr):
    """a @ b + accumulator in float32. SINGLE: the operands are widened first, which changes no product."""
    if SINGLE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def _decode_e4m3(bits):
    """Return 2^-8 times the numbers that bytes hold as e4m3 (1 sign, 4 exponent, 3 mantissa bits, bias 7), as float16 and exactly.

    Float16 has the bias 15 and the same order of bits, so the byte's exponent and mantissa, moved, are the number times 2^-8. The one
    encoding without a number, all ones, is NaN.
    """
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float16, bitcast=True))


@triton.jit
def _encode_e4m3(x):
    """Return float32 numbers as e4m3 bytes: rounded to the nearest, ties to even; beyond 448 the largest; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Rounds at bit 20, where three bits of the mantissa are left; the difference of the biases is 120.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # At 2^14 a float32's last bit is worth 2^-9, the smallest subnormal number of e4m3.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(size < 0x3C800000, subnormal, normal)
    code = tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _load_rows(base, offsets, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load rows of D elements at `offsets` as [rows, D_PAD]; beyond D they are zero."""
    d = tl.arange(0, D_PAD)
    pointers = base + offsets[:, None] + d[None, :]
    if D == D_PAD:
        return tl.load(pointers)
    return tl.load(pointers, mask=d[None, :] < D, other=0.0)


@triton.jit
def _operand(x, dtype: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Return elements of the cache as operands of a product."""
    if KV_FORMAT == "bits":
        return _decode_e4m3(x).to(dtype)
    return x.to(dtype)


@triton.jit
def _attend_tile(
    q, state_max, state_sum, accumulator, keys, values, table, key, key_low, key_high, position, slope,
    block_stride, scale, cap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, KV_FORMAT: tl.constexpr, SINGLE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys `key..key + BLOCK_N` into the state of the online softmax. MASKED: not every row sees every one of them.

    Keys below `key_low` or above `key_high`, which no row sees, are not read: in their place stands one that is, with a weight of zero.
    So no load needs a mask, and nothing that may be NaN comes near a sum.
    """
    n = key + tl.arange(0, BLOCK_N)
    there = n
    if MASKED:
        there = tl.minimum(tl.maximum(n, key_low), key_high)
    block = tl.load(table + there // BLOCK_SIZE)
    offsets = block.to(tl.int64) * block_stride + (there % BLOCK_SIZE) * D
    k = _operand(_load_rows(keys, offsets, D, D_PAD), q.dtype, KV_FORMAT)
    zero = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
    logits = _dot(q, tl.trans(k), zero, SINGLE) * scale
    if SOFT_CAP:
        logits = _tanh(logits) * cap
    distance = position[:, None] - n[None, :]
    if ALIBI:
        logits -= slope[:, None] * distance.to(tl.float32)
    if MASKED:
        visible = distance >= 0
        if WINDOW:
            visible = visible & (distance < window)
        logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(state_max, tl.max(logits, 1))
    shrink = tl.exp2(state_max - new_max)
    weights = tl.exp2(logits - new_max[:, None])
    state_sum = state_sum * shrink + tl.sum(weights, 1)
    v = _operand(_load_rows(values, offsets, D, D_PAD), q.dtype, KV_FORMAT)
    accumulator = _dot(weights.to(q.dtype), v, accumulator * shrink[:, None], SINGLE)
    return new_max, state_sum, accumulator


@triton.jit
def _attend(
    q, position, head, keys, values, table, key_begin, key_end, first_position, last_position, slopes,
    block_stride, scale, cap, window,
    BLOCK_M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, KV_FORMAT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Attend over the keys `key_begin..key_end`, key_begin at a tile's begin; return the state: maximum, sum, weighted values.

    `first_position` and `last_position` are those of the rows: between what the last row's window hides and what the first row does not
    see yet, tiles need no mask. key_end is a tile's end, or no row is behind it.
    """
    state_max = tl.full([BLOCK_M], _LOWEST, tl.float32)
    state_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    slope = state_sum
    if ALIBI:
        slope = tl.load(slopes + head) * _LOG2_E
    open_begin = key_begin
    key_low = key_begin
    if WINDOW:
        open_begin = tl.maximum(key_begin, tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N)
        key_low = tl.maximum(key_begin, first_position - window + 1)
    seen_by_all = tl.minimum(first_position + 1, key_end)
    open_end = tl.maximum(open_begin, seen_by_all // BLOCK_N * BLOCK_N)
    for key in tl.range(open_begin, open_end, BLOCK_N):
        state_max, state_sum, accumulator = _attend_tile(
            q, state_max, state_sum, accumulator, keys, values, table, key, key_low, key_end - 1, position, slope, block_stride, scale,
            cap, window, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW, SOFT_CAP, ALIBI, KV_FORMAT, SINGLE, False,
        )  # fmt: skip
    # The tiles before and behind the open ones, in one loop.
    skipped = open_end - open_begin
    for edge in tl.range(key_begin, key_end - skipped, BLOCK_N):
        key = tl.where(edge < open_begin, edge, edge + skipped)
        state_max, state_sum, accumulator = _attend_tile(
            q, state_max, state_sum, accumulator, keys, values, table, key, key_low, key_end - 1, position, slope, block_stride, scale,
            cap, window, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW, SOFT_CAP, ALIBI, KV_FORMAT, SINGLE, True,
        )  # fmt: skip
    return state_max, state_sum, accumulator


@triton.jit
def _with_sink(state_max, state_sum, sinks, head):
    """Return the sum with `exp(sink)` of the rows' heads added, and by what the values shrink with it."""
    sink = tl.load(sinks + head) * _LOG2_E
    new_max = tl.maximum(state_max, sink)
    shrink = tl.exp2(state_max - new_max)
    return state_sum * shrink + tl.exp2(sink - new_max), shrink


@triton.jit
def _store_rows(out, offsets, numbers, valid, D: tl.constexpr, D_PAD: tl.constexpr):
    d = tl.arange(0, D_PAD)
    mask = valid[:, None] & (d[None, :] < D)
    tl.store(out + offsets[:, None] + d[None, :], numbers.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _splits(
    context, window, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr
):
    """Return the first tile of a decode's visible keys, the end of its tiles, and the tiles of one split."""
    first = context * 0
    if WINDOW:
        first = tl.maximum(context - window, 0) // BLOCK_N
    end = tl.cdiv(context, BLOCK_N)
    length = tl.maximum(tl.cdiv(end - first, MAX_SPLITS), MIN_TILES)
    return first, end, length


@triton.jit(do_not_specialize=["kv_heads", "partial_splits", "window"])
def decode(
    q, keys, values, out, header, contexts, items, tables, partial, partial_state, sinks, slopes,
    q_stride, out_stride, block_stride, kv_heads, partial_splits, scale, cap, value_scale, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    KV_FORMAT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with one query each, split over their contexts.

    Args:
        header: int32; [0] is the number of items, [1] the entries of a row of `tables`: read here, so that a captured launch follows them.
        items: int32[items, 2], (sequence, split); a program takes every num_programs-th pair of an item and a KV head.
        tables: int32[sequences, header[1]], blocks.
        partial: float32[sequences, heads, partial_splits, D], weighted values of a split; partial_state the same with 2 instead of D,
            its maximum and sum. Used by sequences with more than one split.
        scale: of the logits, log2(e) included; with a soft cap without it, and divided by the cap, and `cap` is cap * log2(e).
        value_scale: of the values.
    """
    work_end = tl.load(header) * kv_heads
    stride = tl.load(header + 1)
    row = tl.arange(0, BLOCK_M)
    valid = row < GROUP
    for work in tl.range(tl.program_id(0), work_end, tl.num_programs(0)):
        item = work // kv_heads
        kv_head = work % kv_heads
        seq = tl.load(items + 2 * item)
        split = tl.load(items + 2 * item + 1)
        context = tl.load(contexts + seq)
        first, end, length = _splits(context, window, BLOCK_N, MIN_TILES, MAX_SPLITS, WINDOW)
        begin = first + split * length
        if begin < end:
            key_begin = begin * BLOCK_N
            key_end = tl.minimum(tl.minimum(begin + length, end) * BLOCK_N, context)
            head = kv_head * GROUP + tl.minimum(row, GROUP - 1)
            position = tl.zeros([BLOCK_M], tl.int32) + (context - 1)
            offset = seq.to(tl.int64) * q_stride + head * D
            rows = _load_rows(q, offset, D, D_PAD)
            part = kv_head.to(tl.int64) * (BLOCK_SIZE * D)
            state_max, state_sum, accumulator = _attend(
                rows, position, head, keys + part, values + part, tables + seq.to(tl.int64) * stride, key_begin, key_end, context - 1,
                context - 1, slopes, block_stride, scale, cap, window, BLOCK_M, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW, SOFT_CAP, ALIBI,
                KV_FORMAT, SINGLE,
            )  # fmt: skip
            if end - first <= length:
                if SINKS:
                    state_sum, shrink = _with_sink(state_max, state_sum, sinks, head)
                    accumulator = accumulator * shrink[:, None]
                result = accumulator * (value_scale / state_sum)[:, None]
                _store_rows(out, seq.to(tl.int64) * out_stride + head * D, result, valid, D, D_PAD)
            else:
                place = (seq.to(tl.int64) * (kv_heads * GROUP) + head) * partial_splits + split
                _store_rows(partial, place * D, accumulator, valid, D, D_PAD)
                tl.store(partial_state + 2 * place, state_max, mask=valid)
                tl.store(partial_state + 2 * place + 1, state_sum, mask=valid)


@triton.jit(do_not_specialize=["heads", "partial_splits", "window"])
def merge(
    out, contexts, partial, partial_state, sinks, out_stride, heads, partial_splits, value_scale, window,
    BLOCK_N: tl.constexpr, D: tl.constexpr, D_PART: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of decodes that have several. The grid is (sequences, heads, parts of D)."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(contexts + seq)
    first, end, length = _splits(context, window, BLOCK_N, MIN_TILES, MAX_SPLITS, WINDOW)
    splits = tl.cdiv(end - first, length)
    if splits > 1:
        split = tl.arange(0, SPLITS_PAD)
        d = tl.program_id(2) * D_PART + tl.arange(0, D_PART)
        place = (seq.to(tl.int64) * heads + head) * partial_splits + split
        there = split < splits
        maxima = tl.load(partial_state + 2 * place, mask=there, other=_LOWEST)
        sums = tl.load(partial_state + 2 * place + 1, mask=there, other=0.0)
        largest = tl.max(maxima, 0)
        if SINKS:
            sink = tl.load(sinks + head) * _LOG2_E
            largest = tl.maximum(largest, sink)
        weights = tl.exp2(maxima - largest)
        total = tl.sum(weights * sums, 0)
        if SINKS:
            total += tl.exp2(sink - largest)
        mask = there[:, None] & (d[None, :] < D)
        parts = tl.load(partial + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        result = tl.sum(parts * weights[:, None], 0) * (value_scale / total)
        tl.store(out + seq.to(tl.int64) * out_stride + head * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["kv_heads", "window"])
def prefill(
    q, keys, values, out, header, contexts, starts, items, tables, sinks, slopes,
    q_stride, out_stride, block_stride, kv_heads, scale, cap, value_scale, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    KV_FORMAT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with any number of queries: prompts, chunks of them, a few queries at the end of a context.

    Args:
        starts: int32[sequences + 1], first token of each sequence.
        items: int32[items, 2], (sequence, tile of BLOCK_M rows); the grid is (items * kv_heads,). The others are as in `decode`.
    """
    work = tl.program_id(0)
    item = work // kv_heads
    kv_head = work % kv_heads
    seq = tl.load(items + 2 * item)
    tile = tl.load(items + 2 * item + 1)
    context = tl.load(contexts + seq)
    start = tl.load(starts + seq)
    queries = tl.load(starts + seq + 1) - start
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < queries * GROUP
    token = tl.minimum(row // GROUP, queries - 1)
    head = kv_head * GROUP + row % GROUP
    before = context - queries
    position = before + token
    first_position = before + tile * BLOCK_M // GROUP
    last_position = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
    key_begin = context * 0
    if WINDOW:
        key_begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    rows = _load_rows(q, (start + token).to(tl.int64) * q_stride + head * D, D, D_PAD)
    part = kv_head.to(tl.int64) * (BLOCK_SIZE * D)
    state_max, state_sum, accumulator = _attend(
        rows, position, head, keys + part, values + part, tables + seq.to(tl.int64) * tl.load(header + 1), key_begin, last_position + 1,
        first_position, last_position, slopes, block_stride, scale, cap, window, BLOCK_M, D, D_PAD, BLOCK_N, BLOCK_SIZE, WINDOW,
        SOFT_CAP, ALIBI, KV_FORMAT, SINGLE,
    )  # fmt: skip
    if SINKS:
        state_sum, shrink = _with_sink(state_max, state_sum, sinks, head)
        accumulator = accumulator * shrink[:, None]
    result = accumulator * (value_scale / state_sum)[:, None]
    _store_rows(out, (start + token).to(tl.int64) * out_stride + head * D, result, valid, D, D_PAD)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv(
    k, v, keys, values, slots, num_tokens, k_stride, v_stride, block_stride, key_factor, value_factor,
    TOKENS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr,
):  # fmt: skip
    """Write keys and values to their slots; a negative slot is not written. The grid is (tokens / TOKENS, kv_heads).

    Args:
        key_factor, value_factor: what is written is that times the number, where KV_FORMAT is not "same".
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    there = slot >= 0
    place = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * D
    read = tl.minimum(token, num_tokens - 1).to(tl.int64)
    key = _load_rows(k, read * k_stride + kv_head * D, D, D_PAD)
    value = _load_rows(v, read * v_stride + kv_head * D, D, D_PAD)
    if KV_FORMAT != "same":
        key = _encode_e4m3(key.to(tl.float32) * key_factor)
        value = _encode_e4m3(value.to(tl.float32) * value_factor)
    _store_rows(keys, place, key, there, D, D_PAD)
    _store_rows(values, place, value, there, D, D_PAD)


@triton.jit(do_not_specialize=["source_blocks", "destination_blocks", "words"])
def copy_blocks(source, destination, pairs, source_blocks, destination_blocks, words, WORDS: tl.constexpr):
    """Copy blocks, as words, between caches [planes, blocks, words]. The grid is (pairs, planes, words / WORDS).

    Args:
        pairs: int32[pairs, 2], (source, destination).
    """
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    from_block = plane * source_blocks + tl.load(pairs + 2 * pair)
    to_block = plane * destination_blocks + tl.load(pairs + 2 * pair + 1)
    inside = word < words
    numbers = tl.load(source + from_block * words + word, mask=inside)
    tl.store(destination + to_block * words + word, numbers, mask=inside)
