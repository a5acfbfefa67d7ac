"""A driver library is opened and asked in a process of its own; whatever it does there is a typed error here."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces.errors import BackendBroken, DriverError
from hardpoint.memory.driver_library import DriverLibrary, LibraryMissing, LibraryUnusable
from hardpoint.memory.driver_probe import query_devices

VARIABLE = "HARDPOINT_TEST_DRIVER"

SCRIPT = """
from ctypes import byref, c_int

def inventory(library):
    count = c_int()
    if library.call("acmeCount", byref(count), allowed=(5,)) == 5:
        return {"devices": [], "reason": "no device found"}
    devices = [{"name": f"acme {index}", "total_memory": 1 << 30, "properties": {"slot": "a"}} for index in range(count.value)]
    return {"devices": devices, "driver_version": "1.2"}

def describe(library, status):
    return f"acme error {status}"
"""

Build = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "driver.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def compile_library(source: str, *options: str) -> Path:
        library = tmp_path / "libacme.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), *options]
        subprocess.run(command, input=source, text=True, check=True)
        return library

    return compile_library


def ask(script: Path, library: Path, monkeypatch: pytest.MonkeyPatch, time_limit: float = 8.0):  # type: ignore[no-untyped-def]
    monkeypatch.setenv(VARIABLE, str(library))
    return query_devices(script, VARIABLE, ("libacme.so.1",), time_limit)


def test_devices_are_listed_as_the_driver_gives_them(
    script: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build("int acmeCount(int *n) { *n = 2; return 0; }")
    found = ask(script, library, monkeypatch)
    assert (found.driver_version, found.reason, found.simulated) == ("1.2", "", False)
    first, second = found.as_devices("acme", "xpu")
    assert (first.backend, first.index, first.name, first.torch_device) == ("acme", 0, "acme 0", "xpu:0")
    assert (second.index, second.total_memory, second.driver_version) == (1, 1 << 30, "1.2")
    assert second.properties == {"library": str(library), "slot": "a"}


def test_library_that_is_not_installed_is_a_reason_and_no_error(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    found = query_devices(script, VARIABLE, ("libacme.so.1", "libacme.so"))
    assert (found.devices, found.reason) == ((), "no libacme.so.1 or libacme.so is installed")


def test_driver_without_a_device_is_a_reason_and_no_error(
    script: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ask(script, build("int acmeCount(int *n) { return 5; }"), monkeypatch)
    assert (found.devices, found.reason) == ((), "no device found")


def test_simulated_driver_is_labelled(script: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(
        script, build("int hardpoint_simulated_driver; int acmeCount(int *n) { *n = 1; return 0; }"), monkeypatch
    )
    assert [device.simulated for device in found.as_devices("acme", "xpu")] == [True]


def test_failing_call_is_a_driver_error_with_call_status_and_text(
    script: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DriverError, match="acmeCount") as caught:
        ask(script, build("int acmeCount(int *n) { return 999; }"), monkeypatch)
    assert (caught.value.call, caught.value.code, caught.value.text) == ("acmeCount", 999, "acme error 999")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("int other;", "has no function acmeCount"),
        ("#include <stdlib.h>\nint acmeCount(int *n) { abort(); }", "it was ended by SIGABRT"),
        ("int acmeCount(int *n) { return *(volatile int *)0; }", "it was ended by SIGSEGV"),
        ("#include <stdlib.h>\nint acmeCount(int *n) { _Exit(3); }", "it ended with code 3"),
        ("#include <stdlib.h>\nint acmeCount(int *n) { _Exit(0); }", "it ended with code 0"),
    ],
)
def test_library_that_cannot_be_used_or_crashes_is_broken(
    script: Path, build: Build, monkeypatch: pytest.MonkeyPatch, source: str, text: str
) -> None:
    with pytest.raises(BackendBroken, match=text):
        ask(script, build(source), monkeypatch)


def test_hanging_driver_is_broken_within_the_time_limit(
    script: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build("#include <unistd.h>\nint acmeCount(int *n) { sleep(200); return 0; }")
    start = time.monotonic()
    with pytest.raises(BackendBroken, match=r"did not answer within 0.5 s"):
        ask(script, library, monkeypatch, time_limit=0.5)
    assert time.monotonic() - start < 100


def test_driver_that_prints_does_not_disturb_the_answer(
    script: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = '#include <stdio.h>\nint acmeCount(int *n) { puts("{hello}"); fflush(stdout); *n = 1; return 0; }'
    assert len(ask(script, build(source), monkeypatch).devices) == 1


def test_driver_is_never_loaded_into_this_process(script: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build("int acmeCount(int *n) { *n = 1; return 0; }")
    ask(script, library, monkeypatch)
    assert str(library) not in Path("/proc/self/maps").read_text()


def test_path_given_by_the_user_that_cannot_be_loaded_is_broken(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendBroken, match=f"{VARIABLE} names a library that cannot be loaded"):
        ask(script, tmp_path / "nothing.so", monkeypatch)
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(BackendBroken, match=r"invalid ELF header|file too short"):
        ask(script, text, monkeypatch)


def test_installed_library_whose_dependency_is_missing_is_unusable_and_not_missing(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    dependency = build("int acmeDependency(void) { return 0; }").rename(tmp_path / "libacme_dependency.so")
    source = "int acmeDependency(void); int acmeCount(int *n) { return acmeDependency(); }"
    library = build(source, "-Wl,--no-as-needed", f"-L{tmp_path}", "-lacme_dependency")  # type: ignore[call-arg]
    dependency.unlink()
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(LibraryUnusable, match=r"libacme_dependency\.so"):
        DriverLibrary.open(VARIABLE, (str(library),))
    with pytest.raises(LibraryMissing):
        DriverLibrary.open(VARIABLE, ("libacme_that_is_not_there.so",))


def test_library_is_the_first_soname_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    library = DriverLibrary.open(VARIABLE, ("libacme_that_is_not_there.so", "libc.so.6"))
    assert library.path == "libc.so.6"
    assert library.function("strlen", ctypes.c_size_t)(b"four") == 4
