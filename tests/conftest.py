"""For tests of whole engines: one thread for the CPU backend's kernels, too, unless a test asks for more (`threads=`).

A helper that has done its part spins for a while in the hope of another, and so does who waits for it. On two cores that several processes
share that is lost, a fifteenth of these tests' time. The tests of kernels and the conformance suite have one for each core.
"""

from __future__ import annotations

import os

os.environ.setdefault("HARDPOINT_CPU_THREADS", "1")
