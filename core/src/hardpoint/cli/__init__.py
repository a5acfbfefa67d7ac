"""The command line, `hardpoint`: one module for each command, listed in `commands.COMMANDS` and imported when it is run.

A command's module turns options into calls of the engine (or of discovery) and results into text or JSON; it computes nothing
itself. Nothing imports this package.
"""

from hardpoint.cli.app import main

__all__ = ["main"]
