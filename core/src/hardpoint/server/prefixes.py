"""Names of the beginnings of requests' prompts, by which `PrefixOwners` finds the replica that may have one in its prefix cache."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

_BLOCK = 64
"""Characters by which beginnings grow: about a KV block of tokens."""
_MAX_BLOCKS = 64
_FIELDS = ("messages", "prompt", "input")


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
    for start in range(0, min(len(text) - _BLOCK + 1, _BLOCK * _MAX_BLOCKS), _BLOCK):
        hashed.update(text[start : start + _BLOCK].encode("utf-8", "surrogatepass"))
        names.append(hashed.hexdigest())
    return tuple(names)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
