"""From rows of logits to tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardpoint.interfaces.batch import Int64Array, SequenceSampling, TokenLogprobs
from hardpoint.interfaces.errors import WorkerError
from hardpoint.sampling import ranking
from hardpoint.sampling.history import TokenHistory
from hardpoint.sampling.random import stream_key, uniform

if TYPE_CHECKING:
    from hardpoint.interfaces.kernels import KernelSet

MAX_WINDOW = 1024
"""Rows that keep at most this many tokens (by top_k) are drawn from a window of their best tokens; with more, the row is sorted."""

NUCLEUS_WINDOWS = (256, 4096)
"""Windows tried in turn for rows with top_p or min_p and no top_k; a row whose nucleus is larger than the last is sorted.

Constant, so that what a row is given does not depend on the rows beside it.
"""

_HOST_BLOCK = 1 << 20
"""On the host rows become probabilities in blocks of about this many elements (4 MB), which stay in cache until they are drawn from."""

_DEVICE_BLOCK = 1 << 24
"""On a device in blocks of about this many (64 MB): it is waited for in each, and larger ones would take memory that nobody counted."""

_DRAW_CHUNK = 64
"""A draw finds its chunk of this many tokens first, and then its token in the chunk."""

Float64Array: TypeAlias = npt.NDArray[np.float64]
Records: TypeAlias = npt.NDArray[np.void]

_SLOT = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("key", np.uint64),
        ("num_tokens", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
        ("edited", np.bool_),
        ("penalised", np.bool_),
    ]
)
"""Parameters and state of one sequence.

top_k is the vocabulary's size for none, logprobs -1 for none; `num_tokens` counts the tokens sampled so far; `edited` is
whether logits are changed before they are sampled, at every token.
"""


@dataclass(frozen=True, slots=True)
class _Edits:
    """Changes of one sequence's logits, each None where there is none."""

    allowed: Int64Array | None
    stop_token_ids: Int64Array
    bias: tuple[Int64Array, npt.NDArray[np.float32]] | None
    history: TokenHistory | None
    penalties: tuple[float, float, float]


class Sampler:
    """Samples the next token of many sequences at once.

    Processors work in the order that `SamplingParams` states. What a sequence is given depends on its own logits, parameters and
    number of tokens only, bit for bit: not on the batch, nor on preemption. Parameters live in a table with a row per
    sequence, so that sequences without penalties, biases or masks cost no Python of their own.

    Args:
        vocab_size: columns of the logits.
        kernels: the backend's, for its argmax; None for torch's operators.
    """

    def __init__(self, vocab_size: int, kernels: KernelSet | None = None) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._table: Records = np.zeros(64, dtype=_SLOT)
        self._edits: list[_Edits | None] = [None] * 64
        self._free = list(range(64))
        self._slots: dict[int, int] = {}
        self._index: tuple[Int64Array, Int64Array] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, sampling: SequenceSampling) -> None:
        """Start a sequence at its first token.

        Raises:
            ValueError: the sequence is here already.
        """
        if sampling.seq_id in self._slots:
            raise ValueError(f"sequence {sampling.seq_id} is sampled already")
        if not self._free:
            size = len(self._table)
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
            self._edits.extend([None] * size)
            self._free.extend(range(size, 2 * size))
        slot = self._free.pop()
        self._slots[sampling.seq_id] = slot
        self._index = None
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        penalised = penalties != (1.0, 0.0, 0.0)
        allowed, bias = sampling.allowed_token_ids, sampling.logit_bias
        self._table[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            min(sampling.top_k or self._vocab_size, self._vocab_size),
            stream_key(sampling.seed),
            0,
            sampling.min_tokens if sampling.stop_token_ids else 0,
            -1 if sampling.logprobs is None else min(sampling.logprobs, self._vocab_size),
            penalised or allowed is not None or bool(bias),
            penalised,
        )
        self._edits[slot] = _Edits(
            allowed=None if allowed is None else np.asarray(allowed, dtype=np.int64),
            stop_token_ids=np.fromiter(sampling.stop_token_ids, np.int64),
            bias=(np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)) if bias else None,
            history=TokenHistory(sampling.prompt_token_ids) if penalised else None,
            penalties=penalties,
        )

    def remove(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; those that are not here are ignored."""
        for seq_id in seq_ids:
            slot = self._slots.pop(seq_id, None)
            if slot is not None:
                self._edits[slot] = None
                self._free.append(slot)
                self._index = None

    def all_plain_argmax(self, seq_ids: Int64Array) -> bool:
        """Whether each sequence's next token is the argmax of its unchanged logits, and nothing else is asked of them.

        Such a step needs no logits: the model may return tokens (`DecoderOutput.ARGMAX`). They need not be recorded, since
        nothing that sequences of this kind are given later depends on them.
        """
        rows = self._table[self._slots_of(seq_ids)]
        plain = (rows["temperature"] == 0.0) & ~rows["edited"] & (rows["logprobs"] < 0)
        return bool((plain & (rows["num_tokens"] >= rows["min_tokens"])).all())

    def observe(self, seq_ids: Int64Array, token_ids: Int64Array) -> None:
        """Record the next token of each sequence, where it was not chosen by `sample`, which records its own."""
        self._record(self._slots_of(seq_ids), token_ids)

    def sample(self, logits: Tensor, seq_ids: Int64Array) -> tuple[Int64Array, dict[int, TokenLogprobs]]:
        """Sample one token per row, and record it.

        Args:
            logits: float32[S, vocab_size], not changed.
            seq_ids: int64[S], sequences added before, each at most once.

        Returns:
            Token ids, int64[S]; log probabilities by row, for the sequences that asked for them.

        Raises:
            KeyError: a sequence was not added.
            WorkerError: a row to draw from, or to give log probabilities of, holds NaN or infinity, or nothing above minus infinity.
        """
        slots = self._slots_of(seq_ids)
        rows = self._table[slots]
        processed = self._edit(logits, slots, rows)
        token_ids = np.empty(len(slots), dtype=np.int64)
        greedy = np.flatnonzero(rows["temperature"] == 0.0)
        if len(greedy):
            token_ids[greedy] = self._argmax(_take(processed, greedy))
        if len(greedy) < len(slots):
            drawn = np.flatnonzero(rows["temperature"] != 0.0)
            token_ids[drawn] = self._draw(_take(processed, drawn), rows[drawn])
        logprobs: dict[int, TokenLogprobs] = {}
        for block in _blocks(np.flatnonzero(rows["logprobs"] >= 0), logits):
            logprobs |= _logprobs(_take(logits, block), block, rows["logprobs"][block], token_ids[block])
        self._record(slots, token_ids)
        return token_ids, logprobs

    def _slots_of(self, seq_ids: Int64Array) -> Int64Array:
        if self._index is None:
            ids = np.fromiter(self._slots, np.int64, len(self._slots))
            slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
            order = ids.argsort()
            self._index = ids[order], slots[order]
        ids, slots = self._index
        positions = ids.searchsorted(seq_ids)
        known = positions < len(ids)
        known[known] = ids[positions[known]] == seq_ids[known]
        if not known.all():
            raise KeyError(f"sequences {seq_ids[~known].tolist()} were not added to the sampler")
        return slots[positions]

    def _record(self, slots: Int64Array, token_ids: Int64Array) -> None:
        self._table["num_tokens"][slots] += 1
        for row in np.flatnonzero(self._table["penalised"][slots]).tolist():
            edits = self._edits[slots[row]]
            assert edits is not None
            assert edits.history is not None
            edits.history.append(int(token_ids[row]))

    def _edit(self, logits: Tensor, slots: Int64Array, rows: Records) -> Tensor:
        """Return the logits after masks, biases and penalties: a copy, or the same tensor where there are none."""
        too_short = rows["num_tokens"] < rows["min_tokens"]
        changed = np.flatnonzero(rows["edited"] | too_short)
        if not len(changed):
            return logits
        logits = logits.clone(memory_format=torch.contiguous_format)
        flat = logits.view(-1)
        masked: list[Int64Array] = []
        biased: list[tuple[Int64Array, npt.NDArray[np.float32]]] = []
        penalised: list[tuple[Int64Array, npt.NDArray[np.float32], tuple[float, float, float]]] = []
        for row in changed.tolist():
            edits = self._edits[slots[row]]
            assert edits is not None
            start = row * self._vocab_size
            if edits.allowed is not None:
                allowed = torch.from_numpy(edits.allowed).to(logits.device)
                kept = logits[row, allowed]
                logits[row] = -torch.inf
                logits[row, allowed] = kept
            if too_short[row]:
                masked.append(edits.stop_token_ids + start)
            if edits.bias is not None:
                biased.append((edits.bias[0] + start, edits.bias[1]))
            if edits.history is not None:
                penalised.append((edits.history.token_ids + start, edits.history.counts, edits.penalties))

        def on_device(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(logits.device)

        if masked:
            flat[on_device(masked)] = -torch.inf
        if biased:
            flat[on_device([ids for ids, _ in biased])] += on_device([values for _, values in biased])
        if penalised:
            ids = on_device([ids for ids, _, _ in penalised])
            counts = on_device([counts for _, counts, _ in penalised])
            per_row = np.array([penalties for _, _, penalties in penalised], dtype=np.float32)
            lengths = [len(ids) for ids, _, _ in penalised]
            repetition, frequency, presence = on_device([np.repeat(per_row, lengths, axis=0)]).unbind(1)
            values = flat[ids]
            values = torch.where(values > 0, values / repetition, values * repetition)
            flat[ids] = values - frequency * counts - presence * (counts > 0)
        return logits

    def _argmax(self, logits: Tensor) -> Int64Array:
        best = ranking.argmax(logits) if self._kernels is None else self._kernels.argmax(logits)
        return best.numpy(force=True)

    def _draw(self, logits: Tensor, rows: Records) -> Int64Array:
        """Return a token for each row of processed logits, by one uniform number each: int64[rows]."""
        draws = uniform(rows["key"], rows["num_tokens"])
        token_ids = np.empty(len(rows), dtype=np.int64)
        limited = rows["top_k"] < self._vocab_size
        windowed = limited & (rows["top_k"] <= MAX_WINDOW)
        nucleus = ~limited & ((rows["top_p"] < 1.0) | (rows["min_p"] > 0.0))
        sorted_whole = limited & ~windowed

        chosen = np.flatnonzero(windowed)
        if len(chosen):
            window = int(rows["top_k"][chosen].max())
            token_ids[chosen], _ = _draw_ranked(_take(logits, chosen), window, rows[chosen], draws[chosen])

        chosen = np.flatnonzero(nucleus)
        if len(chosen) and self._vocab_size > NUCLEUS_WINDOWS[0]:
            total = self._relative_mass(logits, rows, chosen)
            for window in NUCLEUS_WINDOWS:
                if not len(chosen) or window >= self._vocab_size:
                    break
                token_ids[chosen], found = _draw_ranked(
                    _take(logits, chosen), window, rows[chosen], draws[chosen], total
                )
                chosen, total = chosen[~found], total[~found]
        sorted_whole[chosen] = True

        for block in _blocks(np.flatnonzero(sorted_whole), logits):
            selected = _take(logits, block)
            token_ids[block], _ = _draw_ranked(selected, self._vocab_size, rows[block], draws[block])
        for block in _blocks(np.flatnonzero(~limited & ~nucleus), logits):
            probabilities = _softmax(_take(logits, block), rows["temperature"][block])
            token_ids[block] = _draw_unordered(probabilities, draws[block])
        return token_ids

    def _relative_mass(self, logits: Tensor, rows: Records, chosen: Int64Array) -> Float64Array:
        """Return the sum of exp((logit - best) / temperature) over each chosen row, infinity for rows with min_p: float64[chosen].

        How much min_p keeps is not known before the row is ranked. The sum is made by way of a softmax, which sums its rows one
        by one; a plain sum over one long row is split between threads, and rounds otherwise than the same row among others.
        """
        best = np.zeros(len(rows))
        for block in _blocks(chosen[rows["min_p"][chosen] == 0.0], logits):
            best[block] = _softmax(_take(logits, block), rows["temperature"][block]).amax(1).double().numpy(force=True)
        with np.errstate(divide="ignore"):
            return 1.0 / best[chosen]


def _blocks(rows: Int64Array, logits: Tensor) -> Iterator[Int64Array]:
    """Cut rows of logits into blocks that are worked on together."""
    elements = _HOST_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK
    size = max(1, elements // logits.shape[1])
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _take(logits: Tensor, rows: Int64Array) -> Tensor:
    """Return the given rows (ascending): a view where they are neighbours."""
    first, count = int(rows[0]), len(rows)
    if rows[-1] - first == count - 1:
        return logits[first : first + count]
    return logits[torch.from_numpy(rows).to(logits.device)]


def _column(values: Float64Array, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]


def _softmax(logits: Tensor, temperature: Float64Array) -> Tensor:
    """Return softmax(logits / temperature), a new float32[rows, vocab_size]."""
    if (temperature != 1.0).any():
        logits = logits * _column(1.0 / temperature, logits)
    return torch.softmax(logits, dim=1)


def _require_finite(values: npt.NDArray[np.floating]) -> None:
    if not np.isfinite(values).all():
        raise WorkerError(
            "the next token cannot be drawn",
            found="the model's logits hold NaN or infinity, or masks leave no token",
            hint="Check the model's weights and data type (float16 overflows where bfloat16 does not).",
        )


def _draw_ranked(
    logits: Tensor, window: int, rows: Records, draws: Float64Array, total: Float64Array | None = None
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Apply temperature, min_p, top_k and top_p to the best logits of each row, and draw in canonical order.

    Args:
        logits: float32[rows, vocab_size].
        window: how many of the best are looked at.
        total: sum over the whole row of the exponentials relative to its best, infinity where it is not known; None where
            the window holds all that min_p or top_k may keep.

    Returns:
        Token ids, int64[rows], and whether the window held the row's nucleus; where not, the token id means nothing.
    """
    ranked = ranking.top_values(logits, window)
    best = ranked[:, :1].astype(np.float64)
    _require_finite(best)
    weights = np.exp((ranked - best) / rows["temperature"][:, None])
    weights[weights < rows["min_p"][:, None]] = 0.0
    if rows["top_k"].min() < window:
        weights[np.arange(window) >= rows["top_k"][:, None]] = 0.0
    cumulative = weights.cumsum(axis=1)
    mass = cumulative[:, -1]
    found = np.ones(len(rows), dtype=np.bool_)
    if total is None:
        total = mass
    else:
        # After a weight of zero nothing weighs any more.
        complete = weights[:, -1] == 0.0
        total = np.where(complete, mass, total)
        found = complete | (mass >= rows["top_p"] * total)
    goal = rows["top_p"] * total
    last = np.minimum((cumulative < goal[:, None]).sum(1), np.count_nonzero(weights, axis=1) - 1)
    every = np.arange(len(rows))
    targets = draws * cumulative[every, last]
    positions = np.minimum((cumulative <= targets[:, None]).sum(1), last)
    values = ranked[every, positions]
    above = (ranked > values[:, None]).sum(1)
    return ranking.ids_at(logits, values, positions - above), found


def _draw_unordered(probabilities: Tensor, draws: Float64Array) -> Int64Array:
    """Draw from float32[rows, vocab_size], in proportion, by the inverse of the cumulative distribution in order of ids."""
    padding = -probabilities.shape[1] % _DRAW_CHUNK
    if padding:
        probabilities = torch.nn.functional.pad(probabilities, (0, padding))
    chunks = probabilities.view(len(draws), -1, _DRAW_CHUNK)
    before = chunks.sum(2).double().numpy(force=True).cumsum(axis=1)
    total = before[:, -1]
    _require_finite(total)
    targets = draws * total
    every = np.arange(len(draws))
    chunk = (before <= targets[:, None]).sum(1)
    rest = targets - np.where(chunk > 0, before[every, chunk - 1], 0.0)
    index = torch.from_numpy(chunk).to(probabilities.device)[:, None, None].expand(-1, 1, _DRAW_CHUNK)
    within = chunks.gather(1, index)[:, 0].double().numpy(force=True).cumsum(axis=1)
    # The chunk's float32 sum may exceed the float64 one by a rounding; the draw then belongs to the last token with a probability.
    last = (within < within[:, -1:]).sum(1)
    chosen: Int64Array = chunk * _DRAW_CHUNK + np.minimum((within <= rest[:, None]).sum(1), last)
    return chosen


def _logprobs(logits: Tensor, rows: Int64Array, wanted: Int64Array, token_ids: Int64Array) -> dict[int, TokenLogprobs]:
    """Return log probabilities of the model's distribution, by row.

    Args:
        logits: float32[n, vocab_size].
        rows: int64[n], how the rows are called in the result.
        wanted: int64[n], how many of the best are returned beside the sampled token.
        token_ids: int64[n], the sampled tokens.
    """
    _require_finite(logits.amax(dim=1).numpy(force=True))
    sampled = torch.from_numpy(token_ids).to(logits.device)[:, None]
    ranks = ((logits > logits.gather(1, sampled)).sum(1) + 1).tolist()
    ids = sampled
    if wanted.any():
        best = torch.from_numpy(ranking.top_k(logits, int(wanted.max()))[1]).to(logits.device)
        ids = torch.cat((sampled, best), dim=1)
    values = torch.log_softmax(logits, dim=1).gather(1, ids).numpy(force=True)
    all_ids = ids.numpy(force=True)
    return {
        row: TokenLogprobs(all_ids[i, : count + 1].copy(), values[i, : count + 1].copy(), rank)
        for i, (row, count, rank) in enumerate(zip(rows.tolist(), wanted.tolist(), ranks, strict=True))
    }
