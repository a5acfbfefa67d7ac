"""What each rank of an engine is: its backend, its device and its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from hardpoint.executor.calls import CONFIG, from_message, to_message
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.start import collection_paused
from hardpoint.interfaces.errors import ConfigError
from hardpoint.interfaces.worker import Worker, WorkerConfig, WorkerContext
from hardpoint.plugins import Resolved, resolve_backend


@dataclass(frozen=True)
class RankSpec:
    """What one rank is made of; the backend is found by its name where the rank runs.

    Attributes:
        backend: name.
        device: index within the backend, where the rank runs.
    """

    backend: str
    device: int
    config: WorkerConfig

    def encode(self) -> list[Buffer]:
        """Return it as a message."""
        return encode((self.backend, self.device, to_message(self.config)))

    @classmethod
    def decode(cls, message: Buffer) -> RankSpec:
        """Return the one of a message; raises MalformedMessage."""
        backend, device, config = decode(message, tuple[str, int, CONFIG])
        return cls(backend, device, from_message(config))

    def make_worker(self) -> Worker:
        """Return the worker of this rank, not started; raises what `resolve_backend` raises."""
        resolved = resolve_backend(self.backend, device=self.device)
        context = WorkerContext(descriptor=resolved.descriptor, device=resolved.device, config=self.config)
        with collection_paused():
            return resolved.descriptor.worker()(context)


def rank_specs(resolved: Resolved, config: WorkerConfig, *, init_method: str = "") -> list[RankSpec]:
    """Return what the ranks of one machine are.

    Ranks on accelerators take a device each, from `resolved.device` on. Ranks on the host's processor share it: each gets its part of
    the threads.

    Args:
        config: of the whole engine; its rank and address are replaced, and `threads` is shared out.

    Raises:
        ConfigError: there are fewer devices than ranks.
    """
    world_size = config.tensor_parallel_size * config.pipeline_parallel_size
    first = resolved.device.index
    devices = [first + rank if resolved.descriptor.accelerator else first for rank in range(world_size)]
    if devices[-1] != first:
        _check_device(resolved, devices[-1], world_size)
    threads = config.threads
    if world_size > 1:
        threads = max((threads or len(os.sched_getaffinity(0))) // world_size, 1)
    common: dict[str, Any] = {"world_size": world_size, "init_method": init_method, "threads": threads}
    return [
        RankSpec(resolved.descriptor.name, device, replace(config, rank=rank, **common))
        for rank, device in enumerate(devices)
    ]


def _check_device(resolved: Resolved, last: int, world_size: int) -> None:
    try:
        resolve_backend(resolved.descriptor.name, device=last)
    except ConfigError as error:
        raise ConfigError(
            f"{world_size} ranks need {world_size} devices, from device {resolved.device.index} on",
            found=error.found,
            hint="Lower tensor_parallel_size or pipeline_parallel_size, or begin at a lower device",
        ) from error
