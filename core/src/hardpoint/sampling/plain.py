"""Sampling in torch's operators, for any device: nothing in a step waits for the device.

Says the same as `hardpoint_conformance.sampling_reference`. Sums are of integers, so a row's token depends on that row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.sampling import DRAW_BITS, TOP_P_BITS, WEIGHT_BITS, Column, SampleFailure, SamplingTables
from hardpoint.sampling import ranking

if TYPE_CHECKING:
    from torch import Tensor

_HALF = DRAW_BITS // 2
_HALF_MASK = (1 << _HALF) - 1
_TOP_P_MASK = (1 << TOP_P_BITS) - 1


def edited_logits(logits: Tensor, rows: Tensor, positions: Tensor, tables: SamplingTables) -> Tensor:
    """Return logits after masks, biases and penalties: a new float32[n, vocab_size].

    Args:
        logits: float32[n, vocab_size].
        rows, positions: int64[n], of the tables, and how many tokens the rows have.
    """
    parameters = tables.parameters[rows]
    numbers = parameters.view(torch.float32)
    result = logits.clone(memory_format=torch.contiguous_format)
    if len(tables.masks):
        ids = torch.arange(logits.shape[1], device=logits.device)
        early = positions < parameters[:, Column.MIN_TOKENS]
        stop = torch.where(early, parameters[:, Column.STOP_MASK], -1)
        for slots in (parameters[:, Column.ALLOWED_MASK], stop):
            words = tables.masks[slots.clamp(min=0).long()][:, ids >> 5]
            allowed = ((words >> (ids & 31)) & 1).bool() | (slots < 0)[:, None]
            result.masked_fill_(~allowed, -torch.inf)
    if len(tables.biases):
        slots = parameters[:, Column.BIAS]
        used = (slots >= 0)[:, None] & (result != -torch.inf)
        result = torch.where(used, result + tables.biases[slots.clamp(min=0).long()], result)
    if len(tables.history):
        slots = parameters[:, Column.HISTORY]
        seen = tables.history[slots.clamp(min=0).long()] * (slots >= 0)[:, None]
        repetition, frequency, presence = (
            numbers[:, column, None] for column in (Column.REPETITION, Column.FREQUENCY, Column.PRESENCE)
        )
        repeated = torch.where(result > 0, result / repetition, result * repetition)
        repeated = repeated - frequency * (seen >> 1) - presence * (seen > 1)
        result = torch.where(seen > 0, repeated, result)
    return result


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the token of the highest logit of each row, or a `SampleFailure`: int64[n]."""
    tokens = ranking.argmax(logits)
    return _checked(tokens, logits.gather(1, tokens[:, None])[:, 0])


def drawn_tokens(logits: Tensor, rows: Tensor, draws: Tensor, tables: SamplingTables, *, ranked: bool) -> Tensor:
    """Return a drawn token for each row of processed logits, or a `SampleFailure`: int64[n].

    Args:
        logits: float32[n, vocab_size].
        rows, draws: int64[n], see `hardpoint.interfaces.sampling`.
        ranked: some row has top_k or top_p, for which rows are sorted.
    """
    parameters = tables.parameters[rows]
    numbers = parameters.view(torch.float32)
    best = logits.amax(1, keepdim=True)
    scaled = (logits - best) * numbers[:, Column.INVERSE_TEMPERATURE, None]
    weights = (scaled.exp() * 2.0**WEIGHT_BITS).long()
    weights = weights.masked_fill_(scaled < numbers[:, Column.LOG_MIN_P, None], 0)
    if ranked:
        order = ranking.canonical_keys(logits).sort(dim=1, descending=True).values
        ids = ranking.ids_of(order)
        falling = weights.gather(1, ids)
        places = torch.arange(logits.shape[1], device=logits.device)
        falling = falling.masked_fill_(places >= parameters[:, Column.TOP_K, None], 0)
        running = falling.cumsum(1)
        goal = _top_p_goal(running[:, -1], parameters[:, Column.TOP_P].long()).clamp(min=1)
        falling = falling.masked_fill_(running - falling >= goal[:, None], 0)
        weights = weights.scatter_(1, ids, falling)
    running = weights.cumsum(1)
    target = _target(running[:, -1], draws)
    tokens = torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return _checked(tokens, best[:, 0])


def drawn_logits(logits: Tensor, rows: Tensor, tables: SamplingTables, *, ranked: bool) -> Tensor:
    """Return the logits that tokens are drawn from, divided by the temperature; minus infinity where `drawn_tokens` leaves a token out.

    Greedy rows stay as they are. Arguments as for `drawn_tokens`.
    """
    parameters = tables.parameters[rows]
    numbers = parameters.view(torch.float32)
    inverse = numbers[:, Column.INVERSE_TEMPERATURE, None]
    is_drawn = inverse > 0
    scaled = (logits - logits.amax(1, keepdim=True)) * inverse
    kept = scaled >= numbers[:, Column.LOG_MIN_P, None]
    if ranked:
        weights = (scaled.exp() * 2.0**WEIGHT_BITS).long().masked_fill_(~kept, 0)
        order = ranking.canonical_keys(logits).sort(dim=1, descending=True).values
        ids = ranking.ids_of(order)
        places = torch.arange(logits.shape[1], device=logits.device)
        is_top = places < parameters[:, Column.TOP_K, None]
        falling = weights.gather(1, ids).masked_fill_(~is_top, 0)
        running = falling.cumsum(1)
        top_p = parameters[:, Column.TOP_P].long()
        goal = _top_p_goal(running[:, -1], top_p).clamp(min=1)
        # A top_p of 1 leaves out nothing, not even what has no weight.
        in_mass = (running - falling < goal[:, None]) | (top_p >= 1 << TOP_P_BITS)[:, None]
        kept = kept & torch.zeros_like(kept).scatter_(1, ids, is_top & in_mass)
    return torch.where(is_drawn, (logits * inverse).masked_fill(~kept, -torch.inf), logits)


def record(tokens: Tensor, rows: Tensor, tables: SamplingTables, *, penalised: bool) -> None:
    """Note the rows' new tokens. `penalised`: some row may have a history."""
    given = tokens.clamp(min=0)
    tables.last_tokens.index_copy_(0, rows, given)
    if penalised:
        slots = tables.parameters[rows, int(Column.HISTORY)].long()
        places = slots.clamp(min=0) * tables.history.shape[1] + given
        counted = (slots >= 0) & (tokens >= 0)
        # Rows without a history add zero to a place of another row's, or of none.
        tables.history.view(-1).index_add_(0, places, 2 * counted.int())


def _checked(tokens: Tensor, best: Tensor) -> Tensor:
    """Return the tokens, or why a row with such a highest logit has none."""
    tokens = tokens.masked_fill(best == -torch.inf, SampleFailure.NO_TOKEN)
    return tokens.masked_fill_(best.isnan() | (best == torch.inf), SampleFailure.NOT_FINITE)


def _target(total: Tensor, draws: Tensor) -> Tensor:
    """Return `total * draws / 2^48`, rounded down, for totals below 2^48: by halves, which int64 can multiply."""
    high, low = total >> _HALF, total & _HALF_MASK
    draw_high, draw_low = draws >> _HALF, draws & _HALF_MASK
    return high * draw_high + ((high * draw_low + low * draw_high + (low * draw_low >> _HALF)) >> _HALF)


def _top_p_goal(total: Tensor, top_p: Tensor) -> Tensor:
    """Return `total * top_p / 2^24`, rounded up."""
    high, low = total >> TOP_P_BITS, total & _TOP_P_MASK
    return high * top_p + ((low * top_p + _TOP_P_MASK) >> TOP_P_BITS)
