"""One rank on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_ascend.capabilities import refusal

if TYPE_CHECKING:
    from hardpoint.interfaces import Worker


def worker() -> type[Worker]:
    """Refuse: this version has no worker; raises CapabilityRefused."""
    raise refusal("worker")
