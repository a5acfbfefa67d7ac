"""The device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_cuda.capabilities import refusal

if TYPE_CHECKING:
    from hardpoint.interfaces import DeviceAllocator


def allocator() -> type[DeviceAllocator]:
    """Refuse: this version has no memory allocator; raises CapabilityRefused."""
    raise refusal("memory allocator")
