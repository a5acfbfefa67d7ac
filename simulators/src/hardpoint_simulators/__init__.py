"""Simulated vendor drivers: libraries with the vendors' own symbols over host memory, and their control from Python.

What belongs here: where the libraries are, how a test sets them up, injects faults and reads their books, and the probe that
records what a real driver answers to misuse. No engine code, no torch.
"""

from hardpoint_simulators.control import Simulator, SimulatorError, SimulatorStats
from hardpoint_simulators.libraries import Vendor, library

__all__ = ["Simulator", "SimulatorError", "SimulatorStats", "Vendor", "library"]
