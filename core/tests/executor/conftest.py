"""Executors over fake workers, in real processes, and in actors of a real Ray cluster where Ray is installed."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hardpoint.executor import ProcessTransport, RankLimits, RemoteExecutor
from hardpoint.interfaces import (
    Pooling,
    SequencePooling,
    SequenceSampling,
    StepBatch,
    StepInput,
    WorkerConfig,
)
from hardpoint.plugins import ENTRY_POINT_GROUP, Resolved, installed

_SOURCE = Path(__file__).with_name("fake_backend.py")
_MODULE = "hardpoint_fake_ranks"

TRANSPORTS = ["processes", "ray"] if find_spec("ray") else ["processes"]

OBJECT_STORE = 80 << 20
"""Bytes for each node of a cluster: the least that Ray takes, nearly."""


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The module of the fake backend, installed where this process and its ranks look for backends."""
    site = tmp_path_factory.mktemp("site")
    (site / f"{_MODULE}.py").write_text(_SOURCE.read_text("utf-8"), "utf-8")
    info = site / f"{_MODULE}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hardpoint-fake-ranks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nfakeranks = {_MODULE}\n")
    spec = spec_from_file_location(_MODULE, site / f"{_MODULE}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    sys.path.insert(0, str(site))
    installed(refresh=True)
    yield module
    sys.path.remove(str(site))
    del sys.modules[_MODULE]
    installed(refresh=True)


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
        # Nodes without what nobody asks of them: a page, metrics, the events of tasks, workers before there are actors.
        patch.setattr("ray._private.utils.get_dashboard_dependency_error", ImportError)
        for name in (
            "enable_metrics_collection",
            "event_stats",
            "memory_monitor_refresh_ms",
            "prestart_worker_first_driver",
            "task_events_report_interval_ms",
        ):
            patch.setenv(f"RAY_{name}", "0")
        # Ray Serve looks less often than by default whether replicas are well, and is told more often how busy they are.
        patch.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
        for who in ("REPLICA", "HANDLE"):
            patch.setenv(f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "2")
        # A front that a loaded machine holds up for longer than that would be taken for one without requests, and what it waits for ended.
        patch.setenv("RAY_SERVE_MIN_HANDLE_METRICS_TIMEOUT_S", "600")
        node = {"num_cpus": 2, "object_store_memory": OBJECT_STORE}
        nodes = Cluster(
            initialize_head=True,
            # Nobody reads the nodes' logs, and no machine is added for a load.
            head_node_args={
                **node,
                "resources": {"fakes": 6, "split": 1, "lone": 1},
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
            },
        )
        nodes.add_node(**node, resources={"fakes": 6, "split": 1})
        ray.init(address=nodes.address, log_to_driver=False)
        # Of Ray's debugger; no process with other settings of Python is a fork of a warm one.
        patch.delenv("PYTHONBREAKPOINT")
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="session", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport, over which the test runs."""
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("cluster")
    return name


Make = Callable[..., RemoteExecutor]


def make_executor(
    fake: ModuleType,
    transport: str,
    *orders: dict[str, Any],
    ranks: int = 1,
    stages: int = 1,
    device: int = 0,
    limits: Any = None,
    ray: Any = None,
    **config: Any,
) -> RemoteExecutor:
    """Return an executor over fake workers.

    Args:
        orders: what the workers are to do, see the fake backend.
        ray: settings of Ray.
        config: other settings of the workers.
    """
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[device])
    settings = WorkerConfig(
        model=json.dumps(orders), tensor_parallel_size=ranks, pipeline_parallel_size=stages, **config
    )
    if transport == "processes":
        return RemoteExecutor(ProcessTransport(resolved, settings, RankLimits.parse(limits)))
    from hardpoint.executor.ray_transport import RayTransport

    return RemoteExecutor(RayTransport(resolved, settings, RankLimits.parse(limits), ray))


@pytest.fixture
def make_over(fake: ModuleType) -> Iterator[Make]:
    """Return what makes an executor over a transport; see `make_executor`."""
    made: list[RemoteExecutor] = []

    def one(transport: str, *orders: dict[str, Any], **settings: Any) -> RemoteExecutor:
        made.append(make_executor(fake, transport, *orders, **settings))
        return made[-1]

    yield one
    for executor in made:
        executor.shutdown()


@pytest.fixture
def make(make_over: Make, transport: str) -> Make:
    """Return what makes an executor over the transport of the test."""
    return partial(make_over, transport)


def make_step(
    rows: list[int],
    context: int,
    *,
    table: Any = None,
    tokens: int | None = None,
    seed: int = 0,
    new: tuple[SequenceSampling, ...] = (),
) -> StepInput:
    """Return a step of decodes (or of one prefill of `tokens`) with random numbers."""
    rng = np.random.default_rng(seed)
    count = len(rows) if tokens is None else tokens
    if table is None:
        table = rng.integers(0, 1000, (64, 32)).astype(np.int32)

    def long(n: int) -> Any:
        return rng.integers(0, 1 << 40, n)

    def short(*shape: int) -> Any:
        return rng.integers(0, 1 << 20, shape).astype(np.int32)

    batch = StepBatch(
        token_ids=long(count),
        positions=long(count),
        slot_mapping=short(count),
        query_start=short(len(rows) + 1),
        context_lens=np.full(len(rows), context, np.int32),
        block_table=table,
        rows=np.array(rows, np.int32),
        seq_ids=np.array(rows, np.int64),
        num_decodes=len(rows),
        sample_rows=np.arange(len(rows), dtype=np.int32),
        sample_seq_ids=np.array(rows, np.int64),
        swap_out=short(2, 2),
        swap_in=short(0, 2),
        copies=short(3, 2),
        preempted=long(1),
        state_rows=short(len(rows)),
        sample_state_rows=short(len(rows)),
        sample_positions=short(len(rows)),
    )
    return StepInput(batch, new, (4, 5), {9: SequencePooling(Pooling.MEAN, 12)})


@pytest.fixture(scope="session")
def step() -> Callable[..., StepInput]:
    return make_step
