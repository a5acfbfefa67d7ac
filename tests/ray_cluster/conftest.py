"""The Ray executor on a real cluster of two nodes, which are processes of this machine. Where Ray is not installed, nothing is collected.

`make test-ray` makes an environment with Ray.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from core.tests.executor.conftest import fake, step
from hardpoint.executor import RankLimits
from hardpoint.interfaces import WorkerConfig
from hardpoint.plugins import Resolved
from tests.e2e.conftest import greedy, oracle_float32

if TYPE_CHECKING:
    from hardpoint.executor.ray import RayExecutor

__all__ = ["fake", "greedy", "oracle_float32", "step"]

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

OBJECT_STORE = 80 << 20
"""Bytes for each node: the least that Ray takes, nearly."""


@pytest.fixture(scope="session")
def cluster(fake: ModuleType) -> Iterator[Any]:
    """Two nodes, each with six of the fake backend's devices and one device that is called split; this process has joined them."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # The nodes' processes look there for the fake backend.
        patch.setenv("PYTHONPATH", str(Path(fake.__file__ or "").parent), prepend=os.pathsep)
        patch.delenv("RAY_ADDRESS", raising=False)
        node = {"num_cpus": 2, "object_store_memory": OBJECT_STORE}
        nodes = Cluster(
            initialize_head=True,
            head_node_args={**node, "resources": {"fakes": 6, "split": 1, "lone": 1}, "include_dashboard": False},
        )
        nodes.add_node(**node, resources={"fakes": 6, "split": 1})
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def make(fake: ModuleType, cluster: Any) -> Iterator[Callable[..., RayExecutor]]:
    """Return what makes an executor over fake workers: orders, sizes, limits, Ray's settings, and other settings of the workers."""
    from hardpoint.executor.ray import RayExecutor

    made: list[RayExecutor] = []

    def one(
        *orders: dict[str, Any],
        ranks: int = 1,
        stages: int = 1,
        device: int = 0,
        limits: Any = None,
        ray: Any = None,
        **config: Any,
    ) -> RayExecutor:
        descriptor = fake.hardpoint_backend()
        settings = WorkerConfig(
            model=json.dumps(orders), tensor_parallel_size=ranks, pipeline_parallel_size=stages, **config
        )
        resolved = Resolved(descriptor, descriptor.probe().devices[device])
        made.append(RayExecutor(resolved, settings, RankLimits.parse(limits), ray))
        return made[-1]

    yield one
    for executor in made:
        executor.shutdown()
