"""Fixtures of the simulators' own tests: a driver without anything in it, one per vendor or all in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .drivers import DRIVERS, Ascend, Cuda, Driver, Rocm, open_driver


@pytest.fixture(params=sorted(DRIVERS))
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Each vendor's driver in turn."""
    opened = open_driver(request.param)
    yield opened
    opened.simulator.reset()


def _single(vendor: str) -> Iterator[Driver]:
    opened = open_driver(vendor)
    yield opened
    opened.simulator.reset()


@pytest.fixture
def cuda() -> Iterator[Driver]:
    yield from _single(Cuda.vendor)


@pytest.fixture
def rocm() -> Iterator[Driver]:
    yield from _single(Rocm.vendor)


@pytest.fixture
def mi300x(rocm: Driver) -> Driver:
    """The HIP runtime with all that was found of it on an MI300X under ROCm 7.2."""
    rocm.simulator.reset()
    return rocm


@pytest.fixture
def ascend() -> Iterator[Driver]:
    yield from _single(Ascend.vendor)
