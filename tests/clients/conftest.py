"""Clients that others wrote. Where they are not installed, nothing is collected.

`make test-clients` makes an environment with them, and runs these.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("litellm") else ["test_*.py"]
