"""Clauses of the specification: one rule each, with a stable id, and the test that proves it.

A test function is decorated with its clause; its docstring is the rule. Ids are `area.subject.rule@revision`; a rule that changes its
meaning gets a new revision, and an id is never given to another rule. `docs/spec.md` is generated from the table of all clauses.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from hardpoint.interfaces import Capabilities
from hardpoint_conformance.levels import Level

_ID = re.compile(r"[a-z0-9]+(\.[a-z0-9-]+)+@[1-9][0-9]*")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Clause:
    """One rule of the specification.

    Attributes:
        id: `area.subject.rule@revision`.
        level: where it belongs.
        text: the rule.
        capability: the claim that its test proves (see `claims.CLAIMS`); "" for the core, which nobody can leave out.
        refusal: the test runs where the capability is *not* claimed, and proves that it is refused cleanly.
        since: version of the suite that had it first.
        facts: where the rule comes from, for example "allocator fact 17" or "attention test I".
    """

    id: str
    level: Level
    text: str
    capability: str = ""
    refusal: bool = False
    since: str = "0.1.0"
    facts: tuple[str, ...] = ()


def clause(
    id: str, level: Level, *, capability: str = "", refusal: bool = False, since: str = "0.1.0", facts: str = ""
) -> Callable[[_Function], _Function]:
    """Declare the clause that a test function proves; its docstring is the rule.

    Args:
        capability: of the clause; parameters can prove further ones (`proves`).
        facts: sources of the rule, separated by commas.

    Raises:
        ValueError: the id is malformed, or the function has no docstring.
    """
    if not _ID.fullmatch(id):
        raise ValueError(f"a clause's id is area.subject.rule@revision, not {id!r}")

    def declare(function: _Function) -> _Function:
        text = inspect.getdoc(function)
        if not text:
            raise ValueError(f"the test of clause {id} has no docstring, which would be its rule")
        sources = tuple(part.strip() for part in facts.split(",") if part.strip())
        found = Clause(id, level, " ".join(text.split()), capability, refusal, since, sources)
        return pytest.mark.conformance(clause=found)(function)  # type: ignore[no-any-return]

    return declare


def over(**values: Callable[[Capabilities], Iterable[Any]]) -> pytest.MarkDecorator:
    """Return a mark that gives a parameter its values from the backend's claims, for example all head dimensions it has.

    Where there are none the test has one case, with the value None, which is not run: the capability is not claimed then.
    """
    mark: pytest.MarkDecorator = pytest.mark.over(**values)
    return mark


def proves(capability: str) -> pytest.MarkDecorator:
    """Return a mark for `pytest.param`: this case is run where the capability is claimed too, and is part of its proof."""
    mark: pytest.MarkDecorator = pytest.mark.proves(capability)
    return mark
