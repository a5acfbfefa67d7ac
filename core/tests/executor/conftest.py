"""Executors over fake workers, in real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hardpoint.executor import MultiProcessExecutor, RankLimits
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


@pytest.fixture
def make(fake: ModuleType) -> Iterator[Callable[..., MultiProcessExecutor]]:
    """Return what makes an executor over fake workers: orders, sizes, limits and other settings of the workers."""
    made: list[MultiProcessExecutor] = []

    def one(
        *orders: dict[str, Any], ranks: int = 1, stages: int = 1, device: int = 0, limits: Any = None, **config: Any
    ) -> MultiProcessExecutor:
        descriptor = fake.hardpoint_backend()
        resolved = Resolved(descriptor, descriptor.probe().devices[device])
        settings = WorkerConfig(
            model=json.dumps(orders), tensor_parallel_size=ranks, pipeline_parallel_size=stages, **config
        )
        made.append(MultiProcessExecutor(resolved, settings, RankLimits.parse(limits)))
        return made[-1]

    yield one
    for executor in made:
        executor.shutdown()


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
