"""The base of every contract class: what a subclass defines is compared with the contract when the class is defined.

A missing method, a signature that a caller of the contract could not use, or a public method that the contract does not
know (a typing error, most often) is a `ContractError` that names it, at import time and not in the middle of a step. Vendors
may add public methods with the prefix `vendor_`; everything else that is their own begins with an underscore.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from hardpoint.interfaces.errors import ContractError

VENDOR_PREFIX = "vendor_"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Contract(ABC):  # noqa: B024 - the contracts that derive from it have the abstract methods
    """Base class of the contracts. `class X(Contract, contract=True)` declares one; a plain subclass implements it.

    `partial=True` marks a subclass that implements only a part (a shared base for several backends): its methods are
    checked, missing ones are left to its subclasses.
    """

    __contract__: ClassVar[type[Contract] | None] = None

    def __init_subclass__(cls, *, contract: bool = False, partial: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if contract:
            cls.__contract__ = cls
        elif cls.__contract__ is not None:
            _check(cls, cls.__contract__, partial)


def contract_methods(contract: type[Contract]) -> dict[str, Callable[..., Any]]:
    """Return the public methods that `contract` declares, by name, in order of declaration."""
    return {name: value for name, value in vars(contract).items() if not name.startswith("_") and callable(value)}


def optional_methods(contract: type[Contract]) -> frozenset[str]:
    """Return the names of the methods that a subclass may leave out (the contract gives a default)."""
    abstract: frozenset[str] = getattr(contract, "__abstractmethods__", frozenset())
    return frozenset(contract_methods(contract)) - abstract


def _check(cls: type[Contract], contract: type[Contract], partial: bool) -> None:
    known = contract_methods(contract)
    problems = list(_unknown(cls, known))
    for name, declared in known.items():
        found = inspect.getattr_static(cls, name, None)
        if found is None or found is declared:
            if not partial and name not in optional_methods(contract):
                problems.append(f"{name} is missing")
            continue
        problems.extend(f"{name}{reason}" for reason in _incompatible(declared, found))
    if problems:
        raise ContractError(
            f"{cls.__module__}.{cls.__qualname__} does not implement {contract.__name__}",
            found="; ".join(problems),
            hint=f"See hardpoint.interfaces.{contract.__name__} for the methods and their signatures",
        )


def _unknown(cls: type[Contract], known: dict[str, Callable[..., Any]]) -> Iterator[str]:
    for name, value in vars(cls).items():
        is_method = callable(value) or isinstance(value, (staticmethod, classmethod))
        if is_method and not name.startswith(("_", VENDOR_PREFIX)) and name not in known and not inspect.isclass(value):
            yield f"{name} is not in the contract (prefix it with '_' or '{VENDOR_PREFIX}')"


def _incompatible(declared: Callable[..., Any], found: Any) -> Iterator[str]:
    """Yield what makes `found` unusable for a caller who calls it as `declared`."""
    if isinstance(found, (staticmethod, classmethod, property)) or not callable(found):
        yield f" must be a plain method, not {type(found).__name__}"
        return
    want, have = inspect.signature(declared).parameters, inspect.signature(found).parameters
    takes_any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in have.values())
    takes_any_positional = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in have.values())
    have_positional = [p.name for p in have.values() if p.kind in _POSITIONAL]
    want_positional = [p.name for p in want.values() if p.kind in _POSITIONAL]
    for index, name in enumerate(want_positional):
        if index >= len(have_positional):
            if not takes_any_positional:
                yield f" lacks the parameter '{name}'"
        elif have_positional[index] != name and name != "self":
            yield f" has '{have_positional[index]}' where the contract has '{name}'"
    for name, parameter in want.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in have and not takes_any_keyword:
            yield f" lacks the keyword parameter '{name}'"
        if name in have and parameter.default is not parameter.empty and have[name].default is parameter.empty:
            yield f" must give '{name}' a default"
    for name, parameter in have.items():
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if name not in want and parameter.default is parameter.empty:
            yield f" requires '{name}', which no caller passes"
