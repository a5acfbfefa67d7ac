"""How long ranks may take."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.validation import Seconds, Validated

_KINDS = {
    "start": "start",
    "load": "load",
    "profile": "load",
    "initialize_kv": "load",
    "open_tiers": "load",
    "warm_up": "load",
    "write_weights": "load",
    "stop_trace": "load",
    "begin": "sleep",
    "commit": "sleep",
    "rollback": "sleep",
}


@dataclass(frozen=True)
class RankLimits(Validated):
    """Seconds after which a rank that has not answered is taken to hang; all ranks are then ended.

    Attributes:
        start: for a process to be there with its backend, and for its `start`.
        load: for each of `load`, `profile`, `initialize_kv`, `open_tiers` and `warm_up`, for changes of weights, and for writing a profile.
        step: for one step.
        sleep: for each call of a sleep or wake.
        other: for questions.
        behind: how much longer other ranks may take than one that failed, in calls in which ranks wait for one another.
        stopped: for a process that a signal or a debugger has stopped.
        silent: for a process whose interpreter does not run, though the process does nothing (a deadlock in native code).
        shutdown: for ranks to end by themselves before they are ended.
    """

    _called = "a time limit of ranks"
    _inside = "rank_limits."

    start: Seconds = 300.0
    load: Seconds = 1800.0
    step: Seconds = 300.0
    sleep: Seconds = 600.0
    other: Seconds = 60.0
    behind: Seconds = 2.0
    stopped: Seconds = 2.0
    silent: Seconds = 60.0
    shutdown: Seconds = 10.0

    def of(self, call: str) -> float:
        """Return the limit of a call of the worker contract, seconds."""
        seconds: Seconds = getattr(self, _KINDS.get(call, "other"))
        return seconds
