"""Adapters that PEFT itself made, trained and wrote. Where PEFT is not installed, nothing is collected.

`make test-trl` makes an environment with PEFT, and runs these.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("peft") else ["test_*.py"]
