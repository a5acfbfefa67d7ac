"""Which kernels serve attention, and why: for `doctor`, which prints it, and for plans, whose notes carry it. Imports none of them."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

from hardpoint.interfaces.errors import ConfigError

VARIABLE = "HARDPOINT_ATTENTION"
"""Environment variable that names the kernels to use."""


class Attention(enum.Enum):
    """The kernels that serve attention, or how they are found."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    AUTO = "auto"
    """A trial on the device decides, when a model is planned."""


NO_ADAPTER = "is not used: this backend has no adapter for it"
_REASONS = {
    Attention.TRITON: f"{VARIABLE} says so",
    Attention.FLASHINFER: f"{VARIABLE} says so, and what it cannot do is refused",
    Attention.AUTO: "flashinfer for a model that it serves right and faster in a trial on the device, else triton",
}


@dataclass(frozen=True)
class AttentionChoice:
    """What serves attention.

    Attributes:
        kernels: what was chosen.
        reasons: one sentence for how the choice came about, and for each library that is not used.
    """

    kernels: Attention
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernels.value} ({'; '.join(self.reasons)})"


def attention_choice(
    flashinfer: str = NO_ADAPTER, flash_attn: str = NO_ADAPTER, environment: Mapping[str, str] = os.environ
) -> AttentionChoice:
    """Return which kernels serve attention, with reasons; raises ConfigError where the environment asks for what is not there.

    Args:
        flashinfer: why the backend cannot use FlashInfer, in words that follow its name; "" when it can.
        flash_attn: why it cannot use flash-attn.
    """
    obstacles = {Attention.FLASHINFER.value: f"flashinfer {flashinfer}", "flash-attn": f"flash-attn {flash_attn}"}
    asked = environment.get(VARIABLE) or Attention.AUTO.value
    known = {kernels.value: kernels for kernels in Attention}
    usable = [name for name in known if name != Attention.FLASHINFER.value or not flashinfer]
    if asked not in usable:
        raise ConfigError(
            f"{VARIABLE}={asked} was asked for",
            found=obstacles.get(asked, f"'{asked}' is not known"),
            hint=f"unset it, or set it to one of {', '.join(usable)}",
        )
    chosen = known[asked]
    if chosen is Attention.AUTO and flashinfer:
        return AttentionChoice(Attention.TRITON, ("Hardpoint's own kernels", *obstacles.values()))
    return AttentionChoice(chosen, (_REASONS[chosen], obstacles["flash-attn"]))


def attention_note() -> str:
    """Return the choice in words, for the properties of a device that FlashInfer is not for, which `doctor` prints; never raises."""
    try:
        return str(attention_choice())
    except ConfigError as error:
        return f"none: {error}"
