"""What discovery records of sound, absent, faulty and hostile candidates."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from hardpoint.interfaces import API_VERSION
from hardpoint.plugins import BackendRecord, BackendState, Registry, installed

if TYPE_CHECKING:
    from conftest import Site


def only(records: tuple[BackendRecord, ...]) -> BackendRecord:
    assert len(records) == 1
    return records[0]


def test_sound_backend_is_recorded_with_its_device_and_versions(site: Site) -> None:
    site.backend("alpha", priority=7)
    record = only(site.discover())
    assert (record.state, record.reason, record.traceback) == (BackendState.OK, "", "")
    assert (record.name, record.distribution, record.version) == ("alpha", "acme-alpha", "1.0")
    assert (record.entry_point, record.priority, record.api) == ("acme_alpha", 7, (API_VERSION, API_VERSION))
    assert [device.name for device in record.devices] == ["alpha device"]


def test_entry_point_may_name_an_object_instead_of_a_module(site: Site) -> None:
    source = """
    import pluggy
    from hardpoint.interfaces import API_VERSION, BackendDescriptor, Device, ProbeResult

    class Plugin:
        @pluggy.HookimplMarker("hardpoint")
        def hardpoint_backend(self):
            return BackendDescriptor("alpha", "tests", (API_VERSION, API_VERSION), lambda: ProbeResult((Device("alpha", 0, "a", "a"),)),
                                     *[print] * 4)

    plugin = Plugin()
    """
    site.install("alpha", source, value="acme_alpha:plugin")
    assert only(site.discover()).state is BackendState.OK


def test_records_are_sorted_by_name_whatever_the_order_of_entry_points(site: Site) -> None:
    for name in ("gamma", "alpha", "beta"):
        site.unavailable(name)
    entries = site.entry_points()
    orders = [Registry(order).records() for order in (entries, entries[::-1])]
    assert [[record.name for record in records] for records in orders] == [["alpha", "beta", "gamma"]] * 2


def test_unavailable_backend_keeps_its_reason_and_the_devices_it_cannot_use(site: Site) -> None:
    device = 'Device("alpha", 0, "old device", "alpha")'
    site.backend("alpha", probe=f'return ProbeResult(({device},), reason="the device is too old")')
    record = only(site.discover())
    assert (record.state, record.reason) == (BackendState.UNAVAILABLE, "the device is too old")
    assert [found.name for found in record.devices] == ["old device"]


def test_broken_import_is_recorded_with_its_traceback_and_spares_the_others(site: Site) -> None:
    site.install("alpha", "import a_module_that_is_not_there\n")
    site.backend("beta")
    broken, sound = site.discover()
    assert broken.state is BackendState.BROKEN
    assert "importing acme_alpha raised ModuleNotFoundError" in broken.reason
    assert "a_module_that_is_not_there" in broken.traceback
    assert broken.priority is None
    assert sound.state is BackendState.OK


@pytest.mark.parametrize(
    "statement", ["raise SystemExit(3)", "raise KeyboardInterrupt", "import sys; sys.exit()", "1 / 0"]
)
def test_import_that_ends_the_interpreter_is_only_broken(site: Site, statement: str) -> None:
    site.install("alpha", statement)
    assert only(site.discover()).state is BackendState.BROKEN


def test_hook_that_raises_is_broken(site: Site) -> None:
    site.install("alpha", _hook("raise RuntimeError('no descriptor today')"))
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert "hardpoint_backend raised RuntimeError: no descriptor today" in record.reason


def test_descriptor_with_impossible_values_is_broken(site: Site) -> None:
    site.backend("alpha", api=(3, 2))
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert "inclusive range" in record.reason


@pytest.mark.parametrize("value", ["None", "{'name': 'alpha'}", "'alpha'"])
def test_hook_that_returns_no_descriptor_is_broken(site: Site, value: str) -> None:
    site.install("alpha", _hook(f"return {value}"))
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert "not a BackendDescriptor" in record.reason


def test_module_without_the_hook_is_broken(site: Site) -> None:
    site.install("alpha", "def hardpoint_backend():\n    return None\n")
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert "has no function hardpoint_backend" in record.reason


def test_unknown_hook_is_broken_and_named(site: Site) -> None:
    site.install(
        "alpha", _hook("return None") + _hook("return None").replace("hardpoint_backend", "hardpoint_backends")
    )
    site.backend("beta")
    broken, sound = site.discover()
    assert broken.state is BackendState.BROKEN
    assert "hardpoint_backends" in broken.reason
    assert sound.state is BackendState.OK


def test_hook_that_wants_arguments_is_broken(site: Site) -> None:
    site.install(
        "alpha", _hook("return None").replace("()", "(engine)", 2).replace('("hardpoint")', '("hardpoint")', 1)
    )
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert "engine" in record.reason


def test_descriptor_of_wrong_types_is_broken_and_says_each(site: Site) -> None:
    site.install(
        "alpha",
        _hook(
            "from hardpoint.interfaces import BackendDescriptor\n"
            "    return BackendDescriptor('alpha', 'tests', (1, 1), *[None] * 5, priority='high', platform=str)"
        ),
    )
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert "priority is 'high', not an integer; probe is None, not a function; " in record.reason
    assert record.reason.endswith("; platform is the class str, not a function that returns it")


@pytest.mark.parametrize(
    ("name", "api", "text"),
    [("3", "(1, 1)", "not 3"), ("'alpha'", "'1'", "not '1'"), ("'alpha'", "(1, None)", "not (1, None)")],
)
def test_name_and_versions_of_wrong_types_are_told(site: Site, name: str, api: str, text: str) -> None:
    source = f"from hardpoint.interfaces import BackendDescriptor\n    return BackendDescriptor({name}, 'tests', {api}, *[print] * 5)"
    site.install("alpha", _hook(source))
    record = only(site.discover())
    assert record.state is BackendState.BROKEN
    assert record.reason.endswith(text)


def test_distribution_without_metadata_is_a_candidate_like_any_other(site: Site) -> None:
    for name in ("alpha", "beta"):
        site.backend(name)
        (site.folder / f"acme_{name}-1.0.dist-info" / "METADATA").unlink()
    assert [(record.state, record.source) for record in site.discover()] == [
        (BackendState.OK, "acme_alpha"),
        (BackendState.OK, "acme_beta"),
    ]


def test_descriptor_under_another_name_than_its_entry_point_is_broken(site: Site) -> None:
    site.backend("beta")
    (site.folder / "acme_beta-1.0.dist-info" / "entry_points.txt").write_text(
        "[hardpoint.backends]\nalpha = acme_beta\n"
    )
    record = only(site.discover())
    assert (record.name, record.state) == ("alpha", BackendState.BROKEN)
    assert "'alpha'" in record.reason
    assert "'beta'" in record.reason


@pytest.mark.parametrize("api", [(API_VERSION + 1, API_VERSION + 4), (API_VERSION + 9, API_VERSION + 9)])
def test_wrong_api_range_is_incompatible_and_not_probed(site: Site, api: tuple[int, int]) -> None:
    site.backend("alpha", api=api, probe="raise AssertionError('probed')")
    record = only(site.discover())
    assert record.state is BackendState.INCOMPATIBLE
    assert f"versions {api[0]} to {api[1]}" in record.reason
    assert f"version {API_VERSION}" in record.reason
    assert record.api == api


def test_api_range_around_this_version_is_accepted(site: Site) -> None:
    site.backend("alpha", api=(1, API_VERSION + 5))
    assert only(site.discover()).state is BackendState.OK


def test_probe_that_raises_is_broken_and_keeps_its_priority(site: Site) -> None:
    site.backend("alpha", probe="raise OSError('driver version mismatch')", priority=5)
    record = only(site.discover())
    assert (record.state, record.priority) == (BackendState.BROKEN, 5)
    assert "its probe raised OSError: driver version mismatch" in record.reason


@pytest.mark.parametrize(
    "result",
    [
        "return None",
        "return ProbeResult()",
        'return ProbeResult((Device("beta", 0, "d", "d"),))',
        'return ProbeResult((Device("alpha", 1, "d", "d"),))',
        'return ProbeResult([Device("alpha", 0, "d", "d")])',
        'return ProbeResult(("alpha device",))',
        "return ProbeResult(7)",
    ],
)
def test_probe_with_an_impossible_result_is_broken(site: Site, result: str) -> None:
    site.backend("alpha", probe=result)
    assert only(site.discover()).state is BackendState.BROKEN


@pytest.mark.parametrize("where", ["probe", "import", "hook"])
def test_hanging_backend_is_broken_within_the_time_limit(site: Site, where: str) -> None:
    wait = "import threading; threading.Event().wait(100)"
    # The thread keeps the import lock of its module, so no other test may use this module's name.
    if where == "probe":
        site.backend("hanging", probe=wait, distribution="acme-hanging-probe")
    else:
        site.install("hanging", wait if where == "import" else _hook(wait), distribution=f"acme-hanging-{where}")
    site.backend("beta")
    start = time.monotonic()
    sound, hanging = site.discover(time_limit=1.0)
    assert time.monotonic() - start < 60
    assert hanging.state is BackendState.BROKEN
    assert "did not return within 1 s" in hanging.reason
    assert sound.state is BackendState.OK


def test_same_name_twice_lists_both_distributions_and_imports_neither(site: Site) -> None:
    for distribution in ("acme-alpha", "other-alpha"):
        site.install("alpha", "raise AssertionError('imported')", distribution=distribution)
    site.backend("beta")
    first, second, sound = site.discover()
    for record in (first, second):
        assert record.state is BackendState.SHADOWED
        assert "acme-alpha 1.0" in record.reason
        assert "other-alpha 1.0" in record.reason
    assert sound.state is BackendState.OK
    assert not {"acme_alpha", "other_alpha"} & set(sys.modules)


@pytest.mark.parametrize("blocked", ["alpha", "acme-alpha", " gamma , alpha,"])
def test_blocked_backend_is_not_imported(site: Site, monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    site.backend("alpha")
    site.backend("beta")
    monkeypatch.setenv("HARDPOINT_BLOCK_BACKENDS", blocked)
    alpha, beta = site.discover()
    assert (alpha.state, beta.state) == (BackendState.BLOCKED, BackendState.OK)
    assert "HARDPOINT_BLOCK_BACKENDS" in alpha.reason
    assert "acme_alpha" not in sys.modules


def test_blocking_one_of_two_distributions_leaves_the_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for distribution in ("acme-alpha", "other-alpha"):
        site.backend("alpha", distribution=distribution)
    monkeypatch.setenv("HARDPOINT_BLOCK_BACKENDS", "acme-alpha")
    assert [record.state for record in site.discover()] == [BackendState.BLOCKED, BackendState.OK]


def test_blocked_name_without_a_candidate_is_known(site: Site) -> None:
    site.backend("alpha")
    assert Registry(site.entry_points(), blocked=["alhpa", "alpha"]).unmatched_blocks == ("alhpa",)


def test_one_plugin_under_two_names_is_broken_under_the_second(site: Site) -> None:
    site.backend("alpha")
    (site.folder / "acme_alpha-1.0.dist-info" / "entry_points.txt").write_text(
        "[hardpoint.backends]\nalpha = acme_alpha\nbeta = acme_alpha\n"
    )
    alpha, beta = site.discover()
    assert (alpha.state, beta.state) == (BackendState.OK, BackendState.BROKEN)
    assert "already registered" in beta.reason


def test_asking_for_one_name_imports_no_other(site: Site) -> None:
    site.backend("alpha")
    site.backend("beta")
    records = Registry(site.entry_points()).records("beta")
    assert [record.name for record in records] == ["beta"]
    assert "acme_alpha" not in sys.modules


def test_each_backend_is_loaded_once_by_concurrent_callers(site: Site) -> None:
    (site.folder / "acme_counter.py").write_text("probes = []\n")
    site.modules.append("acme_counter")
    site.backend(
        "alpha",
        probe='import acme_counter, time; acme_counter.probes.append(1); time.sleep(0.05)\nreturn ProbeResult(reason="none")',
    )
    registry = Registry(site.entry_points())
    results: list[tuple[BackendRecord, ...]] = []
    threads = [threading.Thread(target=lambda: results.append(registry.records())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sys.modules["acme_counter"].probes) == 1
    assert len(results) == 8
    assert len(set(map(id, (records[0] for records in results)))) == 1


@pytest.mark.parametrize("where", ["import", "probe"])
def test_backend_that_discovers_backends_while_it_is_loaded_is_broken_and_does_not_recurse(
    site: Site, where: str
) -> None:
    statement = "import hardpoint.plugins; hardpoint.plugins.discover()"
    if where == "import":
        site.install("alpha", statement)
    else:
        site.backend("alpha", probe=statement)
    record = only(site.discover(time_limit=60))
    assert record.state is BackendState.BROKEN
    assert "while one of them is being loaded" in record.reason


def test_installed_backends_are_looked_for_once_until_a_refresh(site: Site) -> None:
    before = installed(refresh=True)
    site.unavailable("a_backend_of_this_test")
    assert installed() is before
    assert "a_backend_of_this_test" not in [record.name for record in before.records()]
    try:
        after = installed(refresh=True)
        assert [record.state for record in after.records("a_backend_of_this_test")] == [BackendState.UNAVAILABLE]
    finally:
        (site.folder / "acme_a_backend_of_this_test-1.0.dist-info" / "entry_points.txt").unlink()
        installed(refresh=True)


def _hook(body: str) -> str:
    return f'\nimport pluggy\n\n@pluggy.HookimplMarker("hardpoint")\ndef hardpoint_backend():\n    {body}\n'
