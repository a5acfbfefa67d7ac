"""Which machines of a Ray cluster the ranks run on: what is asked for, whether there is room, and in which order ranks are numbered."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hardpoint.interfaces.errors import ClusterError

_log = logging.getLogger("hardpoint")

_Item = TypeVar("_Item")

TOGETHER_SHARE = 0.5
"""Part of the time limit that is spent on waiting for room for each stage on one machine."""


@dataclass(frozen=True)
class Demand:
    """What ranks need.

    Attributes:
        resource: as Ray calls it.
        amount: of the resource, for each rank.
        stages: of the pipeline.
        ranks_per_stage: which exchange data in every layer.
    """

    resource: str
    amount: float
    stages: int
    ranks_per_stage: int

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray sets aside for one rank."""
        return {self.resource: self.amount}

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.stages * self.ranks_per_stage

    def fits_together(self, rooms: Iterable[float]) -> bool:
        """Whether each stage fits on one machine.

        Args:
            rooms: how much of the resource each machine has.
        """
        return sum(self._count(room) // self.ranks_per_stage for room in rooms) >= self.stages

    def fits(self, rooms: Iterable[float]) -> bool:
        """Whether the ranks fit on the machines in any way."""
        return sum(map(self._count, rooms)) >= self.num_ranks

    def actor_options(self) -> dict[str, Any]:
        """Return what an actor takes of its bundle, as Ray's options."""
        if self.resource == "GPU":
            return {"num_cpus": 0, "num_gpus": self.amount}
        if self.resource == "CPU":
            return {"num_cpus": self.amount}
        return {"num_cpus": 0, "resources": self.bundle}

    def _count(self, room: float) -> int:
        # Ray counts in ten thousandths.
        return round(room * 10_000) // max(round(self.amount * 10_000), 1)

    def __str__(self) -> str:
        groups = f" in {self.stages} stages of {self.ranks_per_stage}" if self.stages > 1 else ""
        return f"{self.num_ranks} ranks{groups} with {self.amount:g} {self.resource} each"


def rooms_of(nodes: Sequence[Mapping[str, Any]], resource: str) -> dict[str, float]:
    """Return how much of a resource each living machine has, by its address and id.

    Args:
        nodes: as `ray.nodes()` gives them.
    """
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": float(node["Resources"].get(resource, 0.0))
        for node in nodes
        if node["Alive"]
    }


def in_order(members: Sequence[_Item], nodes: Sequence[str], here: str) -> list[_Item]:
    """Return members sorted so that those of one machine are neighbours, this machine's first; else as they were.

    Args:
        nodes: the machine of each.
        here: this machine.
    """
    first_seen = {node: place for place, node in reversed(list(enumerate(nodes)))}
    return [
        members[place]
        for place in sorted(range(len(members)), key=lambda p: (nodes[p] != here, first_seen[nodes[p]], p))
    ]


def reserve(ray: Any, demand: Demand, seconds: float) -> list[list[tuple[Any, int]]]:
    """Set room aside, and return it for each stage, as placement groups and the numbers of bundles in them.

    Each stage is placed on one machine (STRICT_PACK) where the cluster is large enough for that and has room within half of the time;
    otherwise all ranks are placed on as few machines as possible (PACK).

    Raises:
        ClusterError: there was no room within the time; nothing stays set aside.
    """
    from ray.util import placement_group

    end = time.monotonic() + seconds
    rooms = rooms_of(ray.nodes(), demand.resource)
    if demand.fits_together(rooms.values()):
        stage = [demand.bundle] * demand.ranks_per_stage
        groups = [placement_group(stage, strategy="STRICT_PACK") for _ in range(demand.stages)]
        if _wait(groups, seconds * TOGETHER_SHARE):
            return [[(group, index) for index in range(demand.ranks_per_stage)] for group in groups]
        release(groups)
    if demand.ranks_per_stage > 1:
        _log.warning(
            "no machine of the cluster has room for all %d ranks that share layers: they exchange data over the network",
            demand.ranks_per_stage,
        )
    whole = placement_group([demand.bundle] * demand.num_ranks, strategy="PACK")
    if not _wait([whole], end - time.monotonic()):
        release([whole])
        raise _no_room(ray, demand, seconds)
    bundles = [(whole, index) for index in range(demand.num_ranks)]
    size = demand.ranks_per_stage
    return [bundles[start : start + size] for start in range(0, demand.num_ranks, size)]


def release(groups: Iterable[Any]) -> None:
    """Give back what was set aside."""
    from ray.util import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def _wait(groups: Sequence[Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    try:
        return all(group.wait(max(end - time.monotonic(), 0.01)) for group in groups)
    except BaseException:
        release(groups)
        raise


def _no_room(ray: Any, demand: Demand, seconds: float) -> ClusterError:
    rooms = rooms_of(ray.nodes(), demand.resource)
    free = ray.available_resources().get(demand.resource, 0.0)
    has = ", ".join(f"{room:g} on {name}" for name, room in rooms.items() if room) or "none on any machine"
    large_enough = demand.fits(rooms.values())
    return ClusterError(
        f"the Ray cluster has had no room for {demand} within {seconds:g} s",
        found=f"{demand.resource}: {has}; {free:g} of it free",
        hint="Others use it: end them, or raise ray={'placement_seconds': ...}"
        if large_enough
        else "Lower tensor_parallel_size or pipeline_parallel_size, or add machines",
    )
