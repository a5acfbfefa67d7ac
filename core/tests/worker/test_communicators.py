"""Communicators that give their device memory back during a sleep: in which order, and what happens where a call fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from core.tests.worker.test_memory_changes import one
from core.tests.worker.test_ranks import model, run_step, started  # noqa: F401 - a fixture
from hardpoint.executor import InProcessExecutor
from hardpoint.interfaces import KV_CACHE, WEIGHTS, Policy, SleepPlan, WakePlan
from hardpoint.interfaces.errors import DeviceOutOfMemory, RanksDiverged, WorkerError
from hardpoint.plugins import resolve_backend
from hardpoint.worker import StandardWorker
from hardpoint.worker.communicators import Communicators
from hardpoint.worker.ranks import TorchCollectives

SIZE = 300
"""Bytes of each group's communicators."""


class Device:
    """A device on which groups take memory, and what they did, in order.

    Attributes:
        fails: the calls that fail, by place among all calls.
        watch: noted with each call.
    """

    def __init__(self, *fails: int) -> None:
        self.free, self.fails = 1000, set(fails)
        self.calls: list[tuple[Any, ...]] = []
        self.watch: Callable[[], tuple[Any, ...]] = tuple

    def call(self, name: str, size: int) -> None:
        place = len(self.calls)
        self.calls.append((name, *self.watch()))
        if place in self.fails:
            raise WorkerError(f"call {place} failed")
        self.free += size


class Group:
    """What `Communicators` needs of a group."""

    def __init__(self, device: Device, name: str, *, can: bool = True) -> None:
        self._device, self._name, self._can = device, name, can

    def barrier(self) -> None:
        self._device.free -= SIZE

    def suspend(self) -> bool:
        if self._can:
            self._device.call(f"suspend {self._name}", SIZE)
        return self._can

    def resume(self) -> None:
        self._device.call(f"resume {self._name}", -SIZE)


def made(device: Device, **groups: bool) -> Communicators:
    return Communicators(
        [Group(device, name, can=can) for name, can in groups.items()],  # type: ignore[misc]
        lambda: device.free,
    )


def test_bytes_are_those_that_the_first_operations_take() -> None:
    assert made(Device(), tensor=False, pipeline=False).resident_bytes() == 2 * SIZE
    assert Communicators().resident_bytes() == 0


def test_groups_are_resumed_in_reverse_order_and_once() -> None:
    device = Device()
    communicators = made(device, tensor=True, other=False, pipeline=True)
    for _ in range(2):
        communicators.suspend()
    assert communicators.resident_bytes() == SIZE
    for _ in range(2):
        communicators.resume()
    assert communicators.resident_bytes() == 3 * SIZE
    assert [call[0] for call in device.calls] == [
        "suspend tensor",
        "suspend pipeline",
        "resume pipeline",
        "resume tensor",
    ]


@pytest.mark.parametrize(
    ("fails", "kept", "resumed"), [(0, "tensor", ["pipeline"]), (1, "pipeline", ["tensor"])], ids=["first", "second"]
)
def test_a_group_that_cannot_be_suspended_keeps_its_memory_and_is_not_resumed(
    caplog: pytest.LogCaptureFixture, fails: int, kept: str, resumed: list[str]
) -> None:
    device = Device(fails)
    communicators = made(device, tensor=True, pipeline=True)
    with caplog.at_level(logging.WARNING, "hardpoint"):
        communicators.suspend()
    assert f"keep their device memory during this sleep: call {fails} failed" in caplog.text
    assert communicators.resident_bytes() == SIZE
    communicators.resume()
    assert [call[0] for call in device.calls[2:]] == [f"resume {name}" for name in resumed]
    assert kept not in resumed


@pytest.mark.parametrize("fails", [2, 3])
def test_a_resume_that_failed_goes_on_where_it_stopped(fails: int) -> None:
    device = Device(fails)
    communicators = made(device, tensor=True, pipeline=True)
    communicators.suspend()
    with pytest.raises(WorkerError, match=f"call {fails} failed"):
        communicators.resume()
    assert communicators.resident_bytes() == (fails - 2) * SIZE
    communicators.resume()
    assert communicators.resident_bytes() == 2 * SIZE
    assert device.free == 400


# In a worker


MakeWorker = Callable[[Device], AbstractContextManager[StandardWorker]]


@pytest.fixture
def worker_with(model: str, monkeypatch: pytest.MonkeyPatch) -> MakeWorker:  # noqa: F811
    """Make a worker whose rank is in two groups."""

    @contextmanager
    def make(device: Device) -> Iterator[StandardWorker]:
        monkeypatch.setattr("hardpoint.worker.loading.Communicators", lambda: made(device, tensor=True, pipeline=True))
        with started(model) as worker:
            device.watch = lambda: (worker.status().memory.asleep,)
            yield worker

    return make


PLAN = SleepPlan(policies={KV_CACHE: Policy.DISCARD})


def test_both_ways_communicators_change_once_all_ranks_are_ready_and_before_the_memory_does(
    worker_with: MakeWorker,
) -> None:
    device = Device()
    with worker_with(device) as worker:
        expected = run_step(worker, one()).token_ids.tolist()
        for number in (1, 3):
            memory = worker.status().memory
            mapped = sum(tag.mapped for tag in memory.tags.values())
            worker.begin(number, PLAN)
            assert len(device.calls) == 4 * (number // 2), "nothing is suspended before all ranks are ready"
            slept = worker.commit(number)
            assert "collectives" not in slept.residual
            assert slept.unmapped == mapped + 2 * SIZE
            worker.begin(number + 1, WakePlan())
            assert len(device.calls) == 4 * (number // 2) + 2, "a library waits for ranks that may not be ready"
            woken = worker.commit(number + 1)
            assert woken.unmapped == slept.unmapped
            assert woken.residual["collectives"] == 2 * SIZE
            assert run_step(worker, one()).token_ids.tolist() == expected
    # Before the commit of either: what goes to sleep is there still, and what wakes is not yet said to be awake.
    awake, asleep = frozenset(), frozenset({WEIGHTS, KV_CACHE})
    assert [(name, tags & asleep) for name, tags in device.calls] == 2 * [
        ("suspend tensor", awake),
        ("suspend pipeline", awake),
        ("resume pipeline", asleep),
        ("resume tensor", asleep),
    ]


def test_a_change_that_is_rolled_back_leaves_communicators_alone(worker_with: MakeWorker) -> None:
    device = Device()
    with worker_with(device) as worker:
        worker.begin(1, PLAN)
        worker.rollback(1)
        assert device.calls == []
        worker.begin(2, PLAN)
        worker.commit(2)
        worker.begin(3, WakePlan())
        worker.rollback(3)
        assert [call[0] for call in device.calls] == ["suspend tensor", "suspend pipeline"]
        assert WEIGHTS in worker.status().memory.asleep


@pytest.mark.parametrize("fails", [0, 1])
def test_what_cannot_be_suspended_is_residual(worker_with: MakeWorker, fails: int) -> None:
    with worker_with(Device(fails)) as worker:
        expected = run_step(worker, one()).token_ids.tolist()
        executor = InProcessExecutor(worker)
        assert executor.change(PLAN)[0].residual["collectives"] == SIZE
        executor.change(WakePlan())
        assert run_step(worker, one()).token_ids.tolist() == expected


@pytest.mark.parametrize("fails", [2, 3])
def test_a_resume_that_fails_leaves_the_rank_asleep_and_another_wake_goes_on(
    worker_with: MakeWorker, fails: int
) -> None:
    with worker_with(Device(fails)) as worker:
        expected = run_step(worker, one()).token_ids.tolist()
        executor = InProcessExecutor(worker)
        executor.change(PLAN)
        with pytest.raises(RanksDiverged, match=f"call {fails} failed"):
            executor.change(WakePlan())
        assert worker.status().memory.asleep >= {WEIGHTS, KV_CACHE}
        executor.settle()
        executor.change(WakePlan())
        assert run_step(worker, one()).token_ids.tolist() == expected


def test_a_wake_without_room_for_communicators_fails_before_any_rank_resumes(worker_with: MakeWorker) -> None:
    device = Device()
    with worker_with(device) as worker:
        expected = run_step(worker, one()).token_ids.tolist()
        executor = InProcessExecutor(worker)
        executor.change(PLAN)
        free, device.free = device.free, 2 * SIZE - 1
        with pytest.raises(DeviceOutOfMemory, match="take 600 bytes of the device: 599 free"):
            executor.change(WakePlan())
        assert worker.status().memory.asleep >= {WEIGHTS, KV_CACHE}
        assert len(device.calls) == 2
        device.free = free
        executor.change(WakePlan())
        assert run_step(worker, one()).token_ids.tolist() == expected


# Over torch's process groups


class Suspending(TorchCollectives):
    """Collectives whose library gives memory back."""

    def _can_suspend(self, group: Any) -> bool:
        return hasattr(group, "suspend")


def joined(collectives: TorchCollectives, group: Any) -> TorchCollectives:
    collectives._group, collectives._rank, collectives._size = group, 1, 2
    return collectives


def test_process_groups_are_suspended_where_the_backend_says_that_its_library_can() -> None:
    calls: list[str] = []
    group = SimpleNamespace(suspend=lambda: calls.append("suspend"), resume=lambda: calls.append("resume"))
    device = resolve_backend("cpu").device
    assert joined(TorchCollectives(device), group).suspend() is False
    assert joined(Suspending(device), SimpleNamespace()).suspend() is False
    assert calls == []
    able = joined(Suspending(device), group)
    assert able.suspend() is True
    able.resume()
    assert calls == ["suspend", "resume"]


@pytest.mark.parametrize("name", ["suspend", "resume"])
def test_what_the_library_refuses_is_an_error_of_the_rank(name: str) -> None:
    def refuse() -> None:
        raise RuntimeError("NCCL Error 5: invalid usage\nmore")

    group = SimpleNamespace(suspend=refuse, resume=refuse)
    able = joined(Suspending(resolve_backend("cpu").device), group)
    with pytest.raises(
        WorkerError, match=f"rank 1 of 2 could not {name} its communicators: NCCL Error 5: invalid usage"
    ):
        getattr(able, name)()
