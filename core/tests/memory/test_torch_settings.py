"""What is asked of the installed torch and its settings; where expandable segments cannot be switched off, they are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import refuse_expandable_segments, torch_has_library, torch_platform_version
from hardpoint.memory import torch_pool as module

NEW, OLD = "PYTORCH_TEST_ALLOC_CONF", "PYTORCH_TEST_OLD_ALLOC_CONF"


@pytest.mark.parametrize(
    "setting",
    [
        "expandable_segments:True",
        " expandable_segments : True ",
        "max_split_size_mb:64,expandable_segments:True",
        "expandable_segments:False,expandable_segments:True",
    ],
)
@pytest.mark.parametrize("variable", [NEW, OLD])
def test_setting_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, setting: str) -> None:
    monkeypatch.setenv(variable, setting)
    with pytest.raises(CapabilityRefused) as caught:
        refuse_expandable_segments([NEW, OLD])
    assert f"{variable}={setting}" in str(caught.value)
    assert f"Set {variable} to expandable_segments:False" in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "expandable_segments:False",
        "pin_memory_expandable_segments:True",
        "expandable_segments_handle_type:posix_fd",
        "expandable_segments:True,expandable_segments:False",
    ],
)
def test_other_settings_are_accepted(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(NEW, setting)
    refuse_expandable_segments([NEW, OLD])


def test_call_after_the_start_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_settings_of_calls", lambda: "expandable_segments:True")
    with pytest.raises(CapabilityRefused, match="set by a call: expandable_segments:True"):
        refuse_expandable_segments([NEW])
    monkeypatch.setenv(NEW, "expandable_segments:True")
    monkeypatch.setattr(module, "_settings_of_calls", lambda: "expandable_segments:False")
    refuse_expandable_segments([NEW])


@pytest.mark.parametrize(
    ("text", "version"),
    [("acme: Optional[str] = '13.0'\n", (13, 0)), ("acme = '12.8'", (12, 8)), ("acme: Optional[str] = None\n", ())],
)
def test_platforms_version_is_read_from_torchs_own_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: tuple[int, ...]
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{text}other: Optional[str] = '7.2'\n")
    monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    assert torch_platform_version("acme") == version


def test_torchs_libraries_are_found_by_name() -> None:
    assert torch_has_library("libtorch.so")
    assert not torch_has_library("libtorch_of_no_device.so")
