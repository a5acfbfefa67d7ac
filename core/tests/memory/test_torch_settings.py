"""Expandable segments of torch's allocator are refused, whichever way they were asked for."""

from __future__ import annotations

import pytest

from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.memory import refuse_expandable_segments, torch_has_library
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


def test_what_torch_says_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEW, "expandable_segments:True")
    refuse_expandable_segments([NEW], in_force=False)
    monkeypatch.setenv(NEW, "expandable_segments:False")
    with pytest.raises(CapabilityRefused, match="set by a call"):
        refuse_expandable_segments([NEW], in_force=True)


def test_call_after_the_start_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_settings_of_calls", lambda: "expandable_segments:True")
    with pytest.raises(CapabilityRefused, match="set by a call: expandable_segments:True"):
        refuse_expandable_segments([NEW])
    monkeypatch.setenv(NEW, "expandable_segments:True")
    monkeypatch.setattr(module, "_settings_of_calls", lambda: "expandable_segments:False")
    refuse_expandable_segments([NEW])


def test_torchs_libraries_are_found_by_name() -> None:
    assert torch_has_library("libtorch.so")
    assert not torch_has_library("libtorch_of_no_device.so")
