"""The judge of attention's numbers: an oracle in float64, and a bound on the error that comes from a plain implementation.

The oracle computes attention by its definition (`hardpoint.interfaces.attention`) from the inputs as the backend gets them: queries
in the case's dtype, keys and values after their rounding to the cache's dtype. So the rounding of inputs is not counted as an error.

A row is one query of one head. Its error, the largest over its elements, must keep to

    |out - oracle| <= c * max(|plain - oracle|, floor)

- `plain` is attention as one would write it in the case's dtype without care: products and sums accumulate in float32, as matrix units
  do, and every intermediate result (logits, capped and sloped logits, weights, output) is rounded to the dtype. It adapts the bound to
  dtype, length and data, which a constant cannot.
- `c` is 2, and 3 with a soft cap, which adds roundings whose order is free: the factors of FlashAttention's own tests (Dao et al.).
  A row's error is a random quantity, and two correct implementations differ by about such a factor.
- `floor` is what a fused kernel cannot avoid, for rows in which `plain` happens to have no error (with u half the dtype's eps, sums over
  the visible keys j with weights p):
    u * |oracle|                             the output is rounded once;
    u * sum p|v|                             the weights are rounded once, to be operands of a matrix unit;
    2^-24 * (4 + 2A + sqrt(n)) * sum p|v|    float32 underneath: the absolute error of a logit is a relative one of its weight; A is the
                                             largest sum of |q * k| * scale (and |ALiBi|) of a logit, or the size of the denominator's
                                             logarithm, which is taken off; n is the number of keys that are summed;
    n times the smallest normal float32       products below it may be flushed to zero, and results in bfloat16 and float32; subnormal
                                             float16 are numbers: half the smallest for float16, for the rounding of the output.

Sums kept in half precision exceed this as soon as their partial sums grow: see the clauses `attn.accumulate.*`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hardpoint.interfaces import AttentionLayer

FACTOR = 2.0
FACTOR_SOFT_CAP = 3.0
_WEIGHTS = 1 << 18
"""Weights that are computed at a time: what is kept of each then stays in a processor's caches."""


@dataclass(frozen=True)
class Numbers:
    """Attention of one sequence's consecutive queries.

    Attributes:
        q: [queries, num_heads, head_dim], of the last positions of the context but for those that come after.
        k, v: [context, num_kv_heads, head_dim].
        sinks, alibi: float32[num_heads], where the layer has them.
        after: keys that come after the last query.
    """

    layer: AttentionLayer
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    after: int = 0

    def part(self, begin: int, end: int) -> Numbers:
        """Return some of the queries, and of the keys those that any of them may see."""
        keys, reach = len(self.k), self.layer.sliding_window or len(self.k)
        first, last = (keys - self.after - len(self.q) + query for query in (begin, end - 1))
        low, high = max(first - reach + 1, 0), min(last + (1 if self.layer.causal else reach), keys)
        k, v = self.k[low:high], self.v[low:high]
        return Numbers(self.layer, self.q[begin:end], k, v, self.sinks, self.alibi, high - last - 1)

    @cached_property
    def distance(self) -> Tensor:
        """int64[queries, context], key position minus query position."""
        keys, end = len(self.k), len(self.k) - self.after
        return torch.arange(keys)[None, :] - torch.arange(end - len(self.q), end)[:, None]

    @cached_property
    def hidden(self) -> Tensor:
        """bool[queries, context], which keys are not seen: those ahead, unless the layer sees both sides; with a window, all but its number
        of keys, which counts to each side."""
        layer = self.layer
        ahead = self.distance > 0 if layer.causal else torch.zeros_like(self.distance, dtype=torch.bool)
        return ahead if layer.sliding_window is None else ahead | (self.distance.abs() >= layer.sliding_window)


@dataclass(frozen=True)
class Weighted:
    """Attention with what led to it.

    Attributes:
        out: [queries, num_heads, head_dim].
        weights: [num_heads, queries, context], without a sink's.
        logits: [num_heads, queries, context], and one more for a sink.
    """

    out: Tensor
    weights: Tensor
    logits: Tensor

    @property
    def log_sum(self) -> Tensor:
        """[num_heads, queries], logarithm of the softmax's denominator."""
        if self.logits.shape != self.weights.shape:  # beside a sink, the largest weight of a key may be 0
            return torch.logsumexp(self.logits, -1)
        return self.logits.amax(-1) - self.weights.amax(-1).log()


def attend(numbers: Numbers, arithmetic: torch.dtype, rounded: torch.dtype | None = None) -> Weighted:
    """Compute attention by its definition.

    Args:
        arithmetic: of all products and sums.
        rounded: dtype that each intermediate result is rounded to; None for none.
    """

    def r(x: Tensor) -> Tensor:
        return x if rounded is None else x.to(rounded).to(arithmetic)

    layer = numbers.layer
    # In place: tensors of all queries by all keys are what takes the time.
    logits = r(_products(numbers.q.to(arithmetic), numbers.k.to(arithmetic)).mul_(layer.scale))
    if layer.soft_cap is not None:
        logits = r(r(r(logits.div_(layer.soft_cap)).tanh_()).mul_(layer.soft_cap))
    if numbers.alibi is not None:
        logits = r(logits.add_(numbers.alibi.to(arithmetic)[:, None, None] * numbers.distance.to(arithmetic)))
    logits.masked_fill_(numbers.hidden, float("-inf"))
    if numbers.sinks is not None:
        column = numbers.sinks.to(arithmetic)[:, None, None].expand(-1, len(numbers.q), 1)
        logits = torch.cat([logits, column], -1)
    weights = r(torch.softmax(logits, -1))[..., : len(numbers.k)]
    return Weighted(r(_mixed(weights, numbers.v.to(arithmetic))), weights, logits)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the products of queries and keys, [num_heads, queries, context]; query head h has KV head h // group."""
    queries, heads, dim = q.shape
    context, kv_heads, _ = k.shape
    rows = q.transpose(0, 1).reshape(kv_heads, heads // kv_heads * queries, dim)
    return torch.bmm(rows, k.permute(1, 2, 0)).view(heads, queries, context)


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    """Return the weighted sums of values, [queries, num_heads, dim of v]."""
    heads, queries, context = weights.shape
    _, kv_heads, dim = v.shape
    rows = weights.reshape(kv_heads, heads // kv_heads * queries, context)
    return torch.bmm(rows, v.transpose(0, 1)).view(heads, queries, dim).transpose(0, 1)


@dataclass(frozen=True)
class Expected:
    """What a backend must compute.

    Attributes:
        out: float64[queries, num_heads, head_dim], the oracle's.
        bound: float64[queries, num_heads], the largest error of a row.
    """

    out: Tensor
    bound: Tensor

    def rows(self, begin: int, end: int) -> Expected:
        """Return what is expected of some of the queries: what a row attends to is its own, whichever others are computed with it."""
        return Expected(self.out[begin:end], self.bound[begin:end])

    def ratio(self, out: Tensor) -> float:
        """Return the largest error as a share of its bound; infinite where a result is not finite."""
        if out.shape != self.out.shape:
            raise ValueError(f"a result of shape {tuple(out.shape)} was to be {tuple(self.out.shape)}")
        if not self.bound.numel():
            return 0.0
        error = (out.double() - self.out).abs_().amax(-1)
        largest = float(error.div_(self.bound).max())  # NaN where any is
        return math.inf if math.isnan(largest) else largest


def expected(numbers: Numbers, dtype: torch.dtype) -> Expected:
    """Return the oracle's result for a case in `dtype`, with the bound on the error."""
    queries, heads, _ = numbers.q.shape
    step = max(_WEIGHTS // (heads * max(len(numbers.k), 1)), 1)
    parts = [
        _expected(numbers.part(begin, min(begin + step, queries)), dtype) for begin in range(0, max(queries, 1), step)
    ]
    return joined(parts)


def joined(parts: Sequence[Expected]) -> Expected:
    """Return what is expected of the queries of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    return Expected(torch.cat([part.out for part in parts]), torch.cat([part.bound for part in parts]))


def _expected(numbers: Numbers, dtype: torch.dtype) -> Expected:
    exact = attend(numbers, torch.float64)
    plain = attend(numbers, torch.float32, dtype).out.double()
    # Where the plain implementation overflows it says nothing about the error.
    plain_error = plain.sub_(exact.out).abs_().nan_to_num_(nan=0.0, posinf=0.0).amax(-1)
    factor = FACTOR if numbers.layer.soft_cap is None else FACTOR_SOFT_CAP
    return Expected(exact.out, factor * torch.maximum(plain_error, _floor(numbers, exact, dtype)))


def _floor(numbers: Numbers, exact: Weighted, dtype: torch.dtype) -> Tensor:
    """Return the unavoidable error of each row, float64[queries, num_heads] (see the module).

    What only sizes a bound is computed in float32, in half the time.
    """
    q, k, v = (x.abs().float() for x in (numbers.q, numbers.k, numbers.v))
    size = _products(q, k).mul_(abs(numbers.layer.scale))
    if numbers.alibi is not None:
        size.add_((numbers.alibi[:, None, None] * numbers.distance).abs())
    # Keys whose share of the result is next to nothing add no error to it, however large their logits are.
    negligible = exact.weights <= 1e-12 * exact.weights.sum(-1, keepdim=True)
    largest = torch.maximum(size.masked_fill_(negligible, 0.0).amax(-1).double(), exact.log_sum.abs()).T
    count = numbers.hidden.logical_not().sum(-1).double()[:, None]
    values = _mixed(exact.weights.float(), v).amax(-1).double()
    unit = torch.finfo(dtype).eps / 2
    single = 2.0**-24 * (4 + 2 * largest + count.sqrt())
    flushed = count * torch.finfo(torch.float32).tiny
    if dtype is torch.float16:
        flushed = flushed + torch.finfo(dtype).tiny * unit
    return unit * (exact.out.abs().amax(-1) + values) + single * values + flushed
