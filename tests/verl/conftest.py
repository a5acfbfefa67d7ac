"""verl's rollout over this engine. Where verl is not installed, nothing is collected.

`make test-verl` makes an environment with it, and runs these.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]
