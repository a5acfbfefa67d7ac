"""When a command looks for garbage: not while it imports and loads, whose objects stay, nor among them later, at its end for example.

To go through them again and again takes a third of a short command's processor time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class _Process:
    """Whether the process is the command's own; in another's, what there is may be garbage of somebody else."""

    taken = False


def take() -> None:
    """The process is the command's own, from its start to its end."""
    _Process.taken = True


@contextmanager
def nothing_collected() -> Iterator[None]:
    """A context for imports and loading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        keep()
        if was_enabled:
            gc.enable()


def keep() -> None:
    """Look no more through what there is now. Exit handlers, and destructors of what is no cycle, run as ever."""
    if _Process.taken:
        gc.freeze()
