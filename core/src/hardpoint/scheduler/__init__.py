"""Continuous batching: which tokens of which sequences run in the next step.

Prefill chunks and decodes share a step under a token budget; preemption, swap, forks and prefix reuse are decided here, with
the blocks of `hardpoint.kv`. Pure logic in native code, without torch; deterministic given its inputs.
"""

from hardpoint.scheduler.config import SchedulerConfig
from hardpoint.scheduler.scheduler import FinishReason, Scheduler, SequenceState

__all__ = ["FinishReason", "Scheduler", "SchedulerConfig", "SequenceState"]
