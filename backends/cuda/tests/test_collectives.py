"""Communicators of NCCL that sleep: only where that is asked for, and where the installed NCCL can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import ConfigError
from hardpoint_cuda import collectives
from hardpoint_cuda.collectives import SUSPEND_VARIABLE, CudaCollectives
from hardpoint_cuda.descriptor import hardpoint_backend

DEVICE = Device("cuda", 0, "any", "cuda:0")


@pytest.mark.parametrize(
    ("asked", "version", "is_there", "expected"),
    [
        ("1", (2, 29, 7), True, True),
        ("1", (2, 30, 4), True, True),
        ("1", (2, 29, 3), True, False),
        ("1", (2, 29, 7), False, False),
        ("0", (2, 29, 7), True, False),
        (None, (2, 29, 7), True, False),
    ],
)
def test_communicators_sleep_where_it_is_asked_for_and_possible(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, version: tuple[int, ...], is_there: bool, expected: bool
) -> None:
    monkeypatch.delenv(SUSPEND_VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(SUSPEND_VARIABLE, asked)
    monkeypatch.setattr(collectives, "nccl_version", lambda: version)
    calls: list[str] = []
    group: Any = SimpleNamespace(suspend=lambda: calls.append("suspend")) if is_there else SimpleNamespace()
    made = hardpoint_backend().make("collectives", DEVICE)
    assert isinstance(made, CudaCollectives)
    made._group = group
    assert made.suspend() is expected
    assert calls == ["suspend"] * expected


def test_a_variable_that_says_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUSPEND_VARIABLE, "yes")
    with pytest.raises(ConfigError, match=f"{SUSPEND_VARIABLE}=yes is neither 1 nor 0"):
        CudaCollectives(DEVICE)
