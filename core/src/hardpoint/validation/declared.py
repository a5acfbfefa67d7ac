"""A base for dataclasses whose fields are checked against their annotations when an object is made."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache, reduce
from operator import or_
from types import GenericAlias, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
)
from typing import get_type_hints as type_hints

import msgspec
import numpy as np
from msgspec import Meta

from hardpoint.interfaces.errors import ConfigError, HardpointError

INT32_MAX = 2**31 - 1
FLOAT32_MIN = float(np.finfo(np.float32).tiny)
"""The smallest number above 0 that keeps its precision in float32."""
FLOAT32_MAX = float(np.finfo(np.float32).max)

# Whole numbers reach native code as int32 or int64, and sampling parameters reach the device as float32.
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1, le=INT32_MAX)]
NonNegativeInt: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)]
PositiveFloat: TypeAlias = Annotated[float, Meta(ge=FLOAT32_MIN, le=FLOAT32_MAX)]
NonNegativeFloat: TypeAlias = Annotated[float, Meta(ge=0, le=FLOAT32_MAX)]
Share: TypeAlias = Annotated[float, Meta(ge=FLOAT32_MIN, le=1)]
"""A part of a whole: above 0, at most 1."""
Seconds: TypeAlias = Annotated[float, Meta(ge=FLOAT32_MIN, le=1e9)]
"""A duration above 0 that every timer can count."""
GiB: TypeAlias = Annotated[float, Meta(ge=0, le=2**33)]
"""Sizes of which 64 bits can count the bytes."""
FileName: TypeAlias = Annotated[str, Meta(pattern=r"^[^\x00\ud800-\udfff]*\Z")]
"""A text that can name a file: no NUL, and no surrogate, which UTF-8 does not have."""

_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}
_LISTS = (Sequence, list, frozenset)
_INDEX = re.compile(r"`\$\[(\d+)\]")
_MAX_SHOWN = 200
_set = object.__setattr__


class Validated:
    """Base of frozen dataclasses that are checked when they are made.

    A field accepts what its annotation says: `int`, `float`, `bool`, `str`, `Literal`, enumerations, `Sequence`, `list`, `frozenset`,
    `Mapping`, unions of these, `Annotated` with `msgspec.Meta` for ranges, and other `Validated` classes (or mappings of their
    fields). Nothing is converted by guess: neither "1" nor True is an integer. Numbers and arrays of numpy and torch count as what
    they hold; sequences are kept as tuples.

    A name or value that does not fit is one `_error`, which names the field, says what it accepts and what was found. A subclass with a
    `__post_init__` of its own calls `_check_types` in it.
    """

    __slots__ = ()
    _error: ClassVar[type[HardpointError]] = ConfigError
    _called: ClassVar[str] = "a setting"
    _inside: ClassVar[str] = ""  # of which setting of another class the fields are, with a dot

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuse unknown names, which would be a TypeError of Python's otherwise."""
        cls._check_names(values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_types()

    @classmethod
    def parse(cls, given: Self | Mapping[str, Any] | None) -> Self:
        """Return what a caller passed: an object, a mapping of its fields, or None for the defaults."""
        if isinstance(given, cls):
            return given
        values = cast("Mapping[str, Any]", given or {})
        cls._check_names(values)
        for field in fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
            if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
                raise cls._error(f"{field.name} is missing", found=shown(values))
        return cls(**values)

    @classmethod
    def _check_names(cls, names: Iterable[object], aliases: Iterable[str] = ()) -> None:
        known = _declared(cls).hints  # type: ignore[arg-type]  # mypy takes the objects' __hash__ for the class's
        for name in names:
            if name not in known:
                raise cls._error(f"{name!r} is not {cls._called}", hint=did_you_mean(name, [*known, *aliases]))

    def _check_types(self) -> None:
        declared = _declared(type(self))  # type: ignore[arg-type]
        try:
            checked = msgspec.convert(self, declared.struct, from_attributes=True)
        except Exception:
            checked = self._convert_each(declared)
        for name in declared.hints:
            _set(self, name, getattr(checked, name))
        for name, kind in declared.nested.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                _set(self, name, kind.parse(value))
            elif value is not None and not isinstance(value, kind):
                self._refuse(name, value, f"a mapping or {kind.__name__}")

    def _convert_each(self, declared: _Declared) -> Any:
        """Convert field by field, with values of other libraries made plain; the first that does not fit is refused."""
        values: dict[str, Any] = {}
        for name, kind in declared.kinds.items():
            value = getattr(self, name)
            try:
                value = _plain(value)
                values[name] = msgspec.convert(value, kind)
            except Exception as error:  # msgspec's, or whatever an object of another library raises
                self._refuse(*_misfit(name, value, declared.hints[name], str(error)))
        return declared.struct(**values)

    def _refuse(self, name: str, value: object, accepted: str, hint: str | None = None) -> NoReturn:
        name = self._inside + name
        raise self._error(f"{name} must be {accepted}", found=f"{name}={shown(value)}", hint=hint) from None


class _Declared(NamedTuple):
    """What a class declares.

    Attributes:
        hints: annotation of each field, as written.
        kinds: what msgspec converts each field to; anything for nested classes.
        nested: fields that hold another `Validated` object.
        struct: a msgspec type with all fields, converted in one native call.
    """

    hints: dict[str, Any]
    kinds: dict[str, Any]
    nested: dict[str, type[Validated]]
    struct: type[msgspec.Struct]


@cache
def _declared(cls: type[Validated]) -> _Declared:
    hints = {
        name: kind for name, kind in type_hints(cls, include_extras=True).items() if get_origin(kind) is not ClassVar
    }
    nested = {
        name: part
        for name, kind in hints.items()
        for part in _members(kind)
        if isinstance(part, type) and issubclass(part, Validated)
    }
    kinds = {name: Any if name in nested else _with_tuples(kind) for name, kind in hints.items()}
    return _Declared(hints, kinds, nested, msgspec.defstruct(f"_{cls.__name__}", list(kinds.items())))


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _with_tuples(kind: Any) -> Any:
    """Return the type with tuples for sequences, and anything for functions, which have no type that can be checked."""
    if get_origin(kind) is Sequence:
        return GenericAlias(tuple, (get_args(kind)[0], ...))
    if get_origin(kind) is Callable:
        return Any
    return reduce(or_, map(_with_tuples, parts)) if len(parts := _members(kind)) > 1 else kind


def _plain(value: Any, depth: int = 2) -> Any:
    """Return numbers and arrays of numpy and torch, other sequences and mappings, and paths as Python's own."""
    if hasattr(type(value), "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return float(value)
    if depth and isinstance(value, Mapping):
        return {_plain(key, 0): _plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return [_plain(item, depth - 1) for item in value]
    return value


def _misfit(path: str, value: Any, kind: Any, message: str) -> tuple[str, Any, str, str | None]:
    """Return the innermost place that does not fit, what is there, what would fit, and a hint."""
    for member in _members(kind):
        index = _INDEX.search(message)
        if get_origin(member) in _LISTS and index is not None:
            place = int(index.group(1))
            return _misfit(f"{path}[{place}]", value[place], get_args(member)[0], "")
        if get_origin(member) is Mapping and isinstance(value, dict):
            for key, item in value.items():
                for name, part, wanted in ((f"a key of {path}", key, 0), (f"{path}[{shown(key)}]", item, 1)):
                    if not _fits(part, get_args(member)[wanted]):
                        return _misfit(name, part, get_args(member)[wanted], "")
    return path, value, describe(kind), _hint(value, kind)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except Exception:
        return False
    return True


def describe(kind: Any) -> str:
    """Return in words what a declared type accepts."""
    members = _members(kind)
    if len(members) > 1:
        texts = [describe(member) for member in members]
        return f"{', '.join(texts[:-1])} or {texts[-1]}"
    if kind in _WORDS:
        return _WORDS[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _range(args[0], args[1])
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(repr(member.value) for member in kind)}"
    if origin in _LISTS:
        return f"a list, each of it {describe(args[0])}"
    if origin is Mapping:
        return f"a mapping from {describe(args[0])} to {describe(args[1])}"
    return str(getattr(kind, "__name__", kind))


def _range(kind: type, meta: Meta) -> str:
    low, high = meta.ge, meta.le
    if kind is str:
        return "a text that can name a file (no NUL, no surrogate)"
    if kind is float:
        start = "(0" if low == FLOAT32_MIN else f"[{low:g}"
        end = f"{meta.lt:g})" if meta.lt is not None else "infinity)" if high in (None, FLOAT32_MAX) else f"{high:g}]"
        return f"a number in {start}, {end}"
    return f"an integer of at least {low}" if high == INT32_MAX else f"an integer in {low}..{high}"


def _hint(value: Any, kind: Any) -> str | None:
    """Return what to do about a value that is a slip for a legal one, or within a range but for its storage."""
    for member in _members(kind):
        if get_origin(member) is Annotated and type(value) in (int, float):
            base, meta = get_args(member)
            if base is float and meta.ge == FLOAT32_MIN and 0 < value < FLOAT32_MIN:
                return f"It is stored as float32, so at least {FLOAT32_MIN:.3g}"
            if meta.le in (INT32_MAX, FLOAT32_MAX) and value > meta.le:
                return f"It is stored in 32 bits, so at most {meta.le:.10g}"
            if meta.description is not None:
                return str(meta.description)
        choices = (
            [item.value for item in member]
            if isinstance(member, type) and issubclass(member, Enum)
            else get_args(member)
        )
        if isinstance(value, str) and (
            close := difflib.get_close_matches(value, [c for c in choices if isinstance(c, str)], 1)
        ):
            return f"Did you mean {close[0]!r}?"
    return None


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Return a hint about a name that is not known: the closest one, or all of them."""
    close = difflib.get_close_matches(str(name), known, 1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}"


def shown(value: object) -> str:
    """Return a value as it is shown in an error: its `repr`, shortened."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or an object's own
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
