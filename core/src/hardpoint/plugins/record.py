"""What discovery found out about one candidate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hardpoint.interfaces import BackendDescriptor, Device


class BackendState(StrEnum):
    """What became of a candidate.

    OK: sound, with a device. UNAVAILABLE: sound, but its driver or device is not here. INCOMPATIBLE: made for other versions of the
    contract. BROKEN: failed to import, to register, to describe itself or to probe. BLOCKED: the user excluded it; its
    code was not imported. SHADOWED: another distribution claims the same name; neither was imported.
    """

    OK = "ok"
    UNAVAILABLE = "unavailable"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"
    BLOCKED = "blocked"
    SHADOWED = "shadowed"

    @property
    def is_fault(self) -> bool:
        """The installation has to be fixed: this candidate must never be passed over in silence."""
        return self in (BackendState.INCOMPATIBLE, BackendState.BROKEN, BackendState.SHADOWED)


@dataclass(frozen=True)
class BackendRecord:
    """One candidate: an entry point in the group `hardpoint.backends`.

    Attributes:
        name: of the entry point, which is the backend's.
        reason: why the state is not OK, without a final stop.
        distribution, version: what installed it; "" when not known.
        entry_point: the object it names, `module` or `module:attribute`.
        descriptor: what the backend says of itself; None when that was never reached.
        devices: as probed; an unavailable backend may list devices that it sees and cannot use.
        traceback: of a broken one, where there is one.
    """

    name: str
    state: BackendState
    reason: str
    distribution: str
    version: str
    entry_point: str
    descriptor: BackendDescriptor | None = None
    devices: tuple[Device, ...] = ()
    traceback: str = ""

    @property
    def priority(self) -> int | None:
        """The declared priority; None when the descriptor was never reached."""
        return None if self.descriptor is None else self.descriptor.priority

    @property
    def api(self) -> tuple[int, int] | None:
        """The declared range of contract versions; None when the descriptor was never reached."""
        return None if self.descriptor is None else self.descriptor.api

    @property
    def source(self) -> str:
        """The distribution and its version, human-readable."""
        return f"{self.distribution} {self.version}".strip() or self.entry_point

    def __str__(self) -> str:
        if self.state is BackendState.OK:
            return f"{self.name} ({self.source}): ok, {', '.join(device.name for device in self.devices)}"
        return f"{self.name} ({self.source}): {self.state}, {self.reason}"
