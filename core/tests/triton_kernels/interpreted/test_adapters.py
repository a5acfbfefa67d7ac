"""LoRA adapters in Triton's interpreter: what the conformance suite's one shape leaves out."""

from __future__ import annotations

import pytest
import torch

from hardpoint.interfaces import AdapterRows, AdapterWeights
from hardpoint.layers.adapters import add_adapters as defined
from hardpoint.triton.adapters import add_adapters

SPANS = ((0, 70), (70, 96))


def case(dtype: torch.dtype, groups: dict[int, list[int]]) -> tuple[AdapterWeights, AdapterRows]:
    """Return two adapters whose ranks are more than a tile's, and rows by slot."""
    generator, most = torch.Generator().manual_seed(0), 40
    down = torch.randn(2, len(SPANS) * most, 150, generator=generator) * 0.1
    up = torch.randn(2, most, SPANS[-1][1], generator=generator) * 0.1
    ranks = torch.tensor([[40, 17], [0, 3]], dtype=torch.int32)
    for slot, of_parts in enumerate(ranks.tolist()):
        for part, rank in enumerate(of_parts):
            down[slot, part * most + rank : (part + 1) * most] = 0
    weights = AdapterWeights(down.to(dtype), up.to(dtype), ranks, torch.tensor([[0.5, 2.0], [1.0, 3.0]]), SPANS)
    starts = [0]
    for tokens in groups.values():
        starts.append(starts[-1] + len(tokens))
    rows = AdapterRows(
        torch.tensor([token for tokens in groups.values() for token in tokens], dtype=torch.int64),
        torch.tensor(list(groups), dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        tuple(zip(groups, starts, starts[1:], strict=False)),
    )
    return weights, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles_of_tokens_and_ranks(dtype: torch.dtype) -> None:
    weights, rows = case(dtype, {1: [50], 0: list(range(3, 40))})
    x, out = torch.randn(51, 150).to(dtype), torch.randn(51, 96).to(dtype)
    expected = out.clone()
    defined(expected, x, weights, rows)
    add_adapters(out, x, weights, rows)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=2 * torch.finfo(dtype).eps)


def test_a_group_without_tokens_adds_nothing() -> None:
    weights, rows = case(torch.float32, {0: [], 1: [2]})
    out = torch.zeros(3, 96)
    add_adapters(out, torch.ones(3, 150), weights, rows)
    assert out[2, 70:].abs().min() > 0
    assert not out[:2].any()
    assert not out[2, :70].any()
