"""Graphs of torch's modules, over a stand-in for one: what is launched runs at once, or is recorded while a capture is on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.interfaces import Device, MemoryInfo
from hardpoint.interfaces.errors import CapabilityRefused, GraphCaptureFailed
from hardpoint.memory import TorchPoolAllocator
from hardpoint.plugins import resolve_backend
from hardpoint.worker import TorchGraphRunner

MIB = 1 << 20


class Module:
    """The stand-in. `fails`: captures do not begin."""

    def __init__(self) -> None:
        self.now, self.recording, self.fails = "default", None, False
        self.captured_in: list[tuple[Any, str, str]] = []
        self.workspaces: set[str] = set()

    def launch(self, work: Callable[[], None]) -> None:
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    class Graph:
        latest: Module.Graph

        def __init__(self) -> None:
            self.work: list[Callable[[], None]] = []
            self.is_reset = False
            Module.Graph.latest = self

        def replay(self) -> None:
            for work in self.work:
                work()

        def reset(self) -> None:
            self.work.clear()
            self.is_reset = True

    def Stream(self, index: int) -> Any:
        return SimpleNamespace(name=f"stream of {index}", wait_stream=lambda other: None)

    def current_stream(self, index: int) -> Any:
        return SimpleNamespace(name=self.now)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before

    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        @contextmanager
        def capture() -> Iterator[None]:
            self.now = stream.name  # as torch's context, which undoes it only at its end
            if self.fails:
                raise RuntimeError("operation not supported")
            self.captured_in.append((pool, stream.name, capture_error_mode))
            self.recording = graph.work
            try:
                yield
            finally:
                self.recording, self.now = None, "default"

        return capture()

    def synchronize(self, index: int) -> None:
        pass

    def empty_cache(self) -> None:
        assert self.recording is None


class Runner(TorchGraphRunner):
    """Graphs of the stand-in."""

    def _torch(self) -> Any:
        return sys.modules["stand_in_for_torch"]

    def _new_graph(self) -> Any:
        return self._torch().Graph()

    def _forget_workspaces(self) -> None:
        self._torch().workspaces.clear()


class Allocator(TorchPoolAllocator):
    """What the runner asks of an allocator; each capture takes 3 MiB, 2 of them in the pool."""

    def __init__(self) -> None:
        self.captures = 0
        self.pools: list[Any] = []

    def graph_pool(self, tag: str) -> Any:
        @contextmanager
        def capturing() -> Iterator[None]:
            yield
            self.captures += 1

        pool = SimpleNamespace(
            id=(0, len(self.pools)), tag=tag, allocating=nullcontext, capturing=capturing, is_open=True
        )
        pool.mapped_bytes = lambda: 2 * MIB * self.captures
        pool.close = lambda: setattr(pool, "is_open", False)
        self.pools.append(pool)
        return pool

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=(1000 - 3 * self.captures) * MIB, total=1000 * MIB)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module()
    monkeypatch.setitem(sys.modules, "stand_in_for_torch", module)  # type: ignore[arg-type]
    return module


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


@pytest.fixture
def runner(allocator: Allocator) -> Runner:
    runner = Runner(Device("any", 1, "any", "meta:1"))
    runner.start(allocator)
    return runner


def test_a_step_runs_once_before_it_is_recorded_and_then_with_every_replay(module: Module, runner: Runner) -> None:
    ran: list[int] = []
    runner.capture(8, lambda: module.launch(lambda: ran.append(8)))
    runner.capture(4, lambda: module.launch(lambda: ran.append(4)))
    assert ran == [8, 4]
    for key in (4, 8, 4):
        runner.replay(key)
    assert ran == [8, 4, 4, 8, 4]
    with pytest.raises(KeyError):
        runner.replay(2)


def test_all_graphs_share_one_pool_with_the_tag_and_one_stream(
    module: Module, runner: Runner, allocator: Allocator
) -> None:
    for key in (8, 4, 2):
        runner.capture(key, lambda: None)
    assert [pool.tag for pool in allocator.pools] == ["graphs"]
    assert module.captured_in == [((0, 0), "stream of 1", "relaxed")] * 3


def test_a_pool_begins_and_ends_without_what_libraries_keep_for_its_stream(runner: Runner, module: Module) -> None:
    found: list[bool] = []

    def step() -> None:
        found.append(module.now in module.workspaces)
        module.workspaces.add(module.now)

    module.workspaces.add("stream of 1")  # by another engine, whose memory goes with it
    runner.capture(8, step)
    runner.capture(4, step)
    assert found == [False, True, True, True]
    runner.reset()
    assert not module.workspaces


def test_bytes_are_those_of_the_pool_and_what_the_driver_took(
    runner: Runner, allocator: Allocator, module: Module
) -> None:
    assert runner.resident_bytes() == 0
    runner.capture(4, lambda: None)
    runner.capture(2, lambda: None)
    assert runner.resident_bytes() == 6 * MIB
    runner.reset()
    assert runner.resident_bytes() == 0
    assert not allocator.pools[0].is_open
    with pytest.raises(KeyError):
        runner.replay(4)
    runner.capture(4, lambda: None)
    assert len(allocator.pools) == 2


def test_a_capture_that_does_not_begin_leaves_the_stream_as_it_was(runner: Runner, module: Module) -> None:
    module.fails = True
    with pytest.raises(RuntimeError, match="not supported"):
        runner.capture(4, lambda: None)
    assert module.now == "default"
    runner.reset()


def test_a_step_that_fails_while_it_is_captured_leaves_no_graph_in_the_pool(runner: Runner, module: Module) -> None:
    def step() -> None:
        if module.recording is not None:
            raise MemoryError("no memory is left")

    with pytest.raises(MemoryError) as caught:
        runner.capture(4, step)
    assert module.Graph.latest.is_reset
    with pytest.raises(KeyError):
        runner.replay(4)
    del caught


class Garbage:
    """An object of a cycle, which the collector alone can end."""

    def __init__(self, ended: list[bool], module: Module) -> None:
        self.itself, self.ended, self.module = self, ended, module

    def __del__(self) -> None:
        self.ended.append(self.module.recording is not None)


def test_no_garbage_is_collected_while_a_step_is_captured(runner: Runner, module: Module) -> None:
    ended: list[bool] = []

    def step() -> None:
        for _ in range(3 * gc.get_threshold()[0]):
            Garbage(ended, module)

    assert gc.isenabled()
    runner.capture(4, step)
    assert gc.isenabled()
    gc.collect()
    assert ended
    assert not any(ended)


def test_nothing_is_captured_before_the_start_or_without_torch_pools(module: Module) -> None:
    runner = Runner(Device("any", 0, "any", "meta:0"))
    with pytest.raises(GraphCaptureFailed, match="Call start first"):
        runner.capture(1, lambda: None)
    runner.reset()

    resolved = resolve_backend("cpu")
    plain = resolved.descriptor.make("allocator", resolved.device)
    with pytest.raises(CapabilityRefused, match="has no torch pools"):
        runner.start(plain)
    plain.close()
