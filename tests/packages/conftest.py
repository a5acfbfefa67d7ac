"""Distributions as users install them, from the folder that `make dist` writes; the tests are collected where HARDPOINT_DIST names it."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "HARDPOINT_DIST" in os.environ else ["test_*.py"]
