"""What a process does beside its real work while an engine starts."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint._native import load_library
from hardpoint.executor.start import begin, collection_paused

LOADED_AHEAD = """
import sys
from pathlib import Path
from hardpoint.executor.start import await_torch, begin_torch

def is_loaded():
    return "/libtorch_python.so" in Path("/proc/self/maps").read_text()

assert not is_loaded()
await_torch()
assert not is_loaded()
begin_torch()
begin_torch()
await_torch()
assert is_loaded() and "torch" not in sys.modules
import torch
assert torch.ones(3).sum() == 3
begin_torch()
await_torch()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's mappings")
def test_libraries_are_loaded_before_torch_is_imported_which_then_works() -> None:
    subprocess.run([sys.executable, "-c", LOADED_AHEAD], check=True, timeout=120)


@pytest.mark.parametrize("seconds", [0, 0.04, 0.08])
def test_a_process_that_ends_while_the_libraries_load_ends_in_order(seconds: float) -> None:
    code = f"import time; from hardpoint.executor.start import begin_torch; begin_torch(); time.sleep({seconds})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_library_that_does_not_load_is_no_error_here(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    assert not load_library(str(broken))
    assert not load_library(str(tmp_path / "missing.so"))


def test_what_is_begun_gives_its_result_or_its_error_and_keeps_no_process_from_ending() -> None:
    assert begin(lambda: 3).result(10) == 3
    with pytest.raises(SystemExit, match="7"):
        begin(lambda: sys.exit(7)).result(10)
    hanging = "import time; from hardpoint.executor.start import begin; begin(lambda: time.sleep(100))"
    subprocess.run([sys.executable, "-c", hanging], check=True, timeout=60)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(*, was_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
        with pytest.raises(KeyError), collection_paused():
            raise KeyError
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()


MADE_MEANWHILE = """
import gc
from hardpoint.executor.start import collection_paused

with collection_paused():
    made = [[index] for index in range(20_000)]
young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
assert not young & set(map(id, made))
assert gc.get_freeze_count() == 0
gc.freeze()
frozen = gc.get_freeze_count()
with collection_paused():
    pass
assert gc.get_freeze_count() >= frozen
"""


def test_what_was_made_meanwhile_is_of_the_oldest_generation_and_what_was_frozen_stays_so() -> None:
    subprocess.run([sys.executable, "-c", MADE_MEANWHILE], check=True, timeout=120)
