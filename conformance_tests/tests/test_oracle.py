"""The oracle of attention, against torch's own in float64 and against cases computed by hand; and what its bound catches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hardpoint.interfaces import AttentionLayer, DType
from hardpoint_conformance.batches import Span, layer, make_case, same_bits
from hardpoint_conformance.oracle import Numbers, attend, expected

ONES = AttentionLayer(1, 1, 2, scale=1.0)


def by_hand(
    numbers: AttentionLayer, logits: list[float], *, sink: float | None = None, slope: float | None = None
) -> torch.Tensor:
    """Return the weights of the last query, whose product with key j is logits[j]: values are unit vectors."""
    count = len(logits)
    wide = replace(numbers, head_dim=count)
    q = torch.zeros(1, 1, count)
    q[..., 0] = 1.0
    k = torch.zeros(count, 1, count)
    k[:, 0, 0] = torch.tensor(logits)
    sinks, alibi = (None if x is None else torch.tensor([x]) for x in (sink, slope))
    return attend(Numbers(wide, q, k, torch.eye(count)[:, None], sinks, alibi), torch.float64).out[0, 0]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 9), (9, 9), (4, 9)])
def test_agrees_with_torch(group: int, queries: int, context: int) -> None:
    case = make_case(np.random.default_rng(0), layer(2 * group, 2, 16, scale=0.3), DType.FLOAT32, [context])
    numbers = case.numbers(Span(0, context - queries, context))
    mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
    q, k, v = (x.double().transpose(0, 1) for x in (numbers.q, numbers.k, numbers.v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(numbers, torch.float64).out, theirs.transpose(0, 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize(("queries", "context"), [(20, 20), (9, 20), (1, 20)])
def test_parts_see_what_the_whole_sees(causal: bool, window: int | None, queries: int, context: int) -> None:
    features = layer(window=window, soft_cap=3.0, sinks=True, alibi=True, causal=causal)
    case = make_case(np.random.default_rng(0), features, DType.FLOAT32, [context])
    numbers = case.numbers(Span(0, context - queries, context))
    parts = [numbers.part(begin, min(begin + 3, queries)) for begin in range(0, queries, 3)]
    found = torch.cat([attend(part, torch.float64).out for part in parts])
    torch.testing.assert_close(found, attend(numbers, torch.float64).out)
    reach = min(window or context, context)
    assert max(len(part.k) for part in parts) <= (2 - causal) * (reach - 1) + 3


def test_window_counts_the_own_key() -> None:
    weights = by_hand(replace(ONES, sliding_window=2), [5.0, 1.0, 1.0])
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.5, 0.5]).double())


def test_sink_takes_weight_without_a_value() -> None:
    weights = by_hand(replace(ONES, sinks=True), [0.0, math.log(2.0)], sink=math.log(5.0))
    torch.testing.assert_close(weights, torch.tensor([1 / 8, 2 / 8]).double())


def test_soft_cap_comes_after_the_scale() -> None:
    weights = by_hand(replace(ONES, scale=3.0, soft_cap=2.0), [0.0, 1.0])
    assert weights[1] / weights[0] == pytest.approx(math.exp(2.0 * math.tanh(1.5)))


def test_alibi_lowers_what_is_far() -> None:
    weights = by_hand(replace(ONES, alibi=True), [0.0, 0.0, 0.0], slope=math.log(2.0))
    torch.testing.assert_close(weights, torch.tensor([1 / 7, 2 / 7, 4 / 7]).double())


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_bound_lets_rounding_pass_and_nothing_more(dtype: DType) -> None:
    case = make_case(np.random.default_rng(1), layer(), dtype, [50])
    judged = case.expected(Span(0, 0, 50))
    assert judged.ratio(judged.out.to(dtype.to_torch())) < 0.5
    assert judged.ratio(judged.out * 1.05) > 1
    assert judged.ratio(judged.out.index_fill(0, torch.tensor([7]), torch.nan)) == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bound_catches_sums_in_half_precision(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 1, 8, generator=generator).to(dtype) / 64 for n in (1, 500))
    v = (torch.rand(500, 1, 8, generator=generator) + 0.5).to(dtype)
    numbers = Numbers(AttentionLayer(1, 1, 8, scale=1.0), q, k, v)
    weights = attend(numbers, torch.float64).weights[0, 0].to(dtype)
    total = torch.zeros(8, dtype=dtype)
    for weight, value in zip(weights, v[:, 0], strict=True):
        total = total + weight * value
    assert expected(numbers, dtype).ratio(total[None, None]) > 2


def test_zeros_of_different_sign_are_not_the_same_bits() -> None:
    assert same_bits(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, 0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
