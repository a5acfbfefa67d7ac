"""Known-bad backends: each is a correct one with one fault, and names the clauses that must find it.

`hardpoint conformance selftest` runs the suite against every one of them: a fault that no clause meant for it finds is a fault of
the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hardpoint_conformance.target import Target


@dataclass(frozen=True)
class Mutant:
    """One known-bad backend.

    Attributes:
        name: lower case, words joined by underscores.
        fault: what is wrong, one sentence.
        killed_by: ids of the clauses meant for it; at least one of them must fail.
        apply: puts the fault into a correct target.
    """

    name: str
    fault: str
    killed_by: tuple[str, ...]
    apply: Callable[[Target], Target]


MUTANTS: tuple[Mutant, ...] = ()


def mutant_named(name: str) -> Mutant:
    """Return a known-bad backend; raises KeyError."""
    return {mutant.name: mutant for mutant in MUTANTS}[name]
