"""Level 1: random sequences of everything that memory can do, against a model."""

from __future__ import annotations

from hardpoint.interfaces import Capabilities
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.fault_matrix import InterposedTarget
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import driver_of
from hardpoint_conformance.memory_model import run_model
from hardpoint_conformance.target import Target


@proves("memory.sleep.1")
@clause(
    "alloc.model.any-sequence@1",
    Level.MEMORY,
    capability="memory.sleep.2",
    facts="allocator fact 24, allocator fact 26",
)
def test_any_sequence_does_what_the_model_says(target: Target, claims: Capabilities, seed: int, draw: str) -> None:
    """After any sequence of allocating, writing, freeing, resizing, declaring sources, sleep by any plan, partial wake, and a failing
    call here and there, bytes, addresses, books and what the driver holds are what a model of them says."""
    interposed = InterposedTarget(target.name, driver_of(target))
    run_model(interposed, 16, seed, claims.memory)
    interposed.finish()
