"""The table of commands. To add one: write its module beside this one and list it here.

A command is a function with typer's annotations (its docstring is its help), or a `typer.Typer` where it has commands of its own.
Its module is imported when the command is run and at no other time, so `hardpoint --help` and light commands stay fast.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer

from hardpoint.cli.collection import nothing_collected


@dataclass(frozen=True)
class Command:
    """One command of `hardpoint`.

    Attributes:
        name: as the user writes it.
        module: where it lives.
        attribute: the function or `typer.Typer` in that module.
        help: one line for `hardpoint --help`.
    """

    name: str
    module: str
    attribute: str
    help: str

    def load(self) -> Any:
        """Import the command's module and return typer's command object."""
        with nothing_collected():
            found = getattr(importlib.import_module(self.module), self.attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        app = typer.Typer(add_completion=False)
        app.command(self.name)(found)
        return typer.main.get_command(app)


COMMANDS = (
    Command("generate", "hardpoint.cli.generate", "generate", "Complete prompts."),
    Command("chat", "hardpoint.cli.chat", "chat", "Talk with a model."),
    Command("serve", "hardpoint.cli.serve", "serve", "Serve models over HTTP."),
    Command("bench", "hardpoint.cli.bench", "app", "Measure throughput and latency of an engine or a server."),
    Command("sleep-demo", "hardpoint.cli.sleep_demo", "sleep_demo", "Put an engine to sleep and wake it, measured."),
    Command("models", "hardpoint.cli.models", "models", "Show which models can be run."),
    Command("doctor", "hardpoint.cli.doctor", "doctor", "Show backends, devices and what is wrong with them."),
    Command("conformance", "hardpoint.cli.conformance", "app", "Prove a backend with the conformance suite."),
)
