"""Out-of-tree backends for tests: real distributions (metadata, entry points, module) written into a temporary folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from textwrap import dedent, indent

import pytest

from hardpoint.interfaces import API_VERSION
from hardpoint.plugins import ENTRY_POINT_GROUP, BackendRecord, discover

HOOK = """
import pluggy
from hardpoint.interfaces import BackendDescriptor, Capabilities, Device, ProbeResult

def never():
    raise AssertionError("discovery must not resolve a factory")

def probe():
{probe}

@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend():
    return BackendDescriptor(
        name="{name}", vendor="tests", api={api}, probe=probe, capabilities=never, allocator=never, attention=never,
        worker=never, priority={priority}, accelerator={accelerator}, install_hint="{install_hint}",
    )
"""


class Site:
    """A folder on `sys.path` into which distributions are installed.

    `install` takes a module's source as it is; `backend` writes a sound descriptor around the body of a probe.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(self, name: str, source: str, *, distribution: str = "", value: str = "", version: str = "1.0") -> None:
        distribution = distribution or f"acme-{name}"
        module = distribution.replace("-", "_")
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {value or module}\n")
        (self.folder / f"{module}.py").write_text(dedent(source))
        self.modules.append(module)

    def backend(
        self,
        name: str,
        *,
        probe: str = "",
        api: tuple[int, int] = (API_VERSION, API_VERSION),
        priority: int = 0,
        accelerator: bool = True,
        install_hint: str = "",
        distribution: str = "",
    ) -> None:
        body = probe or f'return ProbeResult((Device("{name}", 0, "{name} device", "{name}"),))'
        fields = {"name": name, "api": api, "priority": priority, "accelerator": accelerator}
        source = HOOK.format(**fields, install_hint=install_hint, probe=indent(dedent(body), "    "))
        self.install(name, source, distribution=distribution)

    def unavailable(self, name: str, reason: str = "no driver", **options: object) -> None:
        self.backend(name, probe=f'return ProbeResult(reason="{reason}")', **options)  # type: ignore[arg-type]

    def entry_points(self) -> list[EntryPoint]:
        found = distributions(path=[str(self.folder)])
        return [entry for dist in found for entry in dist.entry_points if entry.group == ENTRY_POINT_GROUP]

    def discover(self, time_limit: float = 60.0) -> tuple[BackendRecord, ...]:
        return discover(entry_points=self.entry_points(), time_limit=time_limit)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for variable in ("HARDPOINT_BACKEND", "HARDPOINT_BLOCK_BACKENDS"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = Site(folder)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)
