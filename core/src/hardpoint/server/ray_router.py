"""Ray Serve's choice of a replica, by the prompt's beginning. Imported only where Ray Serve runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter

from hardpoint.engine.prefix_owners import PrefixOwners


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Prefers the replica to which the longest beginning of the prompt went, unless it is too busy; else the least busy one.

    The names of the beginnings are the first argument of the call.
    """

    def initialize_state(self, imbalance: int) -> None:
        """Take `RequestRouterConfig.request_router_kwargs`."""
        self._owners: PrefixOwners[str, Any] = PrefixOwners(imbalance)

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return replicas by rank; of those of a rank Ray takes the one with the fewest requests."""
        if pending_request is not None:
            # Where no replica takes the request, Ray waits longer before each further try; without this it would ask again at once.
            pending_request.routing_context.should_backoff = True
        replicas = list(candidate_replicas)
        # Ray takes the first of equally busy replicas.
        random.shuffle(replicas)
        loads = {one.replica_id: self.replica_queue_len_cache.get(one.replica_id) or 0 for one in replicas}
        owner = self._owners.preferred(_names(pending_request), loads)
        return [[one for one in replicas if one.replica_id == owner], replicas]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Remember where a prompt went."""
        self._owners.note(_names(pending_request), replica_id)


def _names(pending_request: Any) -> Sequence[str]:
    return pending_request.args[0] if pending_request is not None and pending_request.args else ()
