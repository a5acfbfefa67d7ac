"""What the backend claims for a device: nothing, in this version."""

from __future__ import annotations

from hardpoint.interfaces import Capabilities, Device
from hardpoint.interfaces.errors import CapabilityRefused

NOT_IMPLEMENTED = (
    "this version of hardpoint-cuda finds devices and has no memory allocator, attention or worker for them"
)


def capabilities(device: Device) -> Capabilities:
    """Return capabilities that refuse every request with reasons."""
    return Capabilities.none()


def refusal(part: str) -> CapabilityRefused:
    """Return the error for a part that is not implemented."""
    return CapabilityRefused(f"the {part} of backend 'cuda' was asked for", [NOT_IMPLEMENTED])
