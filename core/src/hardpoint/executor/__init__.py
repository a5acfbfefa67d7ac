"""How the engine reaches its workers: in this process, in several processes, on several machines.

An executor knows ranks and calls; it knows nothing of requests. Calls go through the contract's closed table.
"""

from hardpoint.executor.base import Executor
from hardpoint.executor.in_process import InProcessExecutor
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.multi_process import MultiProcessExecutor
from hardpoint.executor.ray_session import RaySettings

__all__ = ["Executor", "InProcessExecutor", "MultiProcessExecutor", "RankLimits", "RaySettings"]
