"""Chat templates: Jinja programs that come with a model, and are trusted as little as its weights.

transformers' environment for them (its `render_jinja_template`) keeps a template from the interpreter, but not from computing for ever or
building gigabytes. Here each loop, call, filter and operator counts what it takes, and what would take too much is refused before.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
"""Processor time that a template may take."""
MAX_CHARACTERS = 1 << 27
"""What it may build in all, where an element of a list counts as some."""
_ELEMENT = 64
_LONGEST_ARGUMENT = 1 << 20
"""Largest number that says how long something is to be."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateTakesTooMuch(TemplateError):
    """A template computes for too long, or builds too much."""


class _Budget:
    """What a rendering may still take."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_SECONDS
        self._left = MAX_CHARACTERS

    def need(self, size: int) -> None:
        """Raise TemplateTakesTooMuch where there is no room for so much, or no time."""
        if size > self._left:
            raise TemplateTakesTooMuch(f"it builds more than {MAX_CHARACTERS} characters")
        if time.thread_time() > self._end:
            raise TemplateTakesTooMuch(f"it computes for more than {MAX_SECONDS:g} s")

    def take(self, value: Any) -> Any:
        """Count a value that was built, and return it."""
        size = _size(value, self._left)
        self.need(size)
        self._left -= size
        return value


_budget: ContextVar[_Budget] = ContextVar("hardpoint_template")


def render(
    template: str,
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    **known: Any,
) -> str:
    """Return a conversation as a template writes it; raises what jinja2 raises, among it TemplateTakesTooMuch.

    Args:
        tools: functions that the model may call.
        variables: a caller's own, which hide none of the others.
        known: what every template sees beside the messages: names of special tokens, `add_generation_prompt`.
    """
    given = _budget.set(_Budget())
    try:
        written = [_plain_message(one) for one in messages]
        given_tools = None if tools is None else _plain(list(tools))
        own = {"documents": None, **_plain(variables or {}), **known, "messages": written, "tools": given_tools}
        text: str = _compiled(template).render(own)
        return text
    finally:
        _budget.reset(given)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: without what is None, and reasoning under each of its names (as transformers does)."""
    plain = {str(name): _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return JSON's types alone: other objects have methods that the sandbox knows nothing of."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else f"<{type(value).__name__}>"


def _size(value: Any, most: int) -> int:
    """Return the characters of a value, what is in it included; more than `most` where it has more."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    size, left = 0, [value]
    while left and size <= most:
        one = left.pop()
        size += _ELEMENT
        if isinstance(one, (str, bytes)):
            size += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
    return size


def _growth(name: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Return a bound of what a filter or a method makes of its arguments, where that can be much more than these."""
    if name not in _GROWING:
        return 0
    subject, others = given[0] if given else "", [*given[1:], *named.values()]
    numbers = [abs(one) for one in others if isinstance(one, int)]
    longest = max([1, *(_size(one, MAX_CHARACTERS) for one in others)])
    if max([0, *numbers]) > _LONGEST_ARGUMENT:
        return MAX_CHARACTERS + 1
    if name in _WIDENING:
        return max([0, *numbers]) * longest
    if name in _PER_PLACE:
        return _size(subject, MAX_CHARACTERS) * max([longest, *numbers])
    if name == "replace":
        return str(subject).count(str(others[0])) * longest if len(others) > 1 else 0
    if name == "join":
        # A filter has the parts first, a method the separator.
        parts = [one for one in (subject, *others) if hasattr(type(one), "__len__")]
        texts = [len(one) for one in parts if isinstance(one, str)]
        return sum(_size(one, MAX_CHARACTERS) for one in parts) + max(map(len, parts)) * max([0, *texts])
    text = str(subject)
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    return widths + (text.count("%") + text.count("{")) * max([longest, *numbers])


_WIDENING = frozenset({"center", "ljust", "rjust", "zfill", "round", "batch", "slice", "truncate"})
_PER_PLACE = frozenset({"indent", "expandtabs", "tojson", "wordwrap", "translate", "urlize"})
_GROWING = _WIDENING | _PER_PLACE | {"replace", "join", "format", "format_map"}


class _Counted:
    """What a loop goes through; each round counts."""

    def __init__(self, items: Any) -> None:
        self._items = items if hasattr(type(items), "__len__") else list(_counted(items))

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.need(0)
        yield item


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it makes."""
    # jinja2 gives some filters a context or an environment first.
    first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        budget = _budget.get()
        budget.need(_growth(name, given[first:], named))
        made = function(*given, **named)
        return budget.take(list(_counted(made)) if isinstance(made, Iterator) else made)

    return call


class _Counting(NodeTransformer):
    """Has what is built without a call, a filter or an operator counted: loops, lists, mappings, joined texts, and output."""

    def visit(self, node: nodes.Node, *given: Any, **named: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = _filter(node.iter, "_counted")
        elif isinstance(node, nodes.Output):
            node.nodes = [_filter(_constant(one), "_written") for one in node.nodes]
        elif isinstance(node, nodes.Concat):
            return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")
        is_read = isinstance(node, nodes.Tuple) and node.ctx == "load"
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if is_read or is_slice or isinstance(node, (nodes.List, nodes.Dict)):
            return _filter(node, "_built")
        return node


def _constant(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _filter(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# Filters with a context are not called when a template is compiled, though what they are given be constant.


@pass_context
def _round(context: Context, items: Any) -> _Counted:
    return _Counted(items)


@pass_context
def _built(context: Context, value: Any) -> Any:
    return _budget.get().take(value)


@pass_context
def _written(context: Context, value: Any) -> str:
    budget = _budget.get()
    budget.need(_size(value, MAX_CHARACTERS))
    text: str = budget.take(str(value))
    return text


@pass_context
def _joined(context: Context, parts: list[Any]) -> str:
    return "".join([_written(context, part) for part in parts])


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _generate(self, source: nodes.Template, *given: Any, **named: Any) -> str:
        return super()._generate(_Counting().visit(source), *given, **named)

    def call(self, context: Context, function: Any, /, *given: Any, **named: Any) -> Any:
        budget = _budget.get()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        subject = getattr(method, "__self__", None)
        if isinstance(subject, (str, bytes)):
            budget.need(_growth(method.__name__, (subject, *given), named))
        return budget.take(super().call(context, function, *given, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        sizes = [_size(one, MAX_CHARACTERS) for one in (left, right)]
        if operator == "*":
            counts = [one for one in (left, right) if isinstance(one, int)]
            budget.need(sum(sizes) if len(counts) != 1 else max(0, counts[0]) * max(sizes))
        elif operator == "**":
            budget.need(sizes[0] * abs(right) if isinstance(left, int) and isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, (str, bytes)):
            budget.need(_growth("format", (left, *(right if isinstance(right, tuple) else (right,))), {}))
        else:
            budget.need(sum(sizes))
        return budget.take(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """The tag `generation`, which marks for training what an assistant says; of no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Of public names only, since others lead to the interpreter."""

    def __init__(self, /, *given: Any, **named: Any) -> None:
        super().__init__()
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace has no name that begins with an underscore: {name!r}")
        super().__setitem__(name, value)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.filters = {name: _bounded(name, function) for name, function in made.filters.items()}
    made.filters |= {"_counted": _round, "_built": _built, "_joined": _joined, "_written": _written}
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *given, **named: dict(*given, **named),
        "namespace": _Namespace,
    }
    del made.globals["lipsum"]
    return made


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)
