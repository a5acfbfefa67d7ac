"""Which of several engines has seen the beginning of a prompt, and may have it in its prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

R = TypeVar("R")
N = TypeVar("N", bound=Hashable)


class PrefixOwners(Generic[N, R]):
    """Remembers to whom prompts went last, by the names of their beginnings; the names that were used least lately are forgotten.

    Args:
        imbalance: requests in progress that an owner may have more than the least busy replica.
        capacity: names that are remembered.
    """

    def __init__(self, imbalance: int, capacity: int = 1 << 16) -> None:
        self._imbalance, self._capacity = imbalance, capacity
        self._owners: OrderedDict[N, R] = OrderedDict()

    def note(self, names: Sequence[N], replica: R) -> None:
        """Remember that a prompt with these beginnings went to a replica."""
        for name in names:
            self._owners[name] = replica
            self._owners.move_to_end(name)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def preferred(self, names: Sequence[N], loads: Mapping[R, int]) -> R | None:
        """Return who has seen the longest of the beginnings; None where nobody has, or is too busy.

        Args:
            loads: requests in progress of each replica that there is.
        """
        for name in reversed(names):
            owner = self._owners.get(name)
            if owner is not None and owner in loads:
                return owner if loads[owner] <= min(loads.values()) + self._imbalance else None
        return None
