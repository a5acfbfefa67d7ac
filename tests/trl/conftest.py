"""The drop-in for TRL's colocated mode, with TRL itself. Where TRL is not installed, nothing is collected.

`make test-trl` makes an environment with TRL, and runs these.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]
