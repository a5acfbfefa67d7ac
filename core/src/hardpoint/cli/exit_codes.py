"""Exit codes of every command."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """OK: done. FAILED: an error, said on standard error; for `doctor`, something installed has to be fixed. USAGE: wrong
    options. UNUSABLE: for `doctor`, no backend can be used here. INTERRUPTED: by Ctrl-C.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    UNUSABLE = 3
    INTERRUPTED = 130
