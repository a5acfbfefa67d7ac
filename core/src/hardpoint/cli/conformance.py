"""`hardpoint conformance`: the commands of the conformance suite, where that is installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hardpoint.cli import interrupts
from hardpoint.interfaces.errors import ConfigError

if TYPE_CHECKING:
    import typer

SUITE = "hardpoint_conformance"


def __getattr__(name: str) -> typer.Typer:
    """Return `app`, the suite's commands; raises ConfigError where the suite is not installed."""
    if name != "app":
        raise AttributeError(name)
    if find_spec(SUITE) is None:
        raise ConfigError(
            "the conformance suite is not installed", hint="Install it: pip install hardpoint-conformance"
        )
    commands: typer.Typer = importlib.import_module(f"{SUITE}.cli").app
    interrupts.raise_from_here()
    return commands
