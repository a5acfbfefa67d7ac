"""A package outside this repository builds its memory driver with the installed headers and build rules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hardpoint.interfaces.errors import BackendUnavailable
from hardpoint.memory import include_dir
from hardpoint.memory.driver_table import DriverTable

PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(vendor LANGUAGES CXX)
include({include}/hardpoint/driver.cmake)
hardpoint_add_driver(vendor_package driver.cpp)
"""

DRIVER = """
#include "hardpoint/driver_support.hpp"

extern "C" hp_status hp_driver_open(const hp_open_request *, const hp_driver **, hp_error *error) {
  return hardpoint::driver::report(error, HP_NO_DEVICE, 0, "hp_driver_open", "no device of this vendor");
}
"""


def test_driver_is_built_and_installed_by_the_cores_rules(tmp_path: Path) -> None:
    cmake = Path(pytest.importorskip("cmake").CMAKE_BIN_DIR) / "cmake"
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(include=include_dir().as_posix()))
    (tmp_path / "driver.cpp").write_text(DRIVER)
    build, installed = tmp_path / "build", tmp_path / "installed"
    for command in (["-S", tmp_path, "-B", build], ["--build", build], ["--install", build, "--prefix", installed]):
        subprocess.run([cmake, *command], check=True, capture_output=True)
    with pytest.raises(BackendUnavailable, match="no device of this vendor"):
        DriverTable(installed / "vendor_package" / "_driver.so", device=0)
