"""What a failed test says to who has to mend it: what was expected, what was found, where, and what is known to cause it.

A test's assertions are written for their readers; here they are put into words once, for all of them: what was expected is the text of
the assertion, what was found are the values that pytest saw in it, or its message.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

from hardpoint_conformance.clauses import Clause

_SUITE = Path(__file__).parent
_NOT_THE_BACKENDS = ("hardpoint", "hardpoint_conformance", "_pytest", "pluggy", "pytest", "torch", "numpy")
_LONGEST = 400
_MOST_CAUSES = 4
_FAILED = (AssertionError, pytest.fail.Exception)


def told(error: pytest.ExceptionInfo[BaseException], clause: Clause) -> str:
    """Return lines with what was expected and found, the place in the backend where there is one, and likely causes."""
    first = error.value.__context__
    # Giving back what a test has taken fails, too, where the backend is in disorder: what came first says more.
    if isinstance(first, _FAILED) and not error.value.__suppress_context__:
        after = f" (and after it: {_found(error.value, None)})"
        error = pytest.ExceptionInfo.from_exception(first)
    else:
        after = ""
    statement, source = _statement(error)
    lines = {
        "expected": _expected(error.value, statement, source) or "what the rule says",
        "got": _found(error.value, statement).replace(" Use -v to get more diff", "") + after,
        "raised in": _place(error),
        "likely cause": likely_causes(clause.id),
    }
    return "\n".join(f"{name}: {text}" for name, text in lines.items() if text)


@cache
def likely_causes(clause: str) -> str:
    """Return the faults by which known-bad backends fail a clause; where none is known, where else to look."""
    from hardpoint_conformance.mutants import mutants

    faults = [mutant.fault.rstrip(".") for mutant in mutants() if clause in mutant.killed_by and not mutant.harmless]
    if not faults:
        return "none is known beforehand; the rule, and the difference between expected and got, say what is not kept"
    return "; or ".join(faults[:_MOST_CAUSES]) + "."


def _statement(error: pytest.ExceptionInfo[BaseException]) -> tuple[ast.stmt | None, str]:
    """Return the innermost statement of the suite that was running, and the text of its file."""
    entry = next((entry for entry in reversed(error.traceback) if _SUITE in Path(entry.path).parents), None)
    if entry is None:
        return None, ""
    source = Path(entry.path).read_text("utf-8")
    statements = _around(ast.parse(_alone(entry.frame.code.raw, source)), entry.lineno + 1)
    return max(statements, key=lambda node: node.lineno, default=None), source


def _alone(code: CodeType, source: str) -> str:
    """Return a file's text without what is around a function, which stays at its place: the whole takes many times as long to parse."""
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
    if not is_function:
        return source
    before = code.co_firstlineno - 1
    lines = source.splitlines(keepends=True)[before:]
    first = "if True:\n" if lines[0][0].isspace() else ""
    return "\n" * (before - bool(first)) + first + "".join(inspect.getblock(lines))


def _around(node: ast.AST, line: int) -> Iterator[ast.stmt]:
    """Yield the statements in a node that have a line."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", line) <= line <= getattr(child, "end_lineno", line):
            if isinstance(child, ast.stmt):
                yield child
            yield from _around(child, line)


def _expected(error: BaseException, statement: ast.stmt | None, source: str) -> str:
    if isinstance(statement, ast.Assert):
        return "" if isinstance(statement.test, ast.Name) else _text(statement.test, source)
    if isinstance(statement, ast.With) and str(error).startswith("DID NOT RAISE"):
        wanted = ", ".join(_text(item.context_expr, source) for item in statement.items)
        return f"an error, {wanted}, of: {'; '.join(_text(node, source) for node in statement.body)}"
    if statement is None or isinstance(statement, ast.Raise) or isinstance(error, _FAILED):
        return ""
    return f"no error of: {_text(statement, source)}"


def _found(value: BaseException, statement: ast.stmt | None) -> str:
    text = str(value).strip()
    if text.startswith("DID NOT RAISE"):
        return f"no error was raised ({text.removeprefix('DID NOT RAISE ')} was due)"
    if not isinstance(value, _FAILED):
        return _shortened(f"{type(value).__name__}: {text}")
    message, _, values = text.partition("assert ") if isinstance(statement, ast.Assert) else (text, "", "")
    is_truth = values.startswith(("False", "None", "not "))
    if not is_truth:
        values = values.partition("\n +")[0]  # where the values come from is in what was expected
    # Where an assertion is about a value's truth, that it is false says nothing beside a message.
    parts = (_shortened(message), "" if message and is_truth else _shortened(values))
    return ": ".join(filter(None, parts)) or "it does not hold"


def _place(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the innermost line of the backend's own Python, in which an error came up; "" where there is none."""
    for entry in reversed(error.traceback):
        package = str(entry.frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_BACKENDS and _is_a_backends(path := Path(entry.path)):
            return f"{path.parent.name}/{path.name}:{entry.lineno + 1}, in {entry.name}"
    return ""


def _is_a_backends(path: Path) -> bool:
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    is_library = any(root in path.parents for root in libraries) and "site-packages" not in path.parts
    return path.exists() and not is_library and _SUITE not in path.parents


def _text(node: ast.expr | ast.stmt, source: str) -> str:
    # As `ast.get_source_segment`, which goes through the whole source letter by letter; columns are bytes.
    lines = source.encode().split(b"\n")[node.lineno - 1 : node.end_lineno]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return _shortened(b"\n".join(lines).decode())


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _LONGEST, placeholder=" [...]")
