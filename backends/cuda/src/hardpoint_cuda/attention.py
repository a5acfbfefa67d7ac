"""Paged attention on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_cuda.capabilities import refusal

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionBackend


def attention() -> type[AttentionBackend]:
    """Refuse: this version has no attention; raises CapabilityRefused."""
    raise refusal("attention")
