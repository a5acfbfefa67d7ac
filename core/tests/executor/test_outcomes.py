"""What a failed call leaves behind."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.executor import InProcessExecutor
from hardpoint.interfaces.allocator import WakePlan
from hardpoint.interfaces.errors import InvalidTransaction, RanksDiverged


class Held:
    """Stands for a tensor in a frame of the failing call."""


def test_tensors_of_a_failed_call_go_with_its_exception() -> None:
    seen: list[weakref.ref[Held]] = []

    def warm_up() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise ValueError("no")

    worker: Any = SimpleNamespace(warm_up=warm_up)
    executor = InProcessExecutor(worker)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            executor.call("warm_up")
        assert seen[0]() is None, "held by a cycle of the exception and a frame of the executor"
    finally:
        gc.enable()


@pytest.mark.parametrize("ended", [True, False], ids=["over", "open"])
def test_tensors_of_a_change_that_failed_go_with_its_exception(ended: bool) -> None:
    seen: list[weakref.ref[Held]] = []

    def begin(transaction: int, change: object) -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise ValueError("no")

    def rollback(transaction: int) -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise InvalidTransaction("none is open") if ended else ValueError("neither")

    worker: Any = SimpleNamespace(begin=begin, rollback=rollback)
    executor = InProcessExecutor(worker)
    gc.disable()
    try:
        with pytest.raises(ValueError if ended else RanksDiverged, match="no"):
            executor.change(WakePlan())
        assert [one() for one in seen] == [None, None], "held by a cycle of the exception and a frame of the executor"
    finally:
        gc.enable()
