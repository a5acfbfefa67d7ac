"""Kernels in Triton's interpreter: `make test-triton` runs these where triton is installed, with TRITON_INTERPRET=1; else they are not
collected."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from hardpoint_simulators.triton_interpreter.speed import quicken_interpreter

    quicken_interpreter()
    collect_ignore_glob = []
else:
    collect_ignore_glob = ["test_*.py"]
