"""Sampling in Triton: a program has one row of logits, and reads it in blocks as often as it must; nothing is sorted.

What top_k and top_p keep is found by bounds: a pass over the row sums what reaches each of several, and the next pass looks between two of
them. Where the bounds lie decides how many passes there are, and nothing else.

`hardpoint_conformance.sampling_reference` defines the tokens. Sums are of integers, so a row's token does not depend on the block's size.
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
LOWEST = tl.constexpr(-2139095041)
"""The order of minus infinity."""
BOUNDS = tl.constexpr(4)
"""Bounds that one pass tries: more need fewer passes, but longer ones, and registers for a sum and for the comparisons of each."""
VALUE_PASSES = tl.constexpr(4)
"""Passes whose bounds lie evenly among logits, as tokens do more or less; those of later ones lie evenly among float32 numbers, of which a
pass leaves a quarter, wherever the tokens are."""


@triton.jit
def _number(row, column):
    """Return the float32 in a column of a row of parameters."""
    return tl.load(row + column).to(tl.float32, bitcast=True)


@triton.jit
def _logits(x, ids, inside, edits):
    """Return a block of logits after masks, biases and penalties; minus infinity outside of the row."""
    row, edited, early, masks, biases, history, width, words = edits
    values = tl.load(x + ids, mask=inside, other=float("-inf"))
    if edited:
        # What is to be done is read again for every block: kept, it would take the registers of rows that have nothing of it.
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
def _weights(values, scale):
    """Return the weights of logits, int32: none is above 2^30, and the best one's is that."""
    best, inverse, log_min_p = scale
    scaled = (values - best) * inverse
    weights = (tl.exp(scaled) * UNIT).to(tl.int32)
    return tl.where(scaled >= log_min_p, weights, 0)


@triton.jit
def _order(values):
    """Return numbers that rise with the logits, int32; both zeros have the same."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(order):
    """Return the logit of an order."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _weight_at(order, scale):
    """Return the weight of a logit of a given order, int64."""
    return _weights(_value(order), scale).to(tl.int64)


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
    past = tl.load(row + HISTORY).to(tl.int64)
    edited = (early & (tl.load(row + STOP_MASK) >= 0)) | (past >= 0)
    edited = edited | (tl.load(row + ALLOWED_MASK) >= 0) | (tl.load(row + BIAS) >= 0)
    edits = (row, edited, early, masks, biases, history, width, words)

    # The highest logit, and the lowest id that has it: of each lane, and then of all.
    lanes = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        ids = start + lanes
        values = _logits(x, ids, ids < width, edits)
        bad |= ((values != values) | (values == float("inf"))).to(tl.int32)
        where = tl.where(values > high, ids, where)
        high = tl.where(values > high, values, high)
    best = tl.max(high, 0)
    token = tl.min(tl.where(high == best, where, width), 0).to(tl.int64)

    if best == float("-inf"):
        token = tl.full((), NO_TOKEN, tl.int64)
    if tl.max(bad, 0) != 0:
        token = tl.full((), NOT_FINITE, tl.int64)
    if (token >= 0) & (inverse > 0.0):
        token = _drawn(x, edits, best, inverse, tl.load(step + 2 * rows + i), BLOCK)
    tl.store(tokens + i, token)
    tl.store(last_tokens + table_row, tl.maximum(token, 0))
    if (past >= 0) & (token >= 0):
        count = history + past * width + token
        tl.store(count, tl.load(count) + 2)


@triton.jit
def _drawn(x, edits, best, inverse, draw, BLOCK: tl.constexpr):
    """Return a token drawn in proportion to the weights that min_p, top_k and top_p leave."""
    row, width = edits[0], edits[6]
    scale = (best, inverse, _number(row, LOG_MIN_P))
    top_k = tl.load(row + TOP_K).to(tl.int64)
    top_p = tl.load(row + TOP_P).to(tl.int64)
    # What is kept: all above `bound`, and the first `ties` of those that equal it. At first all that weigh anything: e^-21 is below 2^-30,
    # and a few numbers further down no rounding matters.
    bound = tl.maximum(_order(best - 21.0 / inverse), LOWEST + 4) - 4
    ties = tl.full((), 0, tl.int64)
    if top_k < width:
        # Where fewer weigh anything, the bound stays, and the ties there have no weight.
        bound, above, total = _reached(x, edits, scale, top_k, 0, bound, ties, True, BLOCK)
        ties = top_k - above
    if top_p < 1 << 24:
        bound, above, goal = _reached(x, edits, scale, top_k, top_p, bound, ties, False, BLOCK)
        each = _weight_at(bound, scale)
        ties = (goal - above + each - 1) // tl.maximum(each, 1)
        total = above + ties * each
    else:
        total = _above(x, edits, scale, bound, BLOCK) + ties * _weight_at(bound, scale)
    high, low = total >> 24, total & 0xFFFFFF
    draw_high, draw_low = draw >> 24, draw & 0xFFFFFF
    target = high * draw_high + ((high * draw_low + low * draw_high + ((low * draw_low) >> 24)) >> 24)

    lanes = tl.arange(0, BLOCK)
    token = tl.full((), -1, tl.int64)
    running = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    start = tl.full((), 0, tl.int32)
    # The total is above the target: a token is found.
    while (token < 0) & (start < width):
        ids = start + lanes
        values = _logits(x, ids, ids < width, edits)
        order = _order(values)
        same = (order == bound).to(tl.int32)
        equal_here = tl.sum(same, 0).to(tl.int64)
        if (equal < ties) & (equal + equal_here > ties):
            same = (equal + tl.cumsum(same, 0) <= ties).to(tl.int32) & same
        elif equal >= ties:
            same = tl.zeros((BLOCK,), tl.int32)
        weights = tl.where((order > bound) | (same != 0), _weights(values, scale), 0).to(tl.int64)
        total_here = tl.sum(weights, 0)
        if running + total_here > target:
            reached = running + tl.cumsum(weights, 0) > target
            token = tl.min(tl.where(reached, ids, width), 0).to(tl.int64)
        running += total_here
        equal += equal_here
        start += BLOCK
    return token


@triton.jit
def _within_threads(numbers, BLOCK: tl.constexpr):
    """Return sums of four neighbours, int64: a thread loads as many together, and a row's sums take fewer registers so."""
    neighbours: tl.constexpr = 4 if BLOCK >= 4 else BLOCK
    return tl.sum(tl.reshape(numbers.to(tl.int64), (BLOCK // neighbours, neighbours)), 1)


@triton.jit
def _above(x, edits, scale, bound, BLOCK: tl.constexpr):
    """Return the sum of the weights above a bound."""
    lanes = tl.arange(0, BLOCK)
    width = edits[6]
    sums = _within_threads(tl.zeros((BLOCK,), tl.int32), BLOCK)
    for start in range(0, width, BLOCK):
        ids = start + lanes
        values = _logits(x, ids, ids < width, edits)
        sums += _within_threads(tl.where(_order(values) > bound, _weights(values, scale), 0), BLOCK)
    return tl.sum(sums, 0)


@triton.jit
def _reached(x, edits, scale, top_k, top_p, bound, ties, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest order that the tokens of no lower one reach the goal with, or `bound`; what those above it reach; and the goal.

    COUNTS: tokens are counted, to reach top_k, and else weighed, to reach top_p of all that is kept: what is above `bound`, and `ties`.
    """
    lanes = tl.arange(0, BLOCK)
    width = edits[6]
    tied = ties * _weight_at(bound, scale)
    goal = top_k if COUNTS else _share(tied, top_p)
    # `low` reaches the goal, unless it is `bound`, and `high` does not, but `above`.
    low, high = bound, _order(scale[0]) + 1
    above = tl.full((), 0, tl.int64)
    passes = tl.full((), 0, tl.int32)
    while low + 1 < high:
        bounds = _between(low, high, passes)
        sums = (_within_threads(tl.zeros((BLOCK,), tl.int32), BLOCK),) * BOUNDS
        least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        most = tl.full((BLOCK,), LOWEST, tl.int32)
        for start in range(0, width, BLOCK):
            ids = start + lanes
            values = _logits(x, ids, ids < width, edits)
            order = _order(values)
            if COUNTS:
                worth = tl.full((BLOCK,), 1, tl.int32)
            else:
                worth = _weights(values, scale)
            added = ()
            for j in tl.static_range(BOUNDS):
                more = _within_threads(tl.where(order >= bounds[j], worth, 0), BLOCK)
                added = added + (sums[j] + more,)  # noqa: RUF005
            sums = added
            least = tl.where(order >= low, tl.minimum(least, order), least)
            most = tl.where(order < high, tl.maximum(most, order), most)
        if not COUNTS:  # noqa: SIM102
            if passes == 0:
                # The first bound of the first pass leaves nothing out that weighs.
                goal = _share(tl.sum(sums[0], 0) + tied, top_p)
        for j in tl.static_range(BOUNDS - 1, -1, -1):
            reached = tl.sum(sums[j], 0)
            if reached >= goal:
                low = tl.maximum(low, bounds[j])
            else:
                high = bounds[j]
                above = reached
        # Only what a token has is a bound.
        if low > bound:
            low = tl.maximum(low, tl.min(least, 0))
        high = tl.minimum(high, tl.maximum(low, tl.max(most, 0)) + 1)
        passes += 1
    return low, above, goal


@triton.jit
def _share(total, top_p):
    """Return the part of a total that top_p has to reach, rounded up."""
    return tl.maximum((total >> 24) * top_p + (((total & 0xFFFFFF) * top_p + 0xFFFFFF) >> 24), 1)


@triton.jit
def _between(low, high, passes):
    """Return bounds above `low` and below `high`, rising: the lowest possible one, which may end the search, and others evenly."""
    bounds = (low + 1,)
    below = _value(low)
    span = _value(high) - below
    distance = high.to(tl.int64) - low
    for j in tl.static_range(1, BOUNDS):
        even = (low + distance * j // BOUNDS).to(tl.int32)
        if passes < VALUE_PASSES:
            even = _order(below + span * (j / BOUNDS))
        bounds = bounds + (tl.minimum(tl.maximum(even, low + 1), high - 1),)  # noqa: RUF005
    return bounds
