"""Which tokens a sequence has seen, kept sparse, for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """Distinct tokens of one sequence's prompt and output, and how often each was generated.

    Room grows by doubling, so that adding a token costs constant time on average.
    """

    __slots__ = ("_counts", "_index", "_size", "_token_ids")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._size = len(distinct)
        self._token_ids = np.concatenate((distinct, np.zeros(64, dtype=np.int64)))
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        self._index = {token_id: position for position, token_id in enumerate(distinct.tolist())}

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        position = self._index.get(token_id)
        if position is None:
            position = self._index[token_id] = self._size
            if position == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._token_ids[position] = token_id
            self._size += 1
        self._counts[position] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens of prompt and output, int64[size]."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `token_ids` was generated (0 for those of the prompt alone), float32[size]."""
        return self._counts[: self._size]
