"""Sleep and wake of an engine: which states it has, what leads from one to the other, and what is undone when a step fails.

Memory itself is slept and woken by the workers' allocators; requests and their outputs belong to the engine around this.
"""

from hardpoint.engine.sleep.life_cycle import LifeCycle
from hardpoint.engine.sleep.participants import SleepParticipant, check_participant
from hardpoint.engine.sleep.report import (
    EngineState,
    SleepReport,
    SleepStatus,
    SleepTotals,
    TagMemory,
    WakeReport,
    slept_over_engines,
    status_over_engines,
    totals_over_engines,
    woken_over_engines,
)
from hardpoint.engine.sleep.request import KVChoice, SleepMode, SleepRequest, Tags

__all__ = [
    "EngineState",
    "KVChoice",
    "LifeCycle",
    "SleepMode",
    "SleepParticipant",
    "SleepReport",
    "SleepRequest",
    "SleepStatus",
    "SleepTotals",
    "TagMemory",
    "Tags",
    "WakeReport",
    "check_participant",
    "slept_over_engines",
    "status_over_engines",
    "totals_over_engines",
    "woken_over_engines",
]
