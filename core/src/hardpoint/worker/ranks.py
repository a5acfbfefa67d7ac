"""A rank among others: whether it can be one, and the groups that it joins."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from hardpoint.interfaces.backend import BackendDescriptor, Device
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.models import ParallelRank, Ranks
from hardpoint.worker.rendezvous import RendezvousPoint

if TYPE_CHECKING:
    from hardpoint.interfaces.collectives import Collectives


def place_of(config: WorkerConfig) -> ParallelRank:
    """Return the place that a configuration gives its rank."""
    return ParallelRank(config.tensor_rank, config.tensor_parallel_size, config.stage, config.pipeline_parallel_size)


def check_ranks(config: WorkerConfig, descriptor: BackendDescriptor, device: Device) -> None:
    """Refuse what cannot be a rank here, before anything is started.

    Raises:
        ConfigError: sizes, rank and address do not go together.
        CapabilityRefused: the backend does not claim this number of ranks; with all reasons.
    """
    tensor, stages, world = config.tensor_parallel_size, config.pipeline_parallel_size, config.world_size
    if tensor < 1 or stages < 1 or tensor * stages != world or not 0 <= config.rank < world:
        raise ConfigError(
            f"rank {config.rank} of {world} is no place among ranks",
            found=f"tensor_parallel_size={tensor}, pipeline_parallel_size={stages}",
            hint="world_size is tensor_parallel_size * pipeline_parallel_size, and ranks count from 0",
        )
    check_claims(config, descriptor, device)
    if world == 1:
        return
    if not config.init_method:
        raise ConfigError(
            f"rank {config.rank} of {world} does not know where the ranks meet",
            found="an empty init_method",
            hint="Give init_method as tcp://host:port/group",
        )
    RendezvousPoint.parse(config.init_method)


def check_claims(config: WorkerConfig, descriptor: BackendDescriptor, device: Device) -> None:
    """Raise CapabilityRefused, with all reasons, where the backend does not claim as many ranks as the sizes ask for."""
    tensor = config.tensor_parallel_size
    world = tensor * config.pipeline_parallel_size
    if world == 1:
        return
    claims, reasons = descriptor.capabilities(device), []
    if tensor not in claims.tensor_parallel:
        reasons.append(f"{tensor} tensor-parallel ranks are not supported (supported: {claims.tensor_parallel})")
    if not claims.collectives or descriptor.collectives is None:
        reasons.append(f"{world} ranks need collectives, and the backend has none")
    if reasons:
        raise CapabilityRefused(
            f"the {descriptor.name} backend cannot run {world} ranks", tuple(reasons), hint="Run with one rank"
        )


def join_ranks(config: WorkerConfig, descriptor: BackendDescriptor, device: Device) -> tuple[Ranks, ExitStack]:
    """Join the groups of a rank: those that share its layers, and those of its place in each stage.

    Rank 0 of all serves the address, unless it is served already; every group has a name of its own there.

    Returns:
        The groups, and what leaves them when it is closed.

    Raises:
        WorkerError: not all ranks came within `communication_timeout` seconds.
    """
    rendezvous, place = RendezvousPoint.parse(config.init_method), place_of(config)
    with ExitStack() as groups:

        def join(name: str, rank: int, size: int) -> Collectives | None:
            if size == 1:
                return None
            collectives: Collectives = descriptor.make("collectives", device)
            groups.callback(collectives.stop)
            method = rendezvous.subgroup(name, served=config.rank != 0)
            collectives.start(rank, size, method, config.communication_timeout)
            return collectives

        tensor = join(f"stage{place.stage}", place.tensor_rank, place.tensor_size)
        pipeline = join(f"pipeline{place.tensor_rank}", place.stage, place.stages)
        return Ranks(tensor, pipeline), groups.pop_all()
