"""Device memory for models and KV caches: the ready-made allocator, and the opening of memory drivers.

`VirtualAllocator` is a whole allocator over a backend's memory driver (`include/hardpoint/driver.h`): books, tags, policies,
backups, sleep and wake as transactions, by the native engine, which `VirtualPool` offers without torch. `TorchPoolAllocator` adds
torch's own allocations, where torch has a pluggable allocator for the device. `TensorAllocator` gives
an allocator of another kind what is torch and not device. `include_dir` is where a driver finds the C contract that it
implements, and `driver_file` where an installed one is. Importing this package imports neither torch nor a driver.
"""

from hardpoint.memory.driver_table import DriverFlags, DriverQuirks, DriverStatus, DriverTable, Geometry
from hardpoint.memory.factory_calls import factory_call_pool
from hardpoint.memory.native_files import driver_file, include_dir
from hardpoint.memory.pool import PoolBooks, VirtualPool, default_sleep_directory
from hardpoint.memory.tensors import Accounting, TensorAllocator
from hardpoint.memory.torch_graph_pool import TorchGraphPool
from hardpoint.memory.torch_pool import (
    TorchPoolAllocator,
    TorchPoolFunctions,
    check_torch_build,
    refuse_expandable_segments,
    torch_has_library,
)
from hardpoint.memory.virtual import VirtualAllocator, open_driver

__all__ = [
    "Accounting",
    "DriverFlags",
    "DriverQuirks",
    "DriverStatus",
    "DriverTable",
    "Geometry",
    "PoolBooks",
    "TensorAllocator",
    "TorchGraphPool",
    "TorchPoolAllocator",
    "TorchPoolFunctions",
    "VirtualAllocator",
    "VirtualPool",
    "check_torch_build",
    "default_sleep_directory",
    "driver_file",
    "factory_call_pool",
    "include_dir",
    "open_driver",
    "refuse_expandable_segments",
    "torch_has_library",
]
