"""`hardpoint doctor` and the frame of the command line, run as users run them: in a process, over installed packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from hardpoint.interfaces import API_VERSION
from tests.warm_processes import run_warm

BACKEND = """
import pluggy
from hardpoint.interfaces import BackendDescriptor, Capabilities, Device, ProbeResult
from hardpoint.interfaces.errors import CapabilityRefused

def probe():
    {probe}

@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend():
    return BackendDescriptor(
        name="{name}", vendor="Acme", api={api}, probe=probe, capabilities=lambda device: {capabilities}, allocator={allocator},
        attention=never, worker=never, priority={priority},
    )

def never():
    raise CapabilityRefused("a part was asked for", ["it is not there"])
"""
BLOCKED = ",".join(entry.dist.name for entry in entry_points(group="hardpoint.backends") if entry.dist is not None)
FOUND = 'return ProbeResult((Device("{name}", 0, "Acme One", "xpu:0", 3 << 30, "7.1", True, {{"quirks": "none"}}),))'


class Machine:
    """A folder with distributions, and `hardpoint` run with it on the path; backends of this environment are blocked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}

    def install(
        self,
        name: str,
        probe: str = FOUND,
        *,
        api: tuple[int, int] = (API_VERSION, API_VERSION),
        priority: int = 5,
        source: str = "",
        capabilities: str = "Capabilities.none()",
        allocator: str = "never",
    ) -> None:
        info = self.folder / f"acme_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hardpoint.backends]\n{name} = acme_{name}\n")
        fields = {"name": name, "api": api, "priority": priority, "capabilities": capabilities, "allocator": allocator}
        text = source or BACKEND.format(probe=probe.format(name=name), **fields)
        (self.folder / f"acme_{name}.py").write_text(dedent(text))

    def run(self, *arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HARDPOINT_")}
        path = os.pathsep.join([str(self.folder), *filter(None, [environment.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": path, "HARDPOINT_BLOCK_BACKENDS": BLOCKED, "NO_COLOR": "1", "COLUMNS": "200"}
        command = [sys.executable, *(["-c", program] if program else ["-P", "-m", "hardpoint.cli"]), *arguments]
        # What a light command imports, programs show.
        return run_warm(command, env=environment | self.environment)

    def report(self, *arguments: str) -> Any:
        ended = self.run("doctor", "--json", *arguments)
        report = json.loads(ended.stdout)
        assert report["exit_code"] == ended.returncode
        return report


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def backend(report: Any, name: str) -> Any:
    (found,) = (record for record in report["backends"] if record["name"] == name)
    return found


def test_usable_backend_is_reported_with_device_and_capabilities(machine: Machine) -> None:
    machine.install("alpha")
    report = machine.report()
    assert (report["schema"], report["api"], report["exit_code"]) == (1, API_VERSION, 0)
    assert report["choice"] == {"backend": "alpha", "device": 0, "notice": "", "error": None}
    alpha = backend(report, "alpha")
    assert (alpha["state"], alpha["distribution"], alpha["version"]) == ("ok", "acme-alpha", "1.0")
    assert alpha["api"] == [API_VERSION, API_VERSION]
    assert (alpha["entry_point"], alpha["priority"], alpha["vendor"]) == ("acme_alpha", 5, "Acme")
    (device,) = alpha["devices"]
    assert (device["name"], device["total_memory"], device["driver_version"]) == ("Acme One", 3 << 30, "7.1")
    assert (device["simulated"], device["properties"]) == (True, {"quirks": "none"})
    assert device["capabilities"]["attention"]["dtypes"] == []
    assert device["capabilities_error"] == ""


def test_text_shows_the_same_and_labels_a_simulated_device(machine: Machine) -> None:
    machine.install("alpha")
    machine.install("beta", 'return ProbeResult(reason="no libbeta is installed")', priority=9)
    ended = machine.run("doctor")
    assert ended.returncode == 0
    for text in ("Acme One (simulated)", "3.0 GiB", "7.1", "quirks", "no libbeta is installed", "using alpha instead"):
        assert text in ended.stdout


CLAIMS = """
from dataclasses import replace
from hardpoint.interfaces import DType, GraphLevel, IntSet

def claims(device):
    none = Capabilities.none()
    half = frozenset({DType.FLOAT16})
    attention = replace(
        none.attention, dtypes=half, kv_dtypes={DType.FLOAT16: half | {DType.FLOAT8_E4M3}}, graph_level=GraphLevel.UNIFORM_DECODE
    )
    notes = ("attention: the kernels of Acme, since others are not installed", "ranks: not verified on hardware")
    return replace(none, attention=attention, collectives=("acl", "gloo"), notes=notes)
"""


def test_choices_are_shown_with_their_reasons(machine: Machine) -> None:
    fields = {
        "name": "alpha",
        "api": (API_VERSION, API_VERSION),
        "priority": 5,
        "capabilities": "claims(device)",
        "allocator": "never",
    }
    machine.install("alpha", source=BACKEND.format(probe=FOUND.format(name="alpha"), **fields) + CLAIMS)
    lines = [line.split(None, 1) for line in machine.run("doctor").stdout.splitlines()]
    shown = {line[0]: line[1].strip() for line in lines if len(line) == 2}
    assert shown["graphs"] == "uniform decode"
    assert shown["collectives"] == "acl, gloo"
    assert shown["KV"] == "dtypes        float8_e4m3fn with float16"
    assert shown["notes"] == "attention: the kernels of Acme, since others are not installed"
    assert shown["ranks:"] == "not verified on hardware"
    (device,) = machine.report()["backends"][0]["devices"]
    assert device["capabilities"]["collectives"] == ["acl", "gloo"]
    assert device["capabilities"]["attention"]["graph_level"] == "uniform_decode"
    assert len(device["capabilities"]["notes"]) == 2


def test_backend_in_need_of_repair_ends_with_1_and_its_traceback(machine: Machine) -> None:
    machine.install("alpha")
    machine.install("beta", source="import a_module_that_is_not_there")
    report = machine.report()
    assert report["exit_code"] == 1
    assert "a_module_that_is_not_there" in str(backend(report, "beta")["traceback"])
    assert backend(report, "alpha")["state"] == "ok"
    assert report["choice"]["error"]["type"] == "BackendBroken"
    assert "Traceback" in machine.run("doctor").stdout


def test_incompatible_backend_ends_with_1(machine: Machine) -> None:
    machine.install("alpha", api=(API_VERSION + 1, API_VERSION + 2))
    assert machine.report()["exit_code"] == 1


def test_ambiguous_choice_ends_with_1_and_lists_the_backends(machine: Machine) -> None:
    machine.install("alpha")
    machine.install("beta")
    report = machine.report()
    assert report["exit_code"] == 1
    assert report["choice"]["error"]["type"] == "AmbiguousBackend"


def test_environment_that_names_no_usable_backend_ends_with_1(machine: Machine) -> None:
    machine.install("alpha")
    machine.environment["HARDPOINT_BACKEND"] = "delta"
    report = machine.report()
    assert (report["exit_code"], report["environment"]["HARDPOINT_BACKEND"]) == (1, "delta")
    assert report["choice"]["error"]["type"] == "BackendNotFound"


def test_nothing_usable_ends_with_3(machine: Machine) -> None:
    machine.install("alpha", 'return ProbeResult(reason="no libalpha is installed")')
    report = machine.report()
    assert report["exit_code"] == 3
    assert report["choice"]["error"]["type"] == "BackendUnavailable"


def test_named_backend_is_looked_at_alone(machine: Machine) -> None:
    machine.install("alpha")
    machine.install("beta", source="1 / 0")
    machine.install("gamma", 'return ProbeResult(reason="no libgamma is installed")')
    for name, code in (("alpha", 0), ("beta", 1), ("gamma", 3)):
        report = machine.report("--backend", name, "--no-classes")
        assert [record["name"] for record in report["backends"]] == [name]
        assert report["exit_code"] == code


CLASS = """
from hardpoint.interfaces import DeviceAllocator

def allocator():
    class Memory(DeviceAllocator, partial={partial}):
        {body}
    return Memory
"""


@pytest.mark.parametrize(
    ("partial", "body", "texts"),
    [
        (
            False,
            "def free_all(self): ...",
            ("Memory does not implement", "free_all is not in the contract", "stats is missing"),
        ),
        (True, "def memory_info(self, unit): ...", ("memory_info requires 'unit', which no caller passes",)),
        (True, "pass", ("allocator gives Memory, which leaves out",)),
        (True, "import a_module_that_is_not_there", ("its allocator raised ModuleNotFoundError",)),
        (
            True,
            "import os; os.abort()",
            (f"the process that imported its classes ended with status {-signal.SIGABRT}",),
        ),
    ],
    ids=["other-methods", "other-parameters", "abstract", "import", "abort"],
)
def test_class_that_breaks_the_contract_is_told(
    machine: Machine, partial: bool, body: str, texts: tuple[str, ...]
) -> None:
    fields = {"name": "alpha", "api": (API_VERSION, API_VERSION), "priority": 5, "allocator": "allocator"}
    text = BACKEND.format(probe=FOUND.format(name="alpha"), capabilities="Capabilities.none()", **fields)
    machine.install("alpha", source=text + CLASS.format(partial=partial, body=body))
    report = machine.report("--backend", "alpha")
    alpha = backend(report, "alpha")
    assert (report["exit_code"], alpha["state"]) == (1, "broken")
    assert all(text in alpha["reason"] for text in texts), alpha["reason"]
    assert report["choice"]["error"]["type"] == "BackendBroken"


def test_classes_are_imported_on_request(machine: Machine) -> None:
    machine.install("alpha")
    assert machine.report()["exit_code"] == 0
    alpha = backend(machine.report("--classes"), "alpha")
    assert (alpha["state"], alpha["reason"].count("is refused although its devices can be used")) == ("broken", 3)


def test_unknown_backend_and_unknown_option_end_with_2(machine: Machine) -> None:
    machine.install("alpha")
    ended = machine.run("doctor", "--backend", "delta")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "delta" in ended.stderr
    assert "alpha" in ended.stderr
    assert machine.run("doctor", "--no-such-option").returncode == 2
    assert machine.run("no-such-command").returncode == 2


def test_capabilities_that_raise_do_not_end_the_report(machine: Machine) -> None:
    machine.install("alpha", capabilities="1 / 0")
    (device,) = backend(machine.report(), "alpha")["devices"]
    assert device["capabilities"] is None
    assert "ZeroDivisionError" in device["capabilities_error"]
    assert machine.run("doctor").returncode == 0


def test_blocked_name_without_a_backend_is_mentioned(machine: Machine) -> None:
    machine.install("alpha")
    machine.environment["HARDPOINT_BLOCK_BACKENDS"] = f"{BLOCKED},alhpa"
    assert "alhpa" in machine.report()["unmatched_blocks"]
    assert "alhpa" in machine.run("doctor").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--json"], ["doctor", "--help"]])
def test_light_commands_import_neither_torch_nor_transformers(machine: Machine, arguments: list[str]) -> None:
    program = """
import sys
from hardpoint.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "transformers"} & set(sys.modules)
    assert not heavy, heavy
"""
    machine.install("alpha")
    ended = machine.run(*arguments, program=program)
    assert ended.returncode == 0, ended.stderr


def test_error_of_a_command_is_one_message_and_1(machine: Machine) -> None:
    ended = machine.run(
        program=COMMAND_THAT.format("raise ConfigError('blocks of 0 tokens', found='[0]', hint='Use 16')")
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: blocks of 0 tokens: [0]\nhint: Use 16\n"


def test_error_keeps_its_traceback_for_developers(machine: Machine) -> None:
    machine.environment["HARDPOINT_DEBUG"] = "1"
    ended = machine.run(program=COMMAND_THAT.format("raise ConfigError('blocks of 0 tokens')"))
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


COMMAND_THAT = """
import sys, types
from hardpoint.cli import app, commands, main
from hardpoint.interfaces.errors import ConfigError

def act():
    {}

sys.modules["acme_command"] = module = types.ModuleType("acme_command")
module.act = act
app.COMMANDS = (commands.Command("act", "acme_command", "act", "Act."),)
main(["act"])
"""


def test_command_with_commands_of_its_own_is_a_group(machine: Machine) -> None:
    program = """
import sys, types, typer
from hardpoint.cli import app, commands, main

group = typer.Typer()
group.command("one")(lambda: print("first"))
group.command("two")(lambda: print("second"))
sys.modules["acme_command"] = module = types.ModuleType("acme_command")
module.group = group
app.COMMANDS = (commands.Command("count", "acme_command", "group", "Count."),)
main(["count", "two"])
"""
    ended = machine.run(program=program)
    assert (ended.returncode, ended.stdout) == (0, "second\n"), ended.stderr


ALLOCATOR = """
import pluggy
from hardpoint.interfaces import API_VERSION, BackendDescriptor, Capabilities, Device, MemoryInfo, ProbeResult

class Allocator:
    def __init__(self, device):
        {start}
    def memory_info(self):
        return MemoryInfo(1 << 30, 3 << 30, ("stale_pages",))

@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend():
    device = Device("alpha", 0, "Acme One", "xpu:0", 3 << 30, "7.1", True)
    return BackendDescriptor(
        name="alpha", vendor="Acme", api=(API_VERSION, API_VERSION), probe=lambda: ProbeResult((device,), {reason!r}),
        capabilities=lambda device: Capabilities.none(), allocator=lambda: Allocator, attention=print, worker=print,
    )
"""


def test_devices_are_started_only_on_request(machine: Machine, tmp_path: Path) -> None:
    started = tmp_path / "started"
    machine.install("alpha", source=ALLOCATOR.format(start=f"open({str(started)!r}, 'x')", reason=""))
    (device,) = backend(machine.report(), "alpha")["devices"]
    assert (device["memory"], device["memory_error"]) == (None, "")
    assert not started.exists()
    (device,) = backend(machine.report("--memory"), "alpha")["devices"]
    assert device["memory"] == {"free": 1 << 30, "total": 3 << 30, "quirks": ["stale_pages"]}
    started.unlink()
    text = machine.run("doctor", "--memory").stdout
    assert "1.0 GiB free of 3.0 GiB" in text
    assert "stale_pages" in text


def test_memory_of_a_device_without_a_worker_is_shown_too(machine: Machine) -> None:
    machine.install("alpha", source=ALLOCATOR.format(start="print('noise')", reason="it has no worker"))
    alpha = backend(machine.report("--memory"), "alpha")
    assert alpha["state"] == "unavailable"
    assert alpha["devices"][0]["memory"]["total"] == 3 << 30


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("raise OSError('no power')", "its allocator raised OSError: no power"),
        ("import os; os.abort()", f"the process that started the device ended with status {-signal.SIGABRT}"),
    ],
)
def test_device_that_does_not_start_costs_its_memory_alone(machine: Machine, start: str, reason: str) -> None:
    machine.install("alpha", source=ALLOCATOR.format(start=start, reason=""))
    report = machine.report("--memory")
    (device,) = backend(report, "alpha")["devices"]
    assert (device["memory"], report["exit_code"]) == (None, 0)
    assert device["memory_error"].startswith(reason)
    assert reason in machine.run("doctor", "--memory").stdout
