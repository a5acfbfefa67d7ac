"""Which kernels serve attention, and why: for `doctor`, which prints it, and for plans, whose notes carry it. Imports none of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hardpoint.interfaces.errors import ConfigError

VARIABLE = "HARDPOINT_ATTENTION"
"""Environment variable that names the kernels to use."""
OWN = "triton"
LIBRARIES = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}
"""Libraries of attention kernels that people may expect to be used: name and module."""
_NO_ADAPTER = "not used: this version has no adapter for it, since none could be verified on a device"


@dataclass(frozen=True)
class AttentionChoice:
    """What serves attention.

    Attributes:
        name: of the kernels.
        reasons: one sentence for each library, and for how the choice came about.
    """

    name: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.reasons)})"


def attention_choice(
    environment: Mapping[str, str] = os.environ,
    is_installed: Callable[[str], bool] = lambda module: importlib.util.find_spec(module) is not None,
) -> AttentionChoice:
    """Return which kernels serve attention, with reasons; raises ConfigError where the environment asks for others."""
    asked = environment.get(VARIABLE, "")
    reasons = [
        f"{name} is installed and {_NO_ADAPTER}" if is_installed(module) else f"{name} is not installed"
        for name, module in LIBRARIES.items()
    ]
    if asked not in ("", OWN):
        known = f"{name} is known and {_NO_ADAPTER}" if (name := asked) in LIBRARIES else f"'{asked}' is not known"
        raise ConfigError(f"{VARIABLE}={asked} was asked for", found=known, hint=f"unset it, or set it to '{OWN}'")
    return AttentionChoice(OWN, (f"{VARIABLE} says so" if asked else "Hardpoint's own kernels", *reasons))


def attention_note() -> str:
    """Return the choice in words, for a device's properties, which `doctor` prints; never raises."""
    try:
        return str(attention_choice())
    except ConfigError as error:
        return f"none: {error}"
