"""Discovery of backends: the hook they implement, one record per candidate, and the choice of one of them.

What a backend must offer is in `hardpoint.interfaces`; what is done with the chosen one is the executor's business. Nothing here
imports torch or knows any backend by name.
"""

from hardpoint.plugins.hookspec import ENTRY_POINT_GROUP, hookimpl
from hardpoint.plugins.loader import Registry, discover, installed
from hardpoint.plugins.record import BackendRecord, BackendState
from hardpoint.plugins.resolve import Resolved, resolve_backend

__all__ = [
    "ENTRY_POINT_GROUP",
    "BackendRecord",
    "BackendState",
    "Registry",
    "Resolved",
    "discover",
    "hookimpl",
    "installed",
    "resolve_backend",
]
