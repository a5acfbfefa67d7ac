"""Device memory for models and KV caches: the ready-made parts of an allocator, and the opening of drivers' libraries.

`TensorAllocator` gives a backend's allocator everything that is torch and not device: meta modules filled from tagged
memory, foreign modules moved into it, books by tag. A backend supplies `empty` and what its device can do besides.
`include_dir` is where a memory driver finds the C contract that it implements, and `driver_file` where an installed one is.
Importing this package imports neither torch nor a driver.
"""

from hardpoint.memory.native_files import driver_file, include_dir
from hardpoint.memory.tensors import Books, TensorAllocator

__all__ = ["Books", "TensorAllocator", "driver_file", "include_dir"]
