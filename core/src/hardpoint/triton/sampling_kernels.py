"""Sampling in Triton: a program has one row of logits, and reads it in blocks as often as it must; nothing is sorted.

`hardpoint.sampling.reference` defines the tokens. Sums are of integers, so a row gives the same token whatever the block's size.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table's parameters (hardpoint.interfaces.sampling.Column).
INVERSE_TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
LOG_MIN_P = tl.constexpr(2)
TOP_K = tl.constexpr(3)
REPETITION = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
MIN_TOKENS = tl.constexpr(7)
ALLOWED_MASK = tl.constexpr(8)
STOP_MASK = tl.constexpr(9)
BIAS = tl.constexpr(10)
HISTORY = tl.constexpr(11)
COLUMNS = tl.constexpr(12)

UNIT = tl.constexpr(1073741824.0)
NO_TOKEN = tl.constexpr(-1)
NOT_FINITE = tl.constexpr(-2)


@triton.jit
def _number(row, column):
    """Return the float32 in a column of a row of parameters."""
    return tl.load(row + column).to(tl.float32, bitcast=True)


@triton.jit
def _logits(x, ids, inside, row, early, masks, biases, history, width, words):
    """Return a block of logits after masks, biases and penalties; minus infinity outside of the row."""
    values = tl.load(x + ids, mask=inside, other=float("-inf"))
    allowed = tl.load(row + ALLOWED_MASK).to(tl.int64)
    if allowed >= 0:
        bits = tl.load(masks + allowed * words + (ids >> 5), mask=inside, other=0) >> (ids & 31)
        values = tl.where((bits & 1) != 0, values, float("-inf"))
    stop = tl.load(row + STOP_MASK).to(tl.int64)
    if early & (stop >= 0):
        bits = tl.load(masks + stop * words + (ids >> 5), mask=inside, other=0) >> (ids & 31)
        values = tl.where((bits & 1) != 0, values, float("-inf"))
    bias = tl.load(row + BIAS).to(tl.int64)
    if bias >= 0:
        added = tl.load(biases + bias * width + ids, mask=inside, other=0.0)
        values = tl.where(values != float("-inf"), values + added, values)
    past = tl.load(row + HISTORY).to(tl.int64)
    if past >= 0:
        seen = tl.load(history + past * width + ids, mask=inside, other=0)
        repetition = _number(row, REPETITION)
        changed = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
        changed = changed - _number(row, FREQUENCY) * (seen >> 1).to(tl.float32)
        changed = changed - tl.where(seen > 1, _number(row, PRESENCE), 0.0)
        values = tl.where(seen > 0, changed, values)
    return values


@triton.jit
def _weights(values, best, inverse, log_min_p):
    """Return the weights of logits, int64."""
    scaled = (values - best) * inverse
    weights = (tl.exp(scaled) * UNIT).to(tl.int64)
    return tl.where(scaled >= log_min_p, weights, 0)


@triton.jit
def _order(values):
    """Return numbers that rise with the logits, int64; both zeros have the same."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def sample(
    logits, step, parameters, masks, biases, history, last_tokens, tokens,
    stride, rows, width, words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the token of each row of logits, and count it. The grid is (rows,); step is int64[3, rows]: table row, tokens so far, draw."""
    i = tl.program_id(0).to(tl.int64)
    x = logits + i * stride
    table_row = tl.load(step + i)
    row = parameters + table_row * COLUMNS
    early = tl.load(step + rows + i) < tl.load(row + MIN_TOKENS)
    inverse = _number(row, INVERSE_TEMPERATURE)
    lanes = tl.arange(0, BLOCK)

    # The highest logit, and the lowest id that has it.
    best = tl.full((), float("-inf"), tl.float32)
    first = tl.full((), 0, tl.int32)
    not_finite = tl.full((), 0, tl.int32)
    for start in range(0, width, BLOCK):
        ids = start + lanes
        inside = ids < width
        values = _logits(x, ids, inside, row, early, masks, biases, history, width, words)
        bad = (values != values) | (values == float("inf"))
        not_finite = tl.maximum(not_finite, tl.max(bad.to(tl.int32), 0))
        high = tl.max(tl.where(bad, float("-inf"), values), 0)
        where = tl.min(tl.where((values == high) & inside, ids, width), 0)
        first = tl.where(high > best, where, first)
        best = tl.maximum(best, high)

    token = first.to(tl.int64)
    if best == float("-inf"):
        token = tl.full((), NO_TOKEN, tl.int64)
    if not_finite != 0:
        token = tl.full((), NOT_FINITE, tl.int64)
    if (token >= 0) & (inverse > 0.0):
        token = _drawn(
            x, row, early, masks, biases, history, width, words, best, inverse, tl.load(step + 2 * rows + i), BLOCK
        )
    tl.store(tokens + i, token)
    tl.store(last_tokens + table_row, tl.maximum(token, 0))
    past = tl.load(row + HISTORY).to(tl.int64)
    if (past >= 0) & (token >= 0):
        count = history + past * width + token
        tl.store(count, tl.load(count) + 2)


@triton.jit
def _drawn(x, row, early, masks, biases, history, width, words, best, inverse, draw, BLOCK: tl.constexpr):
    """Return a token drawn in proportion to the weights that min_p, top_k and top_p leave."""
    lanes = tl.arange(0, BLOCK)
    log_min_p = _number(row, LOG_MIN_P)
    top_k = tl.load(row + TOP_K).to(tl.int64)
    top_p = tl.load(row + TOP_P).to(tl.int64)
    # What is kept: all above `bound`, and the first `ties` of those that equal it.
    lowest = tl.full((), -(1 << 31), tl.int64)
    bound, ties = lowest, tl.full((), 0, tl.int64)
    if top_k < width:
        # The highest bound that as many tokens reach as are wanted, by halving.
        bound, above = _reached(
            x, row, early, masks, biases, history, width, words, best, inverse, log_min_p, top_k, bound, ties,
            COUNTS=True, BLOCK=BLOCK,
        )  # fmt: skip
        ties = top_k - above
    if top_p < 1 << 24:
        total = _total(
            x, row, early, masks, biases, history, width, words, best, inverse, log_min_p, bound, ties, BLOCK
        )
        goal = tl.maximum((total >> 24) * top_p + (((total & 0xFFFFFF) * top_p + 0xFFFFFF) >> 24), 1)
        bound, above = _reached(
            x, row, early, masks, biases, history, width, words, best, inverse, log_min_p, goal, bound, ties,
            COUNTS=False, BLOCK=BLOCK,
        )  # fmt: skip
        each = _weight_at(bound, best, inverse, log_min_p)
        ties = (goal - above + each - 1) // tl.maximum(each, 1)
    total = _total(x, row, early, masks, biases, history, width, words, best, inverse, log_min_p, bound, ties, BLOCK)
    high, low = total >> 24, total & 0xFFFFFF
    draw_high, draw_low = draw >> 24, draw & 0xFFFFFF
    target = high * draw_high + ((high * draw_low + low * draw_high + ((low * draw_low) >> 24)) >> 24)

    token = tl.full((), 0, tl.int64)
    found = tl.full((), 0, tl.int32)
    running = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    for start in range(0, width, BLOCK):
        ids = start + lanes
        values = _logits(x, ids, ids < width, row, early, masks, biases, history, width, words)
        order = _order(values)
        same = ((order == bound) & (ids < width)).to(tl.int64)
        kept = (order > bound) | ((same != 0) & (equal + tl.cumsum(same, 0) <= ties))
        weights = tl.where(kept, _weights(values, best, inverse, log_min_p), 0)
        total_here = tl.sum(weights, 0)
        if (found == 0) & (running + total_here > target):
            reached = running + tl.cumsum(weights, 0) > target
            token = tl.min(tl.where(reached, ids, width), 0).to(tl.int64)
            found = tl.full((), 1, tl.int32)
        running += total_here
        equal += tl.sum(same, 0)
    return token


@triton.jit
def _weight_at(bound, best, inverse, log_min_p):
    """Return the weight of a logit of a given order."""
    order = bound.to(tl.int32)
    value = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    return _weights(value, best, inverse, log_min_p)


@triton.jit
def _total(
    x, row, early, masks, biases, history, width, words, best, inverse, log_min_p, bound, ties, BLOCK: tl.constexpr
):
    """Return the sum of the kept weights."""
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.int64)
    equal = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, width, BLOCK):
        ids = start + lanes
        values = _logits(x, ids, ids < width, row, early, masks, biases, history, width, words)
        order = _order(values)
        sums += tl.where(order > bound, _weights(values, best, inverse, log_min_p), 0)
        equal += ((order == bound) & (ids < width)).to(tl.int64)
    tied = tl.minimum(tl.sum(equal, 0), ties)
    return tl.sum(sums, 0) + tied * _weight_at(bound, best, inverse, log_min_p)


@triton.jit
def _reached(
    x, row, early, masks, biases, history, width, words, best, inverse, log_min_p, goal, bound, ties,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the highest order that kept tokens of no lower one reach the goal with, and what those above it reach.

    COUNTS: tokens are counted, and else weighed.
    """
    lanes = tl.arange(0, BLOCK)
    low, high = bound, _order(best) + 1
    above = tl.full((), 0, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        sums = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, width, BLOCK):
            ids = start + lanes
            values = _logits(x, ids, ids < width, row, early, masks, biases, history, width, words)
            if COUNTS:
                worth = (ids < width).to(tl.int64)
            else:
                worth = _weights(values, best, inverse, log_min_p)
            sums += tl.where(_order(values) >= middle, worth, 0)
        reached = tl.sum(sums, 0)
        low = tl.where(reached >= goal, middle, low)
        high = tl.where(reached >= goal, high, middle)
        above = tl.where(reached >= goal, above, reached)
    return low, above
