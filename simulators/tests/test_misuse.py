"""The probe of misuse, and the simulation held against what real drivers answered to it."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest

from hardpoint_simulators import library
from hardpoint_simulators.misuse import MISUSES, Table, differences, record

RECORDS = sorted((Path(__file__).parents[1] / "misuse").glob("*.json"))

_ANSWERS = (
    "the driver answers with success; nothing of ours asks for it, and where something did it would be an error of ours"
)
_ENDS = "the driver reads what is not there, and the process ends"
_STICKS = "the driver refuses this copy and goes on; the simulation fails as a kernel does, and the error stays with the context"
STRICTER: dict[str, str] = {
    **dict.fromkeys(
        (
            "granularity-device",
            "create-handle-type",
            "create-without-context",
            "map-without-context",
            "map-beyond-reservation",
            "access-without-context",
            "unmap-unmapped",
            "unmap-beyond-mapping",
            "unmap-without-context",
        ),
        _ANSWERS,
    ),
    **dict.fromkeys(("release-unknown", "map-unknown-handle", "map-released-handle"), _ENDS),
    **dict.fromkeys(
        ("copy-reserved-only", "copy-without-access", "copy-after-unmap", "copy-across-the-end", "copy-into-read-only"),
        _STICKS,
    ),
    "stream-destroyed": "the driver names the context that it finds in a stream that is gone",
}
"""Misuses to which the simulation deliberately answers otherwise than a recorded driver, each with the reason."""


@cache
def simulated() -> Table:
    table: Table = record(str(library("cuda")))["misuse"]
    return table


def test_every_misuse_is_answered() -> None:
    assert list(simulated()) == list(MISUSES)
    assert all(answer["code"] is not None for answer in simulated().values())


def test_what_the_documents_allow_is_allowed_and_nothing_else() -> None:
    allowed = {name for name, answer in simulated().items() if answer["code"] == 0}
    # A handle may be released while it is mapped, several whole mappings unmapped at once, and address space belongs to no context
    # (cuda.h, virtual memory management).
    assert allowed == {"release-while-mapped", "unmap-two-mappings", "reserve-without-context"}


def test_answers_name_the_call_and_the_error() -> None:
    assert simulated()["create-device"] == {"call": "cuMemCreate", "code": 101, "name": "CUDA_ERROR_INVALID_DEVICE"}
    assert simulated()["create-beyond-capacity"]["name"] == "CUDA_ERROR_OUT_OF_MEMORY"


FRAGILE_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
static int dead;
int cuMemRelease(unsigned long long handle) {
  if (handle == 12345) raise(SIGSEGV);
  return ((int (*)(unsigned long long))dlsym(RTLD_NEXT, "cuMemRelease"))(handle);
}
int cuMemcpyHtoD_v2(unsigned long long target, const void *source, size_t size) {
  int code = ((int (*)(unsigned long long, const void *, size_t))dlsym(RTLD_NEXT, "cuMemcpyHtoD_v2"))(target, source, size);
  dead = code != 0;
  return code;
}
int cuCtxSynchronize(void) { return dead ? 700 : ((int (*)(void))dlsym(RTLD_NEXT, "cuCtxSynchronize"))(); }
"""
"""A driver that ends the process on an unknown handle, and whose context is dead after a copy that failed."""


def test_crash_and_dead_context_do_not_end_the_recording(tmp_path: Path) -> None:
    fragile, real = tmp_path / "fragile.so", library("cuda")
    linked = ["-x", "none", "-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{real.parent}", "-ldl"]
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", *linked, "-o", str(fragile)]
    subprocess.run(command, input=FRAGILE_DRIVER, text=True, check=True)
    table = record(str(fragile))["misuse"]
    assert table["release-unknown"] == {"call": "cuMemRelease", "code": None, "name": "SIGSEGV"}
    assert list(differences(simulated(), table)) == ["release-unknown"]


def test_probe_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = tmp_path / "leaks"
    monkeypatch.setenv("HARDPOINT_SIM_LEAK_REPORT", str(report))
    record(str(library("cuda")))
    assert "not freed" not in report.read_text()
    assert "not released" not in report.read_text().replace("references to device contexts not released", "")


def test_library_without_a_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_SIM_DEVICES", "0")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NO_DEVICE"):
        record(str(library("cuda")))


def test_missing_library_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="could not be probed"):
        record("libhardpoint_no_such_driver.so")


def test_differences_are_found() -> None:
    table = simulated()
    changed = json.loads(json.dumps(table))
    changed["map-twice"]["code"] = 0
    changed["only-there"] = {"call": "cuMemMap", "code": 5, "name": "other"}
    assert differences(changed, table) == {"map-twice": (0, table["map-twice"]["code"])}
    assert differences(table, table) == {}


@pytest.mark.skipif(not RECORDS, reason="no table of a real driver is committed in simulators/misuse")
@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_simulation_answers_as_the_real_driver(path: Path) -> None:
    recorded = json.loads(path.read_text("utf-8"))
    assert recorded["driver"]["simulated"] is False
    assert set(recorded["misuse"]) >= set(MISUSES), "record the table again: the probe has new misuses"
    unexplained = {
        name: codes for name, codes in differences(recorded["misuse"], simulated()).items() if name not in STRICTER
    }
    assert unexplained == {}
