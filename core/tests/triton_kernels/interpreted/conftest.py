"""Kernels in Triton's interpreter: `make test-triton` runs these where triton is installed, with TRITON_INTERPRET=1; else they are not
collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
