"""Device memory for models and KV caches: the ready-made allocator, and the opening of memory drivers.

`VirtualAllocator` is a whole allocator over a backend's memory driver (`include/hardpoint/driver.h`): books, tags, policies,
backups, sleep and wake as transactions, by the native engine, which `VirtualPool` offers without torch. `TorchPoolAllocator` adds
torch's own allocations, where torch has a pluggable allocator for the device. `TensorAllocator` gives
an allocator of another kind what is torch and not device. `include_dir` is where a driver finds the C contract that it
implements, and `driver_file` where an installed one is; `write_crash_frames` says where in it a process crashed. Importing
this package imports neither torch nor a driver.
"""

from hardpoint.memory.driver_table import DriverFlags, DriverQuirks, DriverStatus, DriverTable, Geometry
from hardpoint.memory.factory_calls import factory_call_pool
from hardpoint.memory.native_files import driver_file, include_dir, write_crash_frames
from hardpoint.memory.pool import ALL_CLAIMS, PoolBooks, VirtualPool, cache_directory
from hardpoint.memory.tensors import Accounting, TensorAllocator
from hardpoint.memory.torch_graph_pool import TorchGraphPool
from hardpoint.memory.torch_pool import (
    TorchPoolAllocator,
    TorchPoolFunctions,
    check_torch_build,
    refuse_expandable_segments,
    torch_has_library,
    torch_platform_version,
    without_expandable_segments,
)
from hardpoint.memory.virtual import VirtualAllocator, open_driver

__all__ = [
    "ALL_CLAIMS",
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
    "cache_directory",
    "check_torch_build",
    "driver_file",
    "factory_call_pool",
    "include_dir",
    "open_driver",
    "refuse_expandable_segments",
    "torch_has_library",
    "torch_platform_version",
    "without_expandable_segments",
    "write_crash_frames",
]
