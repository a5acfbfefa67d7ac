"""Deriving a faulty class from a correct one, and declaring the fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hardpoint.interfaces import Contract
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.target import Target

Methods = Mapping[str, Callable[..., Any]]
MethodsOf = Callable[[Any], Methods]
"""Given the correct class, the methods that replace its own."""


def derived(base: type[Contract], methods: Methods) -> type[Contract]:
    """Return a subclass of `base` in which these methods replace its own."""
    metaclass: Any = type(base)
    made: type[Contract] = metaclass(f"Faulty{base.__name__}", (base,), dict(methods))
    return made


class Faults:
    """The faults of one part of a backend (`attention`, `allocator`, `worker`)."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.mutants: list[Mutant] = []

    def fault(self, sentence: str, *killed_by: str, harmless: bool = False) -> Callable[[MethodsOf], MethodsOf]:
        """Declare a fault by a function that gives the methods with it; the function's name is the mutant's."""

        def declare(methods_of: MethodsOf) -> MethodsOf:
            def apply(target: Target) -> Target:
                @cache
                def factory() -> type[Contract]:
                    base = getattr(target.descriptor, self.part)()
                    return derived(base, methods_of(base))

                return target.with_descriptor(**{self.part: factory})

            self.mutants.append(Mutant(methods_of.__name__, sentence, killed_by, apply, harmless))
            return methods_of

        return declare

    def target_fault(
        self, sentence: str, *killed_by: str, harmless: bool = False
    ) -> Callable[[Callable[[Target], Target]], Callable[[Target], Target]]:
        """Declare a fault by a function of the whole target; the function's name is the mutant's."""

        def declare(apply: Callable[[Target], Target]) -> Callable[[Target], Target]:
            self.mutants.append(Mutant(apply.__name__, sentence, killed_by, apply, harmless))
            return apply

        return declare
