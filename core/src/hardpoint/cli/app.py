"""The entry point: finds the command, and turns errors into one clear message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hardpoint.cli.commands import COMMANDS, Command
from hardpoint.cli.exit_codes import ExitCode
from hardpoint.interfaces.errors import HardpointError

DEBUG_VARIABLE = "HARDPOINT_DEBUG"
"""Environment variable: with the value 1, errors end with their traceback."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""What a file that output is written to may say; a pipe that nobody reads is typer's to end."""


class LazyCommand(TyperCommand):
    """A command that is known by name and help line, and imported when it is run."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name, help=command.help)
        self._command = command

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Return the context of the real command, which parses and runs from here on."""
        return self._command.load().make_context(*arguments, **options)


class LazyGroup(TyperGroup):
    """The commands of `commands.COMMANDS`, in that order."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names."""
        return [command.name for command in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, or None."""
        return next((LazyCommand(command) for command in COMMANDS if command.name == cmd_name), None)


app = typer.Typer(name="hardpoint", cls=LazyGroup, no_args_is_help=True, add_completion=False)


def _show_version(asked: bool) -> None:
    if asked:
        from hardpoint import __version__

        typer.echo(f"hardpoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run LLMs on any accelerator that has a backend; `hardpoint COMMAND --help` explains a command."""


def run(arguments: Sequence[str] | None) -> None:
    """Run the command line and exit with an `ExitCode`; raises KeyboardInterrupt or exits with its status where Ctrl-C did.

    A `HardpointError` becomes one message on standard error, and so does output for which there is no room; any other exception is a
    defect of ours and keeps its traceback.
    """
    try:
        typer.main.get_command(app).main(args=None if arguments is None else list(arguments), prog_name="hardpoint")
    except HardpointError as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        print_error(error)
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        if error.errno not in _NO_ROOM or os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        print_error(HardpointError("the output cannot be written", found=error.strerror))
        # Python would flush the stream at the end of the process, and fail again.
        sys.stdout = None
        sys.exit(ExitCode.FAILED)


def print_error(error: HardpointError) -> None:
    """Print an error to standard error: the problem, what was found, and what to do, each on its own line."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    problem = error.problem if error.found is None else f"{error.problem}: {error.found}"
    console.print(Text.assemble(("error: ", "bold red"), problem))
    if error.hint is not None:
        console.print(Text.assemble(("hint: ", "bold"), error.hint))
