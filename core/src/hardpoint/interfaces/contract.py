"""The base of every contract class: what a subclass defines is compared with the contract when the class is defined.

A missing method, a signature that a caller of the contract could not use, or a public method or property that the contract does
not know (a typing error, most often) is a `ContractError` that names it, at import time and not in the middle of a step. Vendors
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
    checked, missing ones are left to its subclasses. `beside` names public methods that such a base has beyond the contract.
    """

    __contract__: ClassVar[type[Contract] | None] = None
    __beside__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(
        cls, *, contract: bool = False, partial: bool = False, beside: frozenset[str] = frozenset(), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.__beside__ = cls.__beside__ | beside
        if contract:
            cls.__contract__ = cls
        else:
            _check(cls, partial)


def contract_methods(contract: type[Contract]) -> dict[str, Callable[..., Any]]:
    """Return the public methods that `contract` declares, by name, in order of declaration."""
    return {name: value for name, value in vars(contract).items() if not name.startswith("_") and callable(value)}


def optional_methods(contract: type[Contract]) -> frozenset[str]:
    """Return the names of the methods that a subclass may leave out (the contract gives a default)."""
    abstract: frozenset[str] = getattr(contract, "__abstractmethods__", frozenset())
    return frozenset(contract_methods(contract)) - abstract


def _check(cls: type[Contract], partial: bool) -> None:
    """Compare a class with every contract that it derives from; raises ContractError that names all differences."""
    contracts = [base for base in cls.__mro__ if vars(base).get("__contract__") is base]
    problems: list[str] = []
    for contract in contracts:
        for name, declared in contract_methods(contract).items():
            found = inspect.getattr_static(cls, name, None)
            if found is not None and found is not declared:
                problems.extend(f"{name}{reason}" for reason in _incompatible(declared, found))
            if not partial and (found is None or getattr(found, "__isabstractmethod__", False)):
                problems.append(f"{name} is missing")
    known = frozenset(name for contract in contracts for name in contract_methods(contract))
    if contracts:
        problems[:0] = _unknown(cls, known | cls.__beside__)
    if problems:
        names = " and ".join(contract.__name__ for contract in contracts)
        raise ContractError(
            f"{cls.__module__}.{cls.__qualname__} does not implement {names}",
            found="; ".join(problems),
            hint="See hardpoint.interfaces for the methods and their signatures",
        )


def _unknown(cls: type[Contract], known: frozenset[str]) -> Iterator[str]:
    for name, value in vars(cls).items():
        is_member = callable(value) or hasattr(value, "__get__")
        if is_member and not name.startswith(("_", VENDOR_PREFIX)) and name not in known and not inspect.isclass(value):
            yield f"{name} is not in the contract (prefix it with '_' or '{VENDOR_PREFIX}')"


def _incompatible(declared: Callable[..., Any], found: Any) -> Iterator[str]:
    """Yield what makes `found` unusable for a caller who passes `declared`'s parameters, by position or by name."""
    if isinstance(found, (staticmethod, classmethod, property)) or not callable(found):
        yield f" must be a plain method, not {type(found).__name__}"
        return
    try:
        have = inspect.signature(found).parameters
    except (TypeError, ValueError):
        yield " has no signature that can be read (wrap the native function in a method)"
        return
    if inspect.iscoroutinefunction(found) != inspect.iscoroutinefunction(declared):
        yield f" must {'not ' if inspect.iscoroutinefunction(found) else ''}be a coroutine"
    want = inspect.signature(declared).parameters
    kinds = {parameter.kind for parameter in have.values()}
    takes_any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    takes_anything = takes_any_keyword and inspect.Parameter.VAR_POSITIONAL in kinds
    have_positional = [p.name for p in have.values() if p.kind in _POSITIONAL]
    want_positional = [p.name for p in want.values() if p.kind in _POSITIONAL]
    for index, name in enumerate(want_positional):
        if index >= len(have_positional):
            if not takes_anything:
                yield f" lacks the parameter '{name}'"
        elif index > 0 and have_positional[index] != name:
            yield f" has '{have_positional[index]}' where the contract has '{name}'"
    for name, parameter in list(want.items())[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in have and not takes_any_keyword:
            yield f" lacks the keyword parameter '{name}'"
        if name in have:
            yield from _differs(name, parameter, have[name])
    for name, parameter in have.items():
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if name not in want and parameter.default is parameter.empty and name != next(iter(have)):
            yield f" requires '{name}', which no caller passes"


def _differs(name: str, want: inspect.Parameter, have: inspect.Parameter) -> Iterator[str]:
    if have.kind is inspect.Parameter.POSITIONAL_ONLY and want.kind is not inspect.Parameter.POSITIONAL_ONLY:
        yield f" must take '{name}' by name too"
    if want.default is want.empty:
        return
    if have.default is have.empty:
        yield f" must give '{name}' a default"
    elif have.default != want.default:
        yield f" gives '{name}' the default {have.default!r} where the contract has {want.default!r}"
