"""Adapters of the CPU backend against their definition in float64, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import AdapterRows, AdapterWeights
from hardpoint_cpu.adapters import add_adapters
from hardpoint_cpu.decoder import InvalidOperand


def adapters(
    columns: int, spans: tuple[tuple[int, int], ...], ranks: list[list[int]], dtype: torch.dtype
) -> AdapterWeights:
    """Return seeded adapters of a layer, a slot for each list of ranks, with NaN where nothing may be read."""
    generator = torch.Generator().manual_seed(columns)
    most, rows = max(max(one) for one in ranks) + 1, spans[-1][1]
    down = torch.full((len(ranks), len(spans) * most, columns), torch.nan)
    up = torch.full((len(ranks), most, rows), torch.nan)
    for slot, of_parts in enumerate(ranks):
        for part, rank in enumerate(of_parts):
            first, end = spans[part]
            down[slot, part * most : part * most + rank] = torch.randn(rank, columns, generator=generator)
            up[slot, :rank, first:end] = torch.randn(rank, end - first, generator=generator)
    scales = torch.rand(len(ranks), len(spans), generator=generator) + 0.5
    return AdapterWeights(down.to(dtype), up.to(dtype), torch.tensor(ranks, dtype=torch.int32), scales, spans)


def rows_of(groups: dict[int, list[int]]) -> AdapterRows:
    """Return rows by slot."""
    starts = [0]
    for tokens in groups.values():
        starts.append(starts[-1] + len(tokens))
    return AdapterRows(
        torch.tensor([token for tokens in groups.values() for token in tokens], dtype=torch.int64),
        torch.tensor(list(groups), dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        tuple(zip(groups, starts, starts[1:], strict=False)),
    )


def expected(out: Tensor, x: Tensor, weights: AdapterWeights, groups: dict[int, list[int]]) -> Tensor:
    found, most = out.double(), weights.up.shape[1]
    for slot, tokens in groups.items():
        for part, (first, end) in enumerate(weights.spans):
            rank = int(weights.ranks[slot, part])
            a = weights.down[slot, part * most : part * most + rank].double()
            b = weights.up[slot, :rank, first:end].double()
            for token in tokens:
                found[token, first:end] += weights.scales[slot, part].double() * (x[token].double() @ a.T @ b)
    return found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("columns", [1, 33, 64, 131])
def test_rows_get_what_their_adapters_make_of_them(isa: str, dtype: torch.dtype, bound: float, columns: int) -> None:
    spans = ((0, 70), (70, 75), (75, 203))
    weights = adapters(columns, spans, [[4, 5, 0], [1, 0, 9], [16, 3, 2]], dtype)
    groups = {2: list(range(3, 40)), 0: [41], 1: [0, 2, 44]}
    generator = torch.Generator().manual_seed(1)
    x, before = (torch.randn(45, size, generator=generator).to(dtype) for size in (columns, 203))
    out = before.clone()
    add_adapters(out, x, weights, rows_of(groups))
    right = expected(before, x, weights, groups)
    error = ((out.double() - right).abs() / right.abs().clamp(min=1.0)).max().item()
    assert error <= bound, f"{isa}: {error}"
    untouched = [1, 40, 42, 43]
    assert torch.equal(out[untouched], before[untouched])


def test_a_row_does_not_depend_on_its_batch(isa: str) -> None:
    spans = ((0, 100),)
    weights = adapters(96, spans, [[7], [16]], torch.bfloat16)
    x = torch.randn(40, 96).bfloat16()
    together = torch.zeros(40, 100, dtype=torch.bfloat16)
    add_adapters(together, x, weights, rows_of({0: list(range(0, 40, 2)), 1: list(range(1, 40, 2))}))
    for row in range(40):
        alone = torch.zeros(1, 100, dtype=torch.bfloat16)
        add_adapters(alone, x[row : row + 1], weights, rows_of({row % 2: [0]}))
        assert torch.equal(alone[0], together[row]), row


def test_strided_tensors_and_wrong_ones() -> None:
    weights = adapters(64, ((0, 32),), [[4]], torch.float32)
    x, out = torch.randn(6, 128)[:, :64], torch.zeros(6, 50)[:, :32]
    add_adapters(out, x, weights, rows_of({0: [1, 5]}))
    assert torch.allclose(out.double(), expected(torch.zeros(6, 32), x, weights, {0: [1, 5]}), atol=1e-4)
    for wrong in (out[:, :31], out.bfloat16(), out[:5]):
        with pytest.raises(InvalidOperand):
            add_adapters(wrong, x, weights, rows_of({0: [1]}))
