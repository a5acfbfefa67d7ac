"""Memory of captured device work, in torch's pools over Hardpoint's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.allocator import Policy

if TYPE_CHECKING:
    from hardpoint.memory.torch_pool import TorchPools


class TorchGraphPool:
    """A torch pool for captured work: what was allocated while capturing stays, whether or not a tensor still lies there."""

    def __init__(self, pools: TorchPools, tag: str) -> None:
        """Make the pool; raises CapabilityRefused where torch's build or settings do not allow it."""
        pools.functions.check()
        self._pools = pools
        self._tag = tag
        self._torch_pool = pools.make()

    @property
    def id(self) -> Any:
        """What torch's capture takes as its pool."""
        return self._torch_pool.id

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's torch allocations on the device come from the pool."""
        return self._pools.context(self._tag, Policy.PRESERVE, self._torch_pool)

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context around a capture into the pool `id`, which takes new segments from this memory."""
        return self._pools.context(self._tag, Policy.PRESERVE, self._torch_pool, is_routed=False)

    def users(self) -> int:
        """Return how many torch counts: the pool itself, and each graph that was captured into it."""
        return 0 if self._torch_pool is None else int(self._torch_pool.use_count())

    def mapped_bytes(self) -> int:
        """Return the bytes of the pool's segments that are awake."""
        if self._torch_pool is None:
            return 0
        segments = self._pools.functions.segments(self._torch_pool)
        return sum(int(one["total_size"]) for one in segments if not self._pools.memory.is_asleep(one["address"]))

    def close(self) -> None:
        """Give the memory back, once the graphs that were captured into it are gone."""
        if self._torch_pool is not None:
            self._pools.end(self._torch_pool)
            self._torch_pool = None
            self._pools.functions.empty_cache()
