"""For all tests and the processes that they start: one torch thread, because OpenMP's fork-join collapses when tests share two cores with
anything else; and no model hub is asked, but one of a test's own.

No example of a property has a deadline: how long one takes is the machine's business.

The processes of ranks and engines are forks of one that has imported torch and the engine, unless a test asks for `cold_processes`.

And what collecting the tests has made (modules, most of all) is left out of garbage collection, which otherwise goes through all of it
wherever a test asks for a collection to see memory given back: half of the time of such tests. Until then nothing is collected at all:
what is imported stays, and to go through it again and again takes a fifth of the time.
"""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as ranks have it, whose processes are forks of what reads it

import pytest
import torch
from hypothesis import settings

from tests.warm_processes import WarmPopen, children_by, freeze, start_server

gc.disable()  # to the end of pytest's collection
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("hardpoint", deadline=None)
settings.load_profile("hardpoint")


def pytest_configure() -> None:
    """Fork what processes of ranks and engines are forks of, while there are no threads."""
    start_server()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what there is before the first test."""
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what the tests of a file have left, such as what they imported, when it holds no garbage."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Leave what there is to the kernel: at its end the interpreter would go through all of it several times."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> Iterator[None]:
    with children_by(WarmPopen):
        yield


@pytest.fixture
def cold_processes() -> Iterator[None]:
    """Start processes of ranks and engines as users' programs do: for tests of that."""
    with children_by(subprocess.Popen):
        yield
