"""Which of a model's weights hold valid values."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager


class WeightLedger:
    """Keeps account of the weights that a sleep discarded and that were not written since.

    Args:
        names: the checkpoint names of all weights.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = frozenset(names)
        self._missing: frozenset[str] = frozenset()

    @property
    def missing(self) -> frozenset[str]:
        """Names of the weights without valid values."""
        return self._missing

    def discard_all(self) -> None:
        """Note that no weight is valid any more."""
        self._missing = self._names

    def declare_valid(self) -> None:
        """Note that all weights are valid."""
        self._missing = frozenset()

    @contextmanager
    def writing(self, written: Set[str]) -> Iterator[None]:
        """Note what a write did when it ends: what it wrote is valid, or everything is missing when it broke off in the middle.

        Args:
            written: filled during the write, with each name before its weight is written.
        """
        try:
            yield
        except BaseException:
            if written:
                self.discard_all()
            raise
        self._missing -= written
