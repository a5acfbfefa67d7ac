"""Which kernels serve attention, and why: for `doctor`, which prints it, and for plans, whose notes carry it. Imports none of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hardpoint.interfaces.errors import ConfigError

VARIABLE = "HARDPOINT_ATTENTION"
"""Environment variable that names the kernels to use."""
TRITON = "triton"
AUTO = "auto"
"""A trial on the device decides, when a model is planned."""


@dataclass(frozen=True)
class AttentionChoice:
    """What serves attention.

    Attributes:
        kernels: `TRITON`, `AUTO` or the name of a library.
        reasons: one sentence for how the choice came about, and for each library that is not used.
    """

    kernels: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernels} ({'; '.join(self.reasons)})"


def attention_choice(libraries: Mapping[str, str] = MappingProxyType({})) -> AttentionChoice:
    """Return which kernels serve attention, with reasons; raises ConfigError where the environment asks for what is not there.

    Args:
        libraries: of the backend, beside Triton's kernels: for each name why it cannot be used, in words that follow the name; "" where
            it can.
    """
    others = [name for name, obstacle in libraries.items() if not obstacle]
    obstacles = tuple(f"{name} {obstacle}" for name, obstacle in libraries.items() if obstacle)
    asked = os.environ.get(VARIABLE) or AUTO
    if asked == TRITON:
        reason = f"{VARIABLE} says so"
    elif asked in others:
        reason = f"{VARIABLE} says so, and what it cannot do is refused"
    elif asked != AUTO:
        raise ConfigError(
            f"{VARIABLE}={asked} was asked for",
            found=f"{asked} {libraries[asked]}" if asked in libraries else f"'{asked}' is not known",
            hint=f"unset it, or set it to one of {', '.join((TRITON, AUTO, *others))}",
        )
    elif others:
        reason = (
            f"{' or '.join(others)} for a model that it serves right and faster in a trial on the device, else triton"
        )
    else:
        asked, reason = TRITON, "Hardpoint's own kernels"
    return AttentionChoice(asked, (reason, *obstacles))
