"""The CUDA backend's collectives: NCCL, whose communicators give their memory back during a sleep where that is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.errors import ConfigError
from hardpoint.worker.ranks import TorchCollectives

if TYPE_CHECKING:
    from hardpoint.interfaces import Device

SUSPEND_VARIABLE = "HARDPOINT_CUDA_SUSPEND_NCCL"
"""Environment variable that asks for communicators that sleep (1). They stay awake otherwise, while no device has shown it."""

MIN_SUSPEND_VERSION = (2, 29, 7)
"""The first NCCL with `ncclCommSuspend` and `ncclCommResume`, which torch's process group calls."""


class CudaCollectives(TorchCollectives):
    """Ranks on devices, over torch's process group of NCCL."""

    def __init__(self, device: Device) -> None:
        """Make the rank's part; raises ConfigError where the environment asks for neither 1 nor 0."""
        super().__init__(device)
        asked = os.environ.get(SUSPEND_VARIABLE, "")
        if asked not in ("", "0", "1"):
            raise ConfigError(
                f"{SUSPEND_VARIABLE}={asked} is neither 1 nor 0",
                hint="Set it to 1 for communicators that give their memory back during a sleep, or unset it",
            )
        self._suspends = asked == "1"

    def _can_suspend(self, group: Any) -> bool:
        return self._suspends and hasattr(group, "suspend") and nccl_version() >= MIN_SUSPEND_VERSION


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch has loaded."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version
