"""How the engine reaches its workers: in this process, or by one remote executor over a transport (processes, Ray).

An executor knows ranks and calls; it knows nothing of requests. Calls go through the contract's closed table.
"""

from hardpoint.executor.base import Executor
from hardpoint.executor.in_process import InProcessExecutor
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.process_transport import ProcessTransport
from hardpoint.executor.ray_session import RaySettings
from hardpoint.executor.remote import RemoteExecutor

__all__ = ["Executor", "InProcessExecutor", "ProcessTransport", "RankLimits", "RaySettings", "RemoteExecutor"]
