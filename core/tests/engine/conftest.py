"""Engines over a device in simulated time, with the demo model's tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM
from hardpoint.engine import startup
from hardpoint.models import load_tokenizer
from hardpoint.models.source import ModelSource
from hardpoint.plugins import installed

sys.path.insert(0, str(Path(__file__).parent))
import simulated_device

_loaded: list[tuple[Any, ModelSource]] = []


def _tokenizer(source: ModelSource, *arguments: Any) -> Any:
    """Load the demo model's tokenizer once for all engines, and keep its file open, whose header is then read once, too."""
    if not _loaded:
        _loaded.append((load_tokenizer(source, *arguments), source))
    return _loaded[0][0]


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the simulated device's backend, installed where this process looks for backends."""
    site = tmp_path_factory.mktemp("site")
    simulated_device.install(site)
    yield simulated_device.NAME
    sys.path.remove(str(site))
    installed(refresh=True)


Make = Callable[..., LLM]


@contextmanager
def _making(device: str) -> Iterator[Make]:
    made: list[LLM] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "load_tokenizer", _tokenizer)

        def make(depth: int = 1, seconds: float = 0.0, **settings: Any) -> LLM:
            patch.setenv("HARDPOINT_SIMULATED_DEPTH", str(depth))
            patch.setenv("HARDPOINT_SIMULATED_STEP", str(seconds))
            defaults = {"backend": device, "num_device_blocks": 512, "max_num_seqs": 64, "swap_space": 0}
            made.append(LLM("demo", **{**defaults, **settings}))
            return made[-1]

        yield make
        for llm in made:
            llm.shutdown()


@pytest.fixture
def make_llm(device: str) -> Iterator[Make]:
    """Return what makes an engine with the given number of steps in flight, of the given seconds each."""
    with _making(device) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_llm(device: str) -> Iterator[Make]:
    """The same for engines that all tests of a module use: a process takes a while to start."""
    with _making(device) as make:
        yield make
