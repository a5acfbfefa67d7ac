"""Known-bad backends: each is a correct one with one fault, and names the clauses that must find it.

`hardpoint conformance selftest` runs the suite against every one of them: a fault that no clause meant for it finds is a fault of
the suite. A module for each part of a backend has the faults of that part; nothing here is used when a backend is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from hardpoint_conformance.target import Target


@dataclass(frozen=True)
class Mutant:
    """One known-bad backend.

    Attributes:
        name: lower case, words joined by underscores.
        fault: what is wrong, one sentence.
        killed_by: ids of the clauses meant for it; at least one of them must fail.
        apply: puts the fault into a correct target.
        harmless: there is no fault, and none of these clauses may fail: a control of how mutants are made.
    """

    name: str
    fault: str
    killed_by: tuple[str, ...]
    apply: Callable[[Target], Target]
    harmless: bool = False


@cache
def mutants() -> tuple[Mutant, ...]:
    """Return all known-bad backends, by part, in the order of what they build on."""
    from hardpoint_conformance.mutants import (
        attention,
        graphs,
        in_flight,
        kernels,
        memory,
        narrow,
        packaging,
        ranks,
        transactions,
        worker,
    )

    parts = (packaging, memory, narrow, attention, kernels, worker, in_flight, transactions, ranks, graphs)
    return tuple(mutant for part in parts for mutant in part.MUTANTS)


def mutant_named(name: str) -> Mutant:
    """Return a known-bad backend; raises KeyError."""
    return {mutant.name: mutant for mutant in mutants()}[name]
