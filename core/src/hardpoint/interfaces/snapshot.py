"""The contract as plain data, so that a change of it is seen: `python -m hardpoint.interfaces.snapshot [--compare FILE | --write FILE]`.

The repository keeps one snapshot; a test compares it with the code. `--compare` with the snapshot of another release
tells a vendor what changed between the two. `--write` refuses to replace a snapshot of the same version by a different one, since
a contract that others implement changes only together with `API_VERSION`; `--same-version` overrides that for a version that
has not been published.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from hardpoint import interfaces
from hardpoint.interfaces.backend import API_VERSION
from hardpoint.interfaces.contract import Contract, contract_methods, optional_methods


def snapshot() -> dict[str, Any]:
    """Return everything that the contract exports, by name: contracts, values, enumerations, errors, functions, constants."""
    exported = {name: getattr(interfaces, name) for name in interfaces.__all__ if name != "errors"}
    errors = {
        name: {"bases": [base.__name__ for base in value.__bases__], "init": str(inspect.signature(value.__init__))}
        for name, value in sorted(vars(interfaces.errors).items())
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    return {
        "api_version": API_VERSION,
        "exports": {name: _describe(value) for name, value in sorted(exported.items())},
        "errors": errors,
    }


def to_text(data: dict[str, Any]) -> str:
    """Return a snapshot as the text that is kept in a file."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return a unified diff from one snapshot to another; empty when they agree."""
    old_lines, new_lines = to_text(old).splitlines(), to_text(new).splitlines()
    lines = difflib.unified_diff(old_lines, new_lines, "recorded contract", "this contract", lineterm="", n=2)
    return "\n".join(lines)


def _describe(value: Any) -> Any:
    if inspect.isclass(value) and issubclass(value, Contract):
        optional = optional_methods(value)
        return {
            f"{name}{' (optional)' if name in optional else ''}": str(inspect.signature(method))
            for name, method in contract_methods(value).items()
        }
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {member.name: member.value for member in value}
    if inspect.isclass(value) and is_dataclass(value):
        return {"fields": {f.name: _field(f) for f in fields(value)}, "members": _members(value)}
    if inspect.isfunction(value):
        return str(inspect.signature(value))
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, UnionType):
        return {"union": [member.__name__ for member in value.__args__]}
    raise TypeError(f"the snapshot cannot describe {value!r}; teach it, or do not export it from hardpoint.interfaces")


def _field(field: Field[Any]) -> str:
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    if field.default is not MISSING:
        return f"{kind} = {field.default!r}"
    if field.default_factory is not MISSING:
        return f"{kind} = <factory>"
    return kind


def _members(value: type) -> dict[str, str]:
    """Return the public methods and properties of a class."""
    members: dict[str, str] = {}
    for name, member in sorted(vars(value).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property) and member.fget is not None:
            members[name] = f"property{inspect.signature(member.fget)}"
        elif isinstance(member, (classmethod, staticmethod)):
            members[name] = f"{type(member).__name__}{inspect.signature(member.__func__)}"
        elif inspect.isfunction(member):
            members[name] = str(inspect.signature(member))
    return members


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, compare or write the snapshot; returns 1 when a comparison finds a difference or a write is refused."""
    parser = argparse.ArgumentParser(prog="python -m hardpoint.interfaces.snapshot", description="The contract as data")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--compare", type=Path, metavar="FILE", help="show what changed since this snapshot")
    group.add_argument("--write", type=Path, metavar="FILE", help="keep the snapshot in this file")
    parser.add_argument("--same-version", action="store_true", help="let --write change an unpublished version")
    options = parser.parse_args(arguments)
    current = snapshot()
    file: Path | None = options.compare or options.write
    if file is None:
        sys.stdout.write(to_text(current))
        return 0
    recorded: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    changes = difference(recorded, current) if recorded else ""
    if changes:
        print(changes)
    if options.compare:
        return 1 if changes else 0
    if changes and recorded["api_version"] == API_VERSION and not options.same_version:
        print(f"not written: the contract differs and API_VERSION is still {API_VERSION}", file=sys.stderr)
        return 1
    file.write_text(to_text(current), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
