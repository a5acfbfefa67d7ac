"""The state of the sampled sequences: one row each, on the host what steps are planned with, on the device what tokens are sampled with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.interfaces.batch import Int32Array, LogprobsMode, SequenceSampling
from hardpoint.interfaces.sampling import TOP_P_BITS, Column, SamplingTables
from hardpoint.sampling.masks import token_mask
from hardpoint.sampling.params import GREEDY_BELOW
from hardpoint.sampling.random import stream_key

if TYPE_CHECKING:
    from torch import Tensor

Records: TypeAlias = npt.NDArray[np.void]
Upload: TypeAlias = "Callable[[npt.NDArray[np.generic]], Tensor]"

MAX_TEMPERATURE = 1e30
"""A higher temperature counts as this one, which makes all tokens alike that are not masked."""
_FLOATS = {Column.INVERSE_TEMPERATURE, Column.LOG_MIN_P, Column.REPETITION, Column.FREQUENCY, Column.PRESENCE}
_PARAMETERS = np.dtype([(column.name.lower(), "<f4" if column in _FLOATS else "<i4") for column in Column])
_HOST = np.dtype(
    [
        ("key", np.uint64),
        ("logprobs", np.int64),
        ("greedy", np.bool_),
        ("ranked", np.bool_),
        ("edited", np.bool_),
        ("penalised", np.bool_),
        ("min_tokens", np.int64),
        ("processed", np.bool_),
        ("as_logits", np.bool_),
    ]
)
"""What the host knows of a row.

key: of the sequence's random stream. logprobs: how many of the best are wanted, -1 for no log probabilities. greedy: nothing is
drawn. ranked: top_k or top_p needs an order. edited: the logits are changed at every token. penalised: the row has a history.
min_tokens: stop tokens are masked before this number of tokens. processed, as_logits: what log probabilities are, see `LogprobsMode`.
"""


class SamplingTable:
    """The rows of sampled sequences.

    A row is written when a sequence begins and belongs to it until it is written again. Rows and pools grow by doubling, and what
    rows of a step bring reaches the device with one copy for each table that it changes.
    """

    def __init__(self, vocab_size: int, device: torch.device, upload: Upload) -> None:
        """Begin without rows.

        Args:
            upload: copies an array to the device without waiting for it.
        """
        self._vocab_size, self._device, self._upload = vocab_size, device, upload
        self._parameters = torch.empty((0, len(Column)), dtype=torch.int32, device=device)
        self._last_tokens = torch.empty(0, dtype=torch.int64, device=device)
        self._records: Records = np.zeros(0, _PARAMETERS)
        self.host: Records = np.zeros(0, _HOST)
        self._masks = _Pool(-(-vocab_size // 32), torch.int32, device)
        self._biases = _Pool(vocab_size, torch.float32, device)
        self._history = _Pool(vocab_size, torch.int32, device)

    @property
    def tables(self) -> SamplingTables:
        """The tables as they are now; the next `write` may replace them."""
        return SamplingTables(
            self._parameters, self._last_tokens, self._masks.tensor, self._biases.tensor, self._history.tensor
        )

    def write(self, sequences: Sequence[SequenceSampling]) -> None:
        """Give rows (`SequenceSampling.state_row`) to sequences that begin, whatever had them before."""
        if not sequences:
            return
        rows = np.array([sampling.state_row for sampling in sequences], np.int64)
        if rows.min() < 0:
            raise ValueError(f"sequences that are sampled need rows of the state table, not {rows.tolist()}")
        self.reserve(int(rows.max()) + 1)
        for row in rows.tolist():
            self._release(row)
        masks, biases, histories = _Uploads(), _Uploads(), _Uploads()
        # A number that float32 does not hold is infinity, and its row fails.
        with np.errstate(over="ignore"):
            for row, sampling in zip(rows.tolist(), sequences, strict=True):
                self._set(row, sampling, masks, biases, histories)
        self._fill(masks, biases, histories)
        words = self._records[rows].view(np.int32).reshape(len(rows), len(Column))
        self._parameters.index_copy_(0, self._upload(rows), self._upload(words))

    def set_allowed(self, rows: Sequence[int], masks: Sequence[Int32Array]) -> None:
        """Give rows of sequences that follow a grammar the masks of their next tokens, int32[ceil(vocab_size / 32)] each."""
        slots = self._records["allowed_mask"][rows].astype(np.int64)
        self._masks.tensor.index_copy_(0, self._upload(slots), self._upload(np.stack(masks)))

    def reserve(self, count: int) -> None:
        """Have at least so many rows."""
        have = len(self.host)
        if count <= have:
            return
        added = max(64, 2 * have, 1 << (count - 1).bit_length()) - have
        self.host = np.concatenate((self.host, np.zeros(added, _HOST)))
        fresh = np.zeros(added, _PARAMETERS)
        for name in ("allowed_mask", "stop_mask", "bias", "history"):
            fresh[name] = -1
        self._records = np.concatenate((self._records, fresh))
        self._parameters = _longer(self._parameters, added)
        self._last_tokens = _longer(self._last_tokens, added)

    def _release(self, row: int) -> None:
        """Give back what the row's last sequence had in the pools."""
        record = self._records[row]
        for pool, name in (
            (self._masks, "allowed_mask"),
            (self._masks, "stop_mask"),
            (self._biases, "bias"),
            (self._history, "history"),
        ):
            if record[name] >= 0:
                pool.give_back(int(record[name]))
                record[name] = -1

    def _set(
        self, row: int, sampling: SequenceSampling, masks: _Uploads, biases: _Uploads, histories: _Uploads
    ) -> None:
        vocab_size = self._vocab_size
        greedy = sampling.temperature < GREEDY_BELOW
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        top_p = int(sampling.top_p * 2**TOP_P_BITS)
        top_k = min(sampling.top_k or vocab_size, vocab_size)
        guided = sampling.grammar is not None
        masked = guided or sampling.allowed_token_ids is not None
        # The masks of a grammar say themselves when the text may end.
        min_tokens = min(sampling.min_tokens, 2**31 - 1) if sampling.stop_token_ids and not guided else 0
        # At once, in the order of `Column`: by its names each number takes as long as all of them.
        self._records[row] = (
            0.0 if greedy else 1 / min(sampling.temperature, MAX_TEMPERATURE),
            top_p,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            top_k,
            *penalties,
            min_tokens,
            *(-1, -1, -1, -1),
        )
        record = self._records[row]
        if masked:
            record["allowed_mask"] = slot = self._masks.take()
            masks.add(slot, token_mask(vocab_size, sampling.allowed_token_ids or ()))
        if min_tokens:
            record["stop_mask"] = slot = self._masks.take()
            masks.add(slot, ~token_mask(vocab_size, sampling.stop_token_ids))
        if sampling.logit_bias:
            record["bias"] = slot = self._biases.take()
            ids = np.fromiter(sampling.logit_bias, np.int64)
            values = np.fromiter(sampling.logit_bias.values(), np.float32)
            biases.add(slot, values, ids + slot * vocab_size)
        penalised = penalties != (1.0, 0.0, 0.0)
        if penalised:
            record["history"] = slot = self._history.take()
            prompt = np.unique(np.asarray(sampling.prompt_token_ids, np.int64))
            histories.add(slot, np.ones(len(prompt), np.int32), prompt + slot * vocab_size)
        self.host[row] = (
            stream_key(sampling.seed),
            -1 if sampling.logprobs is None else min(sampling.logprobs, vocab_size),
            greedy,
            top_k < vocab_size or top_p < 1 << TOP_P_BITS,
            penalised or masked or bool(sampling.logit_bias),
            penalised,
            min_tokens,
            sampling.logprobs_mode in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS),
            sampling.logprobs_mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS),
        )

    def _fill(self, masks: _Uploads, biases: _Uploads, histories: _Uploads) -> None:
        if masks.slots:
            words = self._upload(np.stack(masks.values))
            self._masks.tensor.index_copy_(0, self._upload(np.array(masks.slots)), words)
        for pool, given in ((self._biases, biases), (self._history, histories)):
            if given.slots:
                pool.tensor.index_fill_(0, self._upload(np.array(given.slots)), 0)
                places = self._upload(np.concatenate(given.places))
                pool.tensor.view(-1).index_copy_(0, places, self._upload(np.concatenate(given.values)))


class _Uploads:
    """What sequences that begin bring into one pool: slots, values, and where the values go where they are not a whole slot."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.values: list[npt.NDArray[np.generic]] = []
        self.places: list[npt.NDArray[np.int64]] = []

    def add(self, slot: int, values: npt.NDArray[np.generic], places: npt.NDArray[np.int64] | None = None) -> None:
        self.slots.append(slot)
        self.values.append(values)
        if places is not None:
            self.places.append(places)


class _Pool:
    """Slots of equal width on the device, for the rows that need one; grows by doubling."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty((0, width), dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        if not self._free:
            have = len(self.tensor)
            added = max(2, have)
            self.tensor = _longer(self.tensor, added)
            self._free = list(range(have + added - 1, have - 1, -1))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


def _longer(tensor: Tensor, added: int) -> Tensor:
    more = torch.zeros((added, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    return torch.cat((tensor, more))
