"""Which backend is chosen, and which error says why none is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from hardpoint.interfaces import API_VERSION
from hardpoint.interfaces.errors import (
    AmbiguousBackend,
    BackendBroken,
    BackendError,
    BackendIncompatible,
    BackendNotFound,
    BackendUnavailable,
    ConfigError,
)
from hardpoint.plugins import installed, resolve_backend

if TYPE_CHECKING:
    from conftest import Site

TWO_DEVICES = """
return ProbeResult((Device("alpha", 0, "first", "alpha:0"), Device("alpha", 1, "second", "alpha:1")))
"""
NEWER = (API_VERSION + 1, API_VERSION + 1)


def test_highest_priority_wins_without_a_notice(site: Site) -> None:
    site.backend("alpha", priority=1)
    site.backend("beta", priority=2)
    site.unavailable("gamma", priority=1)
    resolved = resolve_backend(records=site.discover())
    assert (resolved.descriptor.name, resolved.device.name, resolved.notice) == ("beta", "beta device", "")


def test_unavailable_backend_passes_on_with_one_line_that_says_why(site: Site) -> None:
    site.unavailable("alpha", reason="no driver found", priority=9)
    site.backend("beta", priority=0, accelerator=False)
    resolved = resolve_backend(records=site.discover())
    assert resolved.descriptor.name == "beta"
    assert resolved.notice == "alpha is unavailable (no driver found): using beta instead"


def test_equal_priority_is_an_error_that_lists_the_backends(site: Site) -> None:
    site.backend("alpha", priority=5)
    site.backend("beta", priority=5)
    site.backend("gamma", priority=1)
    with pytest.raises(AmbiguousBackend, match=r"alpha .*beta .*--backend") as caught:
        resolve_backend(records=site.discover())
    assert "gamma" not in str(caught.value)


def test_equal_priority_of_an_unavailable_backend_is_no_tie(site: Site) -> None:
    site.backend("alpha", priority=5)
    site.unavailable("beta", priority=5)
    assert resolve_backend(records=site.discover()).descriptor.name == "alpha"


def test_broken_plugin_never_becomes_cpu(site: Site) -> None:
    site.install("alpha", "import a_module_that_is_not_there\n")
    site.backend("cpu", accelerator=False, priority=0)
    with pytest.raises(BackendBroken, match=r"a_module_that_is_not_there.*HARDPOINT_BLOCK_BACKENDS=alpha"):
        resolve_backend(records=site.discover())


def test_broken_probe_of_higher_priority_never_becomes_cpu(site: Site) -> None:
    site.backend("alpha", probe="raise OSError('no answer')", priority=10)
    site.backend("cpu", accelerator=False)
    with pytest.raises(BackendBroken, match="no answer"):
        resolve_backend(records=site.discover())


def test_incompatible_plugin_never_becomes_cpu(site: Site) -> None:
    site.backend("alpha", api=NEWER, priority=10)
    site.backend("cpu", accelerator=False)
    with pytest.raises(BackendIncompatible, match="contract versions"):
        resolve_backend(records=site.discover())


def test_name_claimed_twice_never_becomes_cpu(site: Site) -> None:
    site.backend("alpha", distribution="acme-alpha", priority=10)
    site.backend("alpha", distribution="other-alpha", priority=10)
    site.backend("cpu", accelerator=False)
    with pytest.raises(AmbiguousBackend, match=r"acme-alpha 1.0 .*other-alpha 1.0"):
        resolve_backend(records=site.discover())


def test_fault_of_lower_priority_than_the_chosen_one_does_not_stop_it(site: Site) -> None:
    site.backend("alpha", priority=10)
    site.backend("beta", probe="raise OSError('no answer')", priority=1)
    site.backend("gamma", api=NEWER, priority=1)
    assert resolve_backend(records=site.discover()).descriptor.name == "alpha"


@pytest.mark.parametrize("how", ["broken", "incompatible", "twice"])
def test_blocking_a_faulty_backend_lets_the_others_go_on(site: Site, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "broken":
        site.install("alpha", "1 / 0")
    elif how == "incompatible":
        site.backend("alpha", api=NEWER)
    else:
        site.backend("alpha", distribution="acme-alpha")
        site.backend("alpha", distribution="other-alpha")
    site.backend("cpu", accelerator=False)
    monkeypatch.setenv("HARDPOINT_BLOCK_BACKENDS", "alpha")
    resolved = resolve_backend(records=site.discover())
    assert (resolved.descriptor.name, resolved.notice) == ("cpu", "")


def test_named_backend_is_used_whatever_its_priority_and_the_state_of_others(site: Site) -> None:
    site.install("alpha", "1 / 0")
    site.backend("beta", priority=9)
    site.backend("cpu", accelerator=False)
    resolved = resolve_backend("cpu", records=site.discover())
    assert (resolved.descriptor.name, resolved.notice) == ("cpu", "")


def test_environment_names_the_backend_and_the_argument_wins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("alpha", priority=2)
    site.backend("beta", priority=1)
    monkeypatch.setenv("HARDPOINT_BACKEND", "beta")
    assert resolve_backend(records=site.discover()).descriptor.name == "beta"
    assert resolve_backend("alpha", records=site.discover()).descriptor.name == "alpha"


def test_empty_environment_variable_names_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("alpha")
    monkeypatch.setenv("HARDPOINT_BACKEND", "")
    assert resolve_backend(records=site.discover()).descriptor.name == "alpha"


def test_unknown_name_lists_the_records(site: Site) -> None:
    site.backend("alpha")
    site.unavailable("beta", reason="no driver found")
    with pytest.raises(BackendNotFound, match=r"'delta'.*alpha \(acme-alpha 1.0\): ok.*beta .*no driver found"):
        resolve_backend("delta", records=site.discover())


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("unavailable", BackendUnavailable, "no driver found"),
        ("incompatible", BackendIncompatible, "contract versions"),
        ("broken", BackendBroken, "ZeroDivisionError"),
        ("blocked", BackendUnavailable, "HARDPOINT_BLOCK_BACKENDS"),
        ("twice", AmbiguousBackend, "other-alpha"),
    ],
)
def test_named_backend_is_exactly_that_or_an_error_that_quotes_its_record(
    site: Site, monkeypatch: pytest.MonkeyPatch, how: str, error: type[BackendError], text: str
) -> None:
    site.backend("cpu", accelerator=False)
    if how == "unavailable":
        site.unavailable("alpha", reason="no driver found", install_hint="Install the driver")
    elif how == "broken":
        site.install("alpha", "1 / 0")
    else:
        site.backend("alpha", api=NEWER if how == "incompatible" else (1, API_VERSION))
    if how == "twice":
        site.backend("alpha", distribution="other-alpha")
    if how == "blocked":
        monkeypatch.setenv("HARDPOINT_BLOCK_BACKENDS", "alpha")
    with pytest.raises(error, match=text) as caught:
        resolve_backend("alpha", records=site.discover())
    assert "'alpha' was asked for" in caught.value.problem
    assert caught.value.hint
    if how == "unavailable":
        assert caught.value.hint == "Install the driver"


def test_name_with_one_of_its_two_distributions_blocked_is_the_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.backend("alpha", distribution="acme-alpha")
    site.backend("alpha", distribution="other-alpha")
    monkeypatch.setenv("HARDPOINT_BLOCK_BACKENDS", "acme-alpha")
    assert resolve_backend("alpha", records=site.discover()).device.name == "alpha device"


def test_device_is_chosen_by_index(site: Site) -> None:
    site.backend("alpha", probe=TWO_DEVICES)
    assert resolve_backend("alpha", device=1, records=site.discover()).device.name == "second"


@pytest.mark.parametrize("device", [2, -1])
@pytest.mark.parametrize("name", ["alpha", None])
def test_device_that_is_not_there_is_an_error_that_lists_the_devices(site: Site, device: int, name: str | None) -> None:
    site.backend("alpha", probe=TWO_DEVICES)
    with pytest.raises(ConfigError, match=rf"device {device} of backend 'alpha'.*0 \(first\), 1 \(second\)"):
        resolve_backend(name, device=device, records=site.discover())


def test_required_accelerator_makes_cpu_an_error(site: Site) -> None:
    site.backend("cpu", accelerator=False, priority=3)
    site.unavailable("alpha", reason="no driver found")
    with pytest.raises(BackendUnavailable, match=r"accelerator is required.*no driver found"):
        resolve_backend(require_accelerator=True, records=site.discover())
    with pytest.raises(ConfigError, match="host's processor"):
        resolve_backend("cpu", require_accelerator=True, records=site.discover())


def test_required_accelerator_is_found_behind_a_host_backend_of_higher_priority(site: Site) -> None:
    site.backend("cpu", accelerator=False, priority=3)
    site.backend("alpha", priority=1)
    assert resolve_backend(require_accelerator=True, records=site.discover()).descriptor.name == "alpha"


def test_nothing_usable_is_an_error_that_lists_the_reasons(site: Site) -> None:
    site.unavailable("alpha", reason="no driver found")
    site.unavailable("beta", reason="no device found")
    with pytest.raises(BackendUnavailable, match=r"no driver found.*no device found"):
        resolve_backend(records=site.discover())


def test_everything_blocked_is_an_error_that_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("alpha")
    monkeypatch.setenv("HARDPOINT_BLOCK_BACKENDS", "alpha")
    with pytest.raises(BackendUnavailable, match="HARDPOINT_BLOCK_BACKENDS"):
        resolve_backend(records=site.discover())


def test_nothing_installed_says_how_to_install_a_backend() -> None:
    with pytest.raises(BackendNotFound, match=r'pip install "hardpoint\[cpu\]"'):
        resolve_backend(records=())


def test_naming_an_installed_backend_imports_no_other(site: Site) -> None:
    site.backend("alpha_of_this_test")
    site.backend("beta_of_this_test")
    try:
        installed(refresh=True)
        assert resolve_backend("alpha_of_this_test").descriptor.name == "alpha_of_this_test"
        assert "acme_beta_of_this_test" not in sys.modules
    finally:
        for info in site.folder.glob("*.dist-info/entry_points.txt"):
            info.unlink()
        installed(refresh=True)


def test_resolution_does_not_depend_on_the_order_of_records(site: Site) -> None:
    site.unavailable("alpha", priority=3)
    site.backend("beta", priority=2)
    site.backend("gamma", priority=1)
    records = site.discover()
    assert resolve_backend(records=records) == resolve_backend(records=records[::-1])
