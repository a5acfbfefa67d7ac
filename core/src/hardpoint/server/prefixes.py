"""Which replica has seen the beginning of a prompt, and may have it in its prefix cache."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

_BLOCK = 64
"""Characters by which beginnings grow: about a KV block of tokens."""
_MOST_BLOCKS = 64
_FIELDS = ("messages", "prompt", "input")

R = TypeVar("R")


def beginnings(body: bytes) -> tuple[str, ...]:
    """Return names of the beginnings of a request's prompt, each a block longer than the one before; equal beginnings have equal names.

    None for what is no request with a prompt. Requests with unlike `cache_salt` share no names, as they share no cache.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(fields, dict):
        return ()
    text = next((_text(fields[name]) for name in _FIELDS if fields.get(name)), "")
    hashed = blake2b(json.dumps(fields.get("cache_salt")).encode(), digest_size=12)
    names = []
    for start in range(0, min(len(text) - _BLOCK + 1, _BLOCK * _MOST_BLOCKS), _BLOCK):
        hashed.update(text[start : start + _BLOCK].encode("utf-8", "surrogatepass"))
        names.append(hashed.hexdigest())
    return tuple(names)


class PrefixOwners(Generic[R]):
    """Remembers to whom prompts went last, by the names of their beginnings; the names that were used least lately are forgotten.

    Args:
        imbalance: requests in progress that an owner may have more than the least busy replica.
        capacity: names that are remembered.
    """

    def __init__(self, imbalance: int, capacity: int = 1 << 16) -> None:
        self._imbalance, self._capacity = imbalance, capacity
        self._owners: OrderedDict[str, R] = OrderedDict()

    def note(self, names: Sequence[str], replica: R) -> None:
        """Remember that a prompt with these beginnings went to a replica."""
        for name in names:
            self._owners[name] = replica
            self._owners.move_to_end(name)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def preferred(self, names: Sequence[str], loads: Mapping[R, int]) -> R | None:
        """Return who has seen the longest of the beginnings; None where nobody has, or is too busy.

        Args:
            loads: requests in progress of each replica that there is.
        """
        for name in reversed(names):
            owner = self._owners.get(name)
            if owner is not None and owner in loads:
                return owner if loads[owner] <= min(loads.values()) + self._imbalance else None
        return None


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
