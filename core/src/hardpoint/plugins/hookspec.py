"""The one hook that a backend implements.

A backend marks its function with pluggy's own marker, `pluggy.HookimplMarker("hardpoint")`, so that its descriptor module needs
nothing of the core but `hardpoint.interfaces`.
"""

from __future__ import annotations

import pluggy

from hardpoint.interfaces import BackendDescriptor

PROJECT = "hardpoint"
"""Name of the pluggy project: the argument of both markers."""

ENTRY_POINT_GROUP = "hardpoint.backends"
"""Group of entry points in which distributions list their backends, by the backend's name."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hardpoint_backend() -> BackendDescriptor:  # type: ignore[empty-body]
    """Return what the backend says of itself. Imports neither torch nor a device library."""
