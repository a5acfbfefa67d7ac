"""What only CUDA's torch has: process groups of NCCL; on the real torch over the simulated driver."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hardpoint.interfaces.errors import ConfigError

from .conftest import BUILD

pytestmark = pytest.mark.skipif(BUILD != "cuda", reason="for torch's build for CUDA")

REGISTRATION = "NCCL_GRAPH_REGISTER"


@pytest.fixture
def collectives(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(REGISTRATION, raising=False)
    made = machine.descriptor.make("collectives", machine.devices[0])
    yield made
    made.stop()


def test_a_group_of_nccl_is_made_and_registers_no_memory_of_graphs(collectives: Any, unused_port: int) -> None:
    collectives.start(0, 1, f"tcp://127.0.0.1:{unused_port}/alone", timeout=10.0)
    assert os.environ[REGISTRATION] == "0"


def test_registration_that_was_asked_for_is_refused(
    collectives: Any, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REGISTRATION, "1")
    with pytest.raises(ConfigError, match=f"{REGISTRATION}=1"):
        collectives.start(0, 1, f"tcp://127.0.0.1:{unused_port}/alone", timeout=10.0)
