"""What a vendor's build of torch needs besides the simulated driver: libraries that stand for the vendor's others, and their loading.

What belongs here: reading what installed binaries import, the generation of libraries whose functions all fail, and loading them with the
simulated driver before torch. Nothing that computes: a function that is not simulated returns an error, never success.
"""

from hardpoint_simulators.torch_libraries.generate import GenerationFailed, generate
from hardpoint_simulators.torch_libraries.preload import preload

__all__ = ["GenerationFailed", "generate", "preload"]
