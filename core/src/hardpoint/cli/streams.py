"""Standard input, output and error as commands find them: there, and able to take any text.

A parent may close them, which Python shows as None, and the next file or socket that is opened would have their number.
"""

from __future__ import annotations

import io
import os
import sys


def take() -> None:
    """The process is the command's own: what is closed leads nowhere; characters that an encoding does not have are replaced.

    Bytes that are no text come as lone surrogates, which a prompt is refused for.
    """
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "replace"),
        ("stderr", "w", "replace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            # `open` takes the lowest free file descriptor, which is the one that this stream has by convention.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # to the end of the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)
