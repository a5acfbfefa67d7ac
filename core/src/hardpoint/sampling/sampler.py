"""From rows of logits to tokens and log probabilities, on the device; the host waits once, when it collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.interfaces.batch import Int32Array, Int64Array, LogitsProcessor, SequenceSampling, TokenLogprobs
from hardpoint.interfaces.sampling import SampleFailure
from hardpoint.sampling import plain, ranking
from hardpoint.sampling.guidance import Grammars, Guide
from hardpoint.sampling.random import draws
from hardpoint.sampling.table import SamplingTable

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.kernels import KernelSet
    from hardpoint.interfaces.platform import Event, Platform

_HOST_BLOCK = 1 << 20
"""On the host rows are worked on in blocks of about this many elements (4 MB), which stay in cache."""

_DEVICE_BLOCK = 1 << 24
"""On a device in blocks of about this many: larger ones would take memory that nobody counted."""

_REASONS = {
    SampleFailure.NO_TOKEN: (
        "masks leave no token that may be sampled (those of structured_outputs, allowed_token_ids, bad_words, logit_bias and min_tokens"
        " together), or all logits are minus infinity"
    ),
    SampleFailure.NOT_FINITE: "the logits hold NaN or infinity, as the model computed them or after biases and penalties",
}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step gave, on the host.

    Attributes:
        token_ids: int64[S]; -1 for a row that failed.
        logprobs: by index in 0..S, for the rows that asked for them.
        failed: by index in 0..S, why the row has no token.
    """

    token_ids: Int64Array
    logprobs: dict[int, TokenLogprobs]
    failed: dict[int, str]


@dataclass(frozen=True, slots=True)
class _HostLogprobs:
    """The log probabilities of some rows, on their way to the host."""

    rows: Int64Array
    wanted: Int64Array
    ids: Tensor
    values: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class _Processed:
    """A row whose logits are processed by what it was given before: by Python functions, and by words that must not come.

    Attributes:
        bad_words: see `_by_beginning`.
    """

    functions: tuple[LogitsProcessor, ...]
    bad_words: Mapping[int, Mapping[tuple[int, ...], Sequence[int]]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    def apply(self, row: Tensor) -> str | None:
        """Process the logits of the row in place, float32[vocab_size]; returns what is wrong with a function that fails."""
        failure = self._apply_functions(row)
        for length, words in self.bad_words.items():
            for last in words.get(tuple(self.token_ids[-length:]), ()):
                row[last] = -torch.inf
        return failure

    def _apply_functions(self, row: Tensor) -> str | None:
        for function in self.functions:
            try:
                result = function(list(self.token_ids), row.clone())
                if isinstance(result, torch.Tensor) and result.shape == row.shape:
                    row.copy_(result)
                    continue
                found = (
                    f"one of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
                )
                did = f"returned {found} instead of a tensor of shape {list(row.shape)}"
            except Exception as error:
                did = f"raised {_text(type(error).__name__, error)}"
            return f"the logits processor {_text(function)} {did}"
        return None


@lru_cache(8)
def _by_beginning(words: tuple[tuple[int, ...], ...]) -> Mapping[int, Mapping[tuple[int, ...], Sequence[int]]]:
    """Return the last tokens of words by the tokens before them, and these by their number: there may be thousands, for every step."""
    found: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for *before, last in words:
        found.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
    return found


def _text(*values: object) -> str:
    """Return the name or text of a user's objects, whose own methods may fail."""
    try:
        return ": ".join(str(getattr(value, "__qualname__", value)) for value in values)
    except Exception:
        return "(what cannot be shown)"


class SampledTokens:
    """The tokens of one step: on the device at once, on the host when they are collected.

    Attributes:
        token_ids: int64[S] on the device; a `SampleFailure` for a row that has none.
    """

    def __init__(
        self,
        token_ids: Tensor,
        host: Tensor,
        logprobs: Sequence[_HostLogprobs],
        copied: Event | None,
        processed: Mapping[int, _Processed],
        reasons: Mapping[int, str],
        note: Callable[[Int64Array], None] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self._host, self._logprobs, self._copied = host, logprobs, copied
        self._processed, self._reasons, self._note = processed, reasons, note

    def collect(self) -> Sampled:
        """Wait for the copy to the host, and return what it brought."""
        if self._copied is not None:
            self._copied.synchronize()
        outcomes: Int64Array = self._host.numpy()
        failed = {row: _REASONS[SampleFailure(outcomes[row])] for row in (outcomes < 0).nonzero()[0].tolist()}
        failed.update(self._reasons)
        for row, processed in self._processed.items():
            processed.token_ids.append(int(outcomes[row]))
        if self._note is not None:
            self._note(outcomes)
        logprobs: dict[int, TokenLogprobs] = {}
        for part in self._logprobs:
            ids, values, ranks = part.ids.numpy(), part.values.numpy(), part.ranks.tolist()
            for i, (row, wanted) in enumerate(zip(part.rows.tolist(), part.wanted.tolist(), strict=True)):
                if not np.isfinite(values[i, 0]):
                    failed.setdefault(row, _REASONS[SampleFailure.NOT_FINITE])
                if row not in failed:
                    end = wanted + 1
                    logprobs[row] = TokenLogprobs(ids[i, :end].copy(), values[i, :end].copy(), ranks[i])
        if failed:
            outcomes = outcomes.copy()
            outcomes[list(failed)] = -1
        return Sampled(outcomes, logprobs, failed)


class Sampler:
    """Samples the next tokens of sequences, each of which has a row of a table on the device.

    Processors work in the order that `SamplingParams` states; `hardpoint_conformance.sampling_reference` is the definition. What a sequence
    is given depends on its own logits, parameters and tokens only, bit for bit: not on the batch, nor on preemption. A row that has no
    token fails alone.

    Args:
        vocab_size: columns of the logits.
        device: where logits and tables are.
        kernels: the backend's; its `sample` is used where it has one, else torch's operators.
        platform: copies between device and host, and marks what is queued; None where the device is the host.
        grammars: of the model, for sequences that follow one.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        kernels: KernelSet | None = None,
        platform: Platform | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._kernels, self._platform = kernels, platform
        self._upload = torch.from_numpy if platform is None else platform.upload
        # Another step may be launched before a step's tokens are collected.
        self._runs_ahead = platform is None or platform.steps_in_flight > 0
        self._block = _HOST_BLOCK if self._device.type == "cpu" else _DEVICE_BLOCK
        self._table = SamplingTable(vocab_size, self._device, self._upload)
        self._processed: dict[int, _Processed] = {}
        self._grammars = grammars
        self._guides: dict[int, Guide] = {}

    def last_tokens(self, rows: Int32Array) -> Tensor:
        """Return the token that each of these rows was given last, int64[n] on the device; 0 for one that was given none."""
        self._table.reserve(int(rows.max()) + 1)
        return self._table.tables.last_tokens.index_select(0, self._upload(rows))

    def compile_grammars(self, sequences: Sequence[SequenceSampling]) -> None:
        """Begin to compile the grammars of sequences that `set_rows` will begin: a thread does it, while the model computes."""
        for sampling in sequences:
            self._guides.pop(sampling.state_row, None)
        guided = [one for one in sequences if one.grammar is not None]
        if guided:
            if self._grammars is None:
                raise ValueError("there is no tokenizer for grammars")
            guides = self._grammars.begin(guided)
            self._guides.update(zip((one.state_row for one in guided), guides, strict=True))

    def close(self) -> None:
        """End the thread that follows grammars, if there is one."""
        if self._grammars is not None:
            self._grammars.close()

    def set_rows(self, sequences: Sequence[SequenceSampling]) -> None:
        """Begin sequences, each in its `state_row`, whatever had the row before; grammars were compiled by `compile_grammars`.

        Raises:
            ValueError: a sequence has no row.
        """
        self._table.write(sequences)
        for sampling in sequences:
            self._processed.pop(sampling.state_row, None)
            if sampling.logits_processors or sampling.bad_words:
                words = _by_beginning(sampling.bad_words)
                self._processed[sampling.state_row] = _Processed(sampling.logits_processors, words)

    def rehearse(self, num_rows: int) -> None:
        """Sample rows that ask for everything a sequence can ask for, for a profile; the tables keep their room for so many rows.

        No sequence may have a row yet.
        """
        asked = SequenceSampling(
            seq_id=-1,
            prompt_token_ids=(0,),
            seed=0,
            top_p=0.9,
            min_p=0.1,
            presence_penalty=1.0,
            repetition_penalty=1.1,
            min_tokens=1,
            stop_token_ids=frozenset({1}),
            logit_bias={0: 1.0},
            allowed_token_ids=(0, 1),
            logprobs=min(20, self._vocab_size),
        )
        self.set_rows([replace(asked, state_row=row) for row in range(num_rows)])
        logits = torch.zeros((num_rows, self._vocab_size), dtype=torch.float32, device=self._device)
        self.sample(logits, np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int32)).collect()

    def take(self, token_ids: Tensor, rows: Int32Array) -> SampledTokens:
        """Return tokens that the model chose itself, int64[S] on the device; where steps run ahead, they are noted as the rows' last."""
        if self._runs_ahead:
            self._table.tables.last_tokens.index_copy_(0, self._upload(rows.astype(np.int64)), token_ids)
        return self._collectable(token_ids, (), {}, {})

    @torch.no_grad()
    def score(self, logits: Tensor, token_ids: Int64Array, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log probabilities of given tokens, and of the most probable ones, on their way to the host.

        Args:
            logits: float32[m, vocab_size] on the device, not changed.
            token_ids: int64[m].
            count: of the most probable ones.

        Returns:
            What `PromptLogprobs` has.
        """
        return self._ranked(logits, self._upload(token_ids), count)

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Int32Array, positions: Int32Array) -> SampledTokens:
        """Sample one token per row, and count it to the row's history.

        Args:
            logits: float32[S, vocab_size] on the device, not changed.
            rows: int32[S], rows that were set; several times only one without a history or functions: for its next token and those after
                guesses, which `prefetch_masks` was given where it follows a grammar.
            positions: int32[S], how many tokens the rows' sequences have.

        Raises:
            ValueError: there is no such row.
        """
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self._table.host):
            raise ValueError(f"rows {rows.tolist()} are not all in 0..{len(self._table.host) - 1}")
        reasons = dict[int, str]()
        guided = self._guided(rows)
        if guided:
            masks = {id(guide): guide.masks() for guide in guided.values()}
            reasons = {i: guide.failure for i, guide in guided.items() if guide.failure is not None}
        given = logits
        processed = {i: self._processed[row] for i, row in enumerate(rows.tolist()) if row in self._processed}
        if processed:
            given = logits.clone()
            for i, one in processed.items():
                reason = one.apply(given[i])
                if reason is not None:
                    reasons[i] = reason
                    given[i] = -torch.inf
        if not guided:
            tokens, shown = self._draw(logits, given, rows, positions)
            return self._collectable(tokens, self._logprobs(shown, tokens, self._table.host[rows]), processed, reasons)
        places, seen = np.zeros(len(rows), np.int64), Counter[int]()
        for i, guide in guided.items():
            places[i] = seen[id(guide)]
            seen[id(guide)] += 1
        tokens, parts = torch.empty(len(rows), dtype=torch.int64, device=self._device), []
        # A row has one mask at a time. What is sampled behind a guess that its grammar does not go on with is not asked for.
        for place in range(max(seen.values())):
            chosen = np.flatnonzero(places == place)
            of = {int(rows[i]): masks[id(guided[i])] for i in chosen.tolist() if i in guided}
            self._table.set_allowed(list(of), [each[place] if place < len(each) else each[0] for each in of.values()])
            index = slice(None) if len(chosen) == len(rows) else self._upload(chosen)
            found, shown = self._draw(logits[index], given[index], rows[chosen], positions[chosen])
            tokens[index] = found
            parts.append((index, shown))
        if len(parts) > 1:
            shown = torch.empty_like(logits)
            for index, part in parts:
                shown[index] = part
        logprobs = self._logprobs(shown, tokens, self._table.host[rows])
        return self._collectable(tokens, logprobs, processed, reasons, partial(self._advance, guided))

    def prefetch_masks(self, rows: Int32Array, token_ids: Int64Array) -> None:
        """Take guesses at the next tokens of rows, in their order, and begin to make the masks behind them where grammars are followed.

        Args:
            rows: int32[n].
            token_ids: int64[n].
        """
        given: dict[int, tuple[Guide, list[int]]] = {}
        for i, guide in self._guided(rows).items():
            given.setdefault(int(rows[i]), (guide, []))[1].append(int(token_ids[i]))
        if given:
            assert self._grammars is not None
            self._grammars.prefetch_masks(list(given.values()))

    def guess(self, logits: Tensor, rows: Int32Array, positions: Int32Array) -> Int64Array:
        """Return guesses at the tokens of rows, each but once: what would be sampled of these logits behind the guesses before.

        A row that has no token is given 0. Args: see `sample`.
        """
        guided = self._guided(rows)
        if guided:
            self._table.set_allowed(rows[list(guided)].tolist(), [guide.masks()[-1] for guide in guided.values()])
        tokens, _ = self._draw(logits, logits, rows, positions)
        found: Int64Array = np.maximum(self._collectable(tokens, (), {}, {}).collect().token_ids, 0)
        self.prefetch_masks(rows, found)
        return found

    def _guided(self, rows: Int32Array) -> dict[int, Guide]:
        """Return the guides of rows that follow a grammar, by their places in `rows`."""
        if not self._guides:
            return {}
        return {i: self._guides[row] for i, row in enumerate(rows.tolist()) if row in self._guides}

    def _draw(self, logits: Tensor, given: Tensor, rows: Int32Array, positions: Int32Array) -> tuple[Tensor, Tensor]:
        """Return a token for each row, and the logits that log probabilities are of; `given` is what processors made of the logits."""
        host, tables = self._table.host[rows], self._table.tables
        step = np.zeros((3, len(rows)), np.int64)
        step[0], step[1] = rows, positions
        if not host["greedy"].all():
            step[2] = draws(host["key"], positions)
        on_device = self._upload(step)
        # Before sampling, which counts the tokens to the rows' histories.
        shown = self._shown_logits(logits, given, on_device, step, host)
        tokens = None if self._kernels is None else self._kernels.sample(given, on_device, tables)
        if tokens is None:
            tokens = self._sample_plainly(given, on_device, step, host)
            plain.record(tokens, on_device[0], tables, penalised=bool(host["penalised"].any()))
        return tokens, shown

    def _shown_logits(
        self, logits: Tensor, given: Tensor, on_device: Tensor, step: Int64Array, host: npt.NDArray[np.void]
    ) -> Tensor:
        """Return the logits that rows' log probabilities are of: the model's own, or those that a token is drawn from."""
        wanted = np.flatnonzero((host["logprobs"] >= 0) & host["processed"])
        if not len(wanted):
            return logits
        shown = logits.clone()
        for block in _blocks(wanted, logits, self._block):
            index = self._upload(block)
            rows, positions, _ = on_device[:, index].unbind(0)
            part = plain.edited_logits(given[index], rows, positions, self._table.tables)
            ranked = bool((host["ranked"][block] & ~host["greedy"][block]).any())
            shown.index_copy_(0, index, plain.drawn_logits(part, rows, self._table.tables, ranked=ranked))
        return shown

    def _advance(self, guided: Mapping[int, Guide], outcomes: Int64Array) -> None:
        """Give sequences that follow a grammar their tokens, up to the first that is not what was guessed; those that have none end."""
        assert self._grammars is not None
        given: dict[int, tuple[Guide, list[int]]] = {}
        for i, guide in guided.items():
            tokens = given.setdefault(id(guide), (guide, []))[1]
            if outcomes[i] >= 0 and tokens == guide.guesses[: len(tokens)]:
                tokens.append(int(outcomes[i]))
        moved = [(guide, tokens) for guide, tokens in given.values() if tokens]
        if moved:
            self._grammars.advance(moved)

    def _sample_plainly(
        self, logits: Tensor, on_device: Tensor, step: Int64Array, host: npt.NDArray[np.void]
    ) -> Tensor:
        tables = self._table.tables
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        edited = host["edited"] | (step[1] < host["min_tokens"])
        for block in _blocks(np.arange(len(logits)), logits, self._block):
            rows, positions, draw = on_device[:, block[0] : block[-1] + 1].unbind(0)
            part = logits[block[0] : block[-1] + 1]
            if edited[block].any():
                part = plain.edited_logits(part, rows, positions, tables)
            for greedy, ranked in ((True, False), (False, False), (False, True)):
                same = (host["greedy"][block] == greedy) & ((host["ranked"][block] & ~host["greedy"][block]) == ranked)
                if not same.any():
                    continue
                chosen = slice(None) if same.all() else self._upload(np.flatnonzero(same))
                if greedy:
                    found = plain.greedy_tokens(part[chosen])
                else:
                    found = plain.drawn_tokens(part[chosen], rows[chosen], draw[chosen], tables, ranked=ranked)
                tokens[block[0] : block[-1] + 1][chosen] = found
        return tokens

    def _logprobs(self, logits: Tensor, tokens: Tensor, host: npt.NDArray[np.void]) -> list[_HostLogprobs]:
        found, wanted = [], host["logprobs"]
        for as_logits in (False, True):
            for block in _blocks(np.flatnonzero((wanted >= 0) & (host["as_logits"] == as_logits)), logits, self._block):
                whole = len(block) == len(logits)
                part, chosen = (logits, tokens) if whole else (logits[index := self._upload(block)], tokens[index])
                count = int(wanted[block].max())
                ranked = self._ranked(part, chosen, count, as_logits=as_logits)
                found.append(_HostLogprobs(block, wanted[block], *ranked))
        return found

    def _ranked(
        self, logits: Tensor, token_ids: Tensor, count: int, *, as_logits: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `ranking.logprobs` returns, or the logits of the same tokens, on its way to the host."""
        given = None if self._kernels is None else self._kernels.logprobs(logits, token_ids, count)
        ids, values, ranks = ranking.logprobs(logits, token_ids, count) if given is None else given
        if as_logits:
            values = logits.gather(1, ids)
        return self._to_host(ids), self._to_host(values), self._to_host(ranks)

    def _collectable(
        self,
        tokens: Tensor,
        logprobs: Sequence[_HostLogprobs],
        processed: Mapping[int, _Processed],
        reasons: Mapping[int, str],
        note: Callable[[Int64Array], None] | None = None,
    ) -> SampledTokens:
        # What no step can overwrite before it is collected needs no copy on the host.
        is_there = self._device.type == "cpu" and not self._runs_ahead
        host = tokens if is_there else self._to_host(tokens)
        copied = None if self._platform is None else self._platform.record_event()
        return SampledTokens(tokens, host, logprobs, copied, processed, reasons, note)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host."""
        return tensor if self._platform is None else self._platform.download(tensor)


def _blocks(rows: Int64Array, logits: Tensor, elements: int) -> Iterator[Int64Array]:
    """Cut rows of logits into blocks of about so many elements that are worked on together."""
    size = max(1, elements // logits.shape[1])
    return (rows[start : start + size] for start in range(0, len(rows), size))
