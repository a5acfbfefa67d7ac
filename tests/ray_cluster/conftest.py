"""The Ray transport on a real cluster of two nodes, which are processes of this machine. Where Ray is not installed, nothing is collected.

`make test-ray` makes an environment with Ray, and runs the tests of every transport over it too.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from core.tests.executor.conftest import Make, cluster, fake, make_over, step
from tests.e2e.conftest import greedy, shallow, shallow_demo

__all__ = ["cluster", "fake", "greedy", "make_over", "shallow", "shallow_demo", "step"]

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]


@pytest.fixture
def make(make_over: Make, cluster: Any) -> Make:
    """Return what makes an executor over fake workers in actors."""
    return partial(make_over, "ray")
