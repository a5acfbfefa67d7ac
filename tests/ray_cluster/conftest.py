"""The Ray transport on a real cluster of two nodes, which are processes of this machine. Where Ray is not installed, nothing is collected.

`make test-ray` makes an environment with Ray. The tests of every transport are run there too (`test_calls.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from core.tests.executor.conftest import Make, cluster, fake, make_over, step, transport
from tests.e2e.conftest import greedy, shallow, shallow_demo
from tests.ray_cluster.warm_workers import import_early, warm_workers

__all__ = ["cluster", "fake", "greedy", "make_over", "shallow", "shallow_demo", "step", "transport"]

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
if find_spec("ray"):
    import_early()  # before this process is forked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what tests of every transport, which are run here over one cluster with the others, do over processes."""
    here = Path(__file__).parent
    others = [item for item in items if item.path.parent == here and _transport_of(item) == "processes"]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _transport_of(item: pytest.Item) -> object:
    return item.callspec.params.get("transport") if hasattr(item, "callspec") else None


@pytest.fixture(scope="session", autouse=True)
def _warm_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with warm_workers(tmp_path_factory.mktemp("workers")):
        yield


@pytest.fixture
def make(make_over: Make, cluster: Any) -> Make:
    """Return what makes an executor over fake workers in actors."""
    return partial(make_over, "ray")
