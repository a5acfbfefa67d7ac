"""Names of arguments that a call does not have: one typed error with what was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from typing import ParamSpec, TypeVar

from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.sampling import PoolingParams, SamplingParams
from hardpoint.validation import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_POOLING_CALLS = ("classify", "embed", "encode", "reward", "score")


def check_names(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequest for a name that is not among the arguments of a call."""
    for name in given:
        if name not in known:
            params = PoolingParams if call in _POOLING_CALLS else SamplingParams
            where = f"Give it with the parameters: {params.__name__}({name}=...)"
            hint = where if name in {field.name for field in fields(params)} else did_you_mean(name, known)
            raise InvalidRequest(f"{name!r} is not an argument of {call}", hint=hint)


def named_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method raise InvalidRequest, instead of Python's TypeError, for arguments by names that it does not have."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(method.__name__, kwargs, known)
        return method(*args, **kwargs)

    return call
