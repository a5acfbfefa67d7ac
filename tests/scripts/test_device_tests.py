"""The device tests notice drivers that are not right: each is the simulated CUDA driver with one call that cheats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint_simulators import library

ROOT = Path(__file__).parents[2]

CHEATS = {
    "copies lose a byte now and then": """
int cuMemcpyDtoHAsync_v2(void *host, unsigned long long device, size_t size, void *stream) {
  static int count;
  int code = ((int (*)(void *, unsigned long long, size_t, void *))next("cuMemcpyDtoHAsync_v2"))(host, device, size, stream);
  ((int (*)(void *))next("cuStreamSynchronize"))(stream);
  if (++count % 3 == 0) ((char *)host)[size - 1] ^= 1;
  return code;
}
""",
    "memory is not given back": "int cuMemRelease(unsigned long long handle) { return 0; }",
    "creating fails now and then": """
int cuMemCreate(unsigned long long *handle, size_t size, const void *properties, unsigned long long flags) {
  static int count;
  if (++count % 7 == 0) return 1;
  return ((int (*)(void *, size_t, const void *, unsigned long long))next("cuMemCreate"))(handle, size, properties, flags);
}
""",
}
PREAMBLE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int hardpoint_simulated_driver;
static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }
"""


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_driver_fails_the_device_tests(cheat: str, tmp_path: Path) -> None:
    driver, honest = tmp_path / "libcuda.so.1", library("cuda")
    linked = ["-x", "none", "-Wl,--no-as-needed", str(honest), f"-Wl,-rpath,{honest.parent}", "-ldl"]
    command = ["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", *linked, "-o", str(driver)]
    subprocess.run(command, input=PREAMBLE + CHEATS[cheat], text=True, check=True)
    settings = {"HARDPOINT_DEVICE": "cuda:0", "HARDPOINT_DEVICE_SIMULATED": "1", "HARDPOINT_CUDA_DRIVER": str(driver)}
    tests = ["tests/device/test_sleep.py", "-x", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/device"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
