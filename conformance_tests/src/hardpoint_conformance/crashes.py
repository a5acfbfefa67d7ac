"""Where a process was when it crashed, out of what it wrote: the frames of Python, by `faulthandler`, and those of C.

What belongs to the interpreter and to pytest is left out, so that the test's lines and the driver's are what is seen.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

_C_FRAME = re.compile(r"(?P<file>\S*?)\((?P<symbol>[^()+]*)\+?(?P<offset>0x[0-9a-f]+)?\) ?\[0x[0-9a-f]+\]")
_INTERPRETER = re.compile(r"(?:^|/)(python[0-9.]*|libpython[^/]*|libffi[^/]*|_ctypes[^/]*|ld-linux[^/]*)$")
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_PYTHON_FRAME = re.compile(r'  (File "|<)')
_FRAMEWORK = re.compile(r"/(_pytest|pluggy|concurrent/futures)/|/threading\.py")
_MOST_FRAMES = 24
_TOOL_SECONDS = 20
_LONGEST_NAME = 160


def split(text: str) -> tuple[str, str]:
    """Return what a process wrote on standard error without its frames, and the frames with headings; "" where there are none."""
    rest: list[str] = []
    native: list[re.Match[str]] = []
    threads: list[list[str]] = []
    in_thread = False
    for line in text.splitlines():
        found = _C_FRAME.fullmatch(line.strip())
        if found is not None:
            native.append(found)
        elif _THREAD.match(line):
            threads.append([])
            in_thread = True
        elif in_thread and _PYTHON_FRAME.match(line):
            threads[-1].append(line)
        elif not line.startswith(("Fatal Python error:", "Extension modules:")):
            in_thread = False
            rest.append(line)
    parts = [("in C, innermost first", list(_native(native)))]
    parts += [("in Python, innermost first", list(_of_the_test(frames))) for frames in threads]
    shown = "".join(f"\n{title}:\n" + "\n".join(_fewer(lines)) for title, lines in parts if lines)
    return "\n".join(rest), shown


def _fewer(frames: list[str]) -> list[str]:
    """Leave out the middle of many: the innermost say what happened, the outermost are the test's."""
    half = _MOST_FRAMES // 2
    return frames if len(frames) <= _MOST_FRAMES else [*frames[:half], "  ...", *frames[-half:]]


def _of_the_test(frames: Iterable[str]) -> Iterator[str]:
    """Yield the frames of one thread down to pytest's own."""
    for frame in frames:
        if _FRAMEWORK.search(frame):
            return
        yield frame


def _native(frames: Sequence[re.Match[str]]) -> Iterator[str]:
    """Yield the frames of C above and between those of the interpreter, with names where they can be found out."""
    inside = [n for n, frame in enumerate(frames) if _INTERPRETER.search(frame["file"]) and frame["symbol"] != "_start"]
    last = inside[-1] if inside else len(frames)
    for frame in frames[:last]:
        file = frame["file"]
        if _INTERPRETER.search(file):
            continue
        name = _demangled(frame["symbol"]) if frame["symbol"] else _looked_up(file, frame["offset"] or "0x0")
        yield f"  {Path(file).parent.name}/{Path(file).name}: {name}"


def _looked_up(file: str, offset: str) -> str:
    """Return the function at an offset of a file, and its line where the file was built with them; else the offset."""
    if not _has_symbols(file):
        return offset
    name, _, line = _tool("addr2line", "-Cfe", file, offset).partition("\n")
    if not name or name == "??":
        return offset
    return _cut(name) if line.startswith(("??", ":?")) else f"{_cut(name)} ({line})"


@cache
def _has_symbols(file: str) -> bool:
    """Return whether a library has names for all its functions: in a stripped one, `addr2line` names the exported one nearest to any."""
    return bool(_tool("nm", "--defined-only", file))


def _demangled(symbol: str) -> str:
    return _cut(_tool("c++filt", symbol) or symbol)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."


def _tool(*command: str) -> str:
    """Return what a tool of binutils prints; "" where it is not installed or does not work."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
