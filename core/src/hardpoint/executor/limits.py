"""How long ranks may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hardpoint.interfaces.errors import ConfigError

_KINDS = {
    "init_device": "start",
    "load_model": "load",
    "profile": "load",
    "initialize_kv": "load",
    "warm_up": "load",
    "update_weights": "load",
    "reload_weights": "load",
    "execute": "step",
    "sleep": "sleep",
    "wake": "sleep",
    "begin_sleep": "sleep",
    "begin_wake": "sleep",
    "commit": "sleep",
    "rollback": "sleep",
}


@dataclass(frozen=True)
class RankLimits:
    """Seconds after which a rank that has not answered is taken to hang; all ranks are then ended.

    Attributes:
        start: for a process to be there with its backend, and for `init_device`.
        load: for each of `load_model`, `profile`, `initialize_kv` and `warm_up`, and for changes of weights.
        step: for one step.
        sleep: for each call of a sleep or wake.
        other: for questions.
        behind: how much longer other ranks may take than one that failed, in calls in which ranks wait for one another.
        stopped: for a process that a signal or a debugger has stopped.
        silent: for a process whose interpreter does not run, though the process does nothing (a deadlock in native code).
        shutdown: for ranks to end by themselves before they are ended.
    """

    start: float = 300.0
    load: float = 1800.0
    step: float = 300.0
    sleep: float = 600.0
    other: float = 60.0
    behind: float = 2.0
    stopped: float = 2.0
    silent: float = 60.0
    shutdown: float = 10.0

    def __post_init__(self) -> None:
        for f in fields(self):
            seconds = getattr(self, f.name)
            if not isinstance(seconds, (int, float)) or seconds <= 0:
                raise ConfigError(f"the time limit '{f.name}' of ranks is {seconds!r}", hint="Give seconds above 0")

    @classmethod
    def parse(cls, given: RankLimits | Mapping[str, Any] | None) -> RankLimits:
        """Return limits as a caller passed them; raises ConfigError for an unknown one."""
        if isinstance(given, RankLimits):
            return given
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(given or {}) - known)
        if unknown:
            raise ConfigError(
                f"there is no time limit '{unknown[0]}' of ranks", hint=f"The limits are {', '.join(sorted(known))}"
            )
        return cls(**(given or {}))

    def of(self, call: str) -> float:
        """Return the limit of a call of the worker contract, seconds."""
        seconds: float = getattr(self, _KINDS.get(call, "other"))
        return seconds
