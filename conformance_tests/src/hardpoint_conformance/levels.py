"""Levels of conformance, and the profiles that name sets of them."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """What a test is about; a backend is brought up in this order."""

    PACKAGING = 0
    MEMORY = 1
    ATTENTION_CORE = 2
    ATTENTION_EXTENDED = 3
    WORKER = 4
    DISTRIBUTED = 5
    STRESS = 6

    @property
    def title(self) -> str:
        """What the level is called in reports."""
        return TITLES[self]

    def __str__(self) -> str:
        return f"L{self.value}"

    @classmethod
    def of(cls, text: str) -> Level:
        """Return the level named `L2` or `2`; raises ValueError."""
        digits = text.strip().upper().removeprefix("L")
        if not digits.isdecimal() or int(digits) not in list(cls):
            raise ValueError(f"{text!r} is not a level (L0 to L{max(cls).value})")
        return cls(int(digits))


TITLES = {
    Level.PACKAGING: "packaging and contract",
    Level.MEMORY: "memory driver and allocator",
    Level.ATTENTION_CORE: "attention core",
    Level.ATTENTION_EXTENDED: "attention extended",
    Level.WORKER: "worker and end-to-end tokens",
    Level.DISTRIBUTED: "distributed",
    Level.STRESS: "graphs, determinism, stress",
}

PROFILES: dict[str, tuple[Level, ...]] = {
    "memory": (Level.PACKAGING, Level.MEMORY),
    "inference-core": (Level.PACKAGING, Level.MEMORY, Level.ATTENTION_CORE, Level.WORKER),
    "full": tuple(Level),
}
"""Levels by profile: the drivers of devices, what serving a model needs, everything."""
