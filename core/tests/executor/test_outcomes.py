"""What a failed call leaves behind."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.executor import InProcessExecutor


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
