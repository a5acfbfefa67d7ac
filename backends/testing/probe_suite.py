"""What every probe makes of libraries that are missing, empty or failing, and what discovery records of it; a backend's tests derive
from it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hardpoint.interfaces.errors import BackendBroken, BackendUnavailable, DriverError
from hardpoint.plugins import BackendState, installed, resolve_backend

Build = Callable[[str], None]


class ProbeSuite:
    """The probe of one backend.

    Attributes:
        descriptor: the backend's module.
        source: C code of a vendor's library with one device, on which nothing can be computed for want of torch's build.
        without_device: (what is changed in it, to what, the reason that is then given) for libraries without a device.
        failing: calls whose failure is an error.
        needed: functions whose absence is an error.
        missing: what the reason for a device on which nothing can be computed says.
    """

    descriptor: ClassVar[Any]
    source: ClassVar[str]
    without_device: ClassVar[Sequence[tuple[str, str, str]]]
    failing: ClassVar[Sequence[str]]
    needed: ClassVar[Sequence[str]]
    missing: ClassVar[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test what the backend's class lists for it."""
        if "reason" in metafunc.fixturenames and "old" in metafunc.fixturenames:
            metafunc.parametrize(("old", "new", "reason"), self.without_device)
        for name, calls in (("failing_call", self.failing), ("needed_call", self.needed)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, calls)

    @pytest.fixture
    def build(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
        """Compile a library, and have the probe look for it."""

        def compile_library(source: str) -> None:
            library = tmp_path / "driver.so"
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True
            )
            monkeypatch.setenv(self.descriptor.DRIVER_VARIABLE, str(library))

        return compile_library

    def test_missing_library_is_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(self.descriptor.DRIVER_VARIABLE, raising=False)
        monkeypatch.setattr(self.descriptor, "SONAMES", ("libhardpoint_test_no_such_driver.so",))
        found = self.descriptor.probe()
        assert (found.devices, found.reason) == ((), "no libhardpoint_test_no_such_driver.so is installed")

    def test_driver_without_a_device_is_unavailable(self, build: Build, old: str, new: str, reason: str) -> None:
        assert old in self.source
        build(self.source.replace(old, new))
        found = self.descriptor.probe()
        assert found.devices == ()
        assert reason in found.reason

    def test_failing_call_is_an_error_that_names_it(self, build: Build, failing_call: str) -> None:
        build(self.source.replace(f"int {failing_call}(", f"int {failing_call}() {{ return 999; }}\nint unused("))
        with pytest.raises(DriverError) as caught:
            self.descriptor.probe()
        assert (caught.value.call, caught.value.code) == (failing_call, 999)

    def test_missing_symbol_is_an_error_that_names_it(self, build: Build, needed_call: str) -> None:
        build(self.source.replace(f"{needed_call}(", f"renamed_{needed_call}("))
        with pytest.raises(BackendBroken, match=f"has no function {needed_call}$"):
            self.descriptor.probe()

    def test_discovery_records_the_device_as_unavailable(self, build: Build) -> None:
        build(self.source)
        name = self.descriptor.hardpoint_backend().name
        (record,) = installed(refresh=True).records(name)
        assert record.state is BackendState.UNAVAILABLE
        assert [device.simulated for device in record.devices] == [False]
        with pytest.raises(BackendUnavailable, match=self.missing):
            resolve_backend(name)
