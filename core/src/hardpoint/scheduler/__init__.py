"""Continuous batching: which tokens of which sequences run in the next step.

Prefill chunks and decodes share a step under a token budget; preemption, swap, forks and prefix reuse are decided here.
The block manager under it (block tables, reference counts, prefix cache, host pool) does bookkeeping only: what is to be copied
or moved on the device is in the step. All of it is native code without torch, and deterministic given its inputs.
"""

from hardpoint.scheduler.config import SchedulerConfig, SchedulerSettings
from hardpoint.scheduler.scheduler import FinishReason, Scheduler, SequenceState

__all__ = ["FinishReason", "Scheduler", "SchedulerConfig", "SchedulerSettings", "SequenceState"]
