"""What tests of the kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hardpoint_cpu import _native


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has; with the number of threads, it is set back."""
    before, threads = _native.isa(), _native.num_threads()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
    _native.set_num_threads(threads)
