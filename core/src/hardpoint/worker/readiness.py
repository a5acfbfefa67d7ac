"""A worker's parts exist from the call on that makes them."""

from __future__ import annotations

from typing import TypeVar

from hardpoint.interfaces.errors import WorkerError

T = TypeVar("T")


def need(part: T | None) -> T:
    """Return a part of the worker; raises WorkerError when the call that makes it has not been made."""
    if part is None:
        raise WorkerError(
            "the worker is not ready for this call",
            hint="Call start, load, profile, initialize_kv and warm_up first, in this order",
        )
    return part
