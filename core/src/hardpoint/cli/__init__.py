"""The command line, `hardpoint`: one module for each command, listed in `commands.COMMANDS` and imported when it is run.

A command's module turns options into calls of the engine (or of discovery) and results into text or JSON; it computes nothing
itself. Nothing imports this package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hardpoint.cli import collection, interrupts, streams
from hardpoint.cli.exit_codes import ExitCode


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with an `ExitCode`; Ctrl-C ends it with one line.

    Args:
        arguments: None for those of the process, whose SIGINT is handled here from then on.
    """
    try:
        if arguments is None:
            streams.take()
            interrupts.take()
            collection.take()
        with collection.nothing_collected():
            from hardpoint.cli.app import run

        run(arguments)
    except BaseException as error:
        if not interrupts.came(error):
            raise
        interrupts.tell()
        sys.exit(ExitCode.INTERRUPTED)
    finally:
        interrupts.end()
        collection.keep()


__all__ = ["main"]
