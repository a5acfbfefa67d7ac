"""What each call of the worker contract takes and returns, as the contract's own annotations say, and how that is sent.

A call whose types cannot be sent is an error when this module is imported, so that a contract that grows cannot leave the executors
behind. Three things are not values: a sleep plan's callback stays where it is and its calls come back; the tensors of
`write_weights` follow one by one (`hardpoint.executor.weights`); and a step (`submit` and `collect`) has a form of its own
(`hardpoint.executor.steps`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, get_type_hints

import msgspec

from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.allocator import MemoryChange, SleepPlan, WakePlan
from hardpoint.interfaces.batch import StepInput
from hardpoint.interfaces.errors import ContractError
from hardpoint.interfaces.worker import WORKER_CALLS, Worker, WorkerConfig

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class _Tensor:
    """Stands for torch's tensor, which this module does without."""


_WEIGHTS = Iterable[tuple[str, _Tensor]]


def _message_type(cls: type, tag: str | None = None, **other: Any) -> Any:
    """Return a struct with the fields of a dataclass, where `other` gives a field another type."""
    hints = get_type_hints(cls, localns={"Tensor": _Tensor}) | other
    fields_of = [(field.name, hints[field.name]) for field in fields(cls)]
    return msgspec.defstruct(f"{cls.__name__}Message", fields_of, tag=tag, frozen=True, forbid_unknown_fields=True)


SLEEP = _message_type(SleepPlan, "sleep", progress=bool)
"""What is sent for a `SleepPlan`: of its callback, whether there is one."""
_WAKE = _message_type(WakePlan, "wake")
CONFIG = _message_type(WorkerConfig, prepare_sleep=SLEEP | None)
"""What is sent for a `WorkerConfig`."""
_SENT_AS: dict[Any, Any] = {MemoryChange: SLEEP | _WAKE, _WEIGHTS: None}


def to_message(value: Any) -> Any:
    """Return what is sent for a plan or a worker's configuration, and others as they are; raises MalformedMessage."""
    if isinstance(value, SleepPlan):
        return SLEEP(**vars(value) | {"progress": value.progress is not None})
    if isinstance(value, WorkerConfig):
        return CONFIG(**vars(value) | {"prepare_sleep": to_message(value.prepare_sleep)})
    return _WAKE(**vars(value)) if isinstance(value, WakePlan) else value


def from_message(message: Any, progress: Progress | None = None) -> Any:
    """Return the value for which a message was sent; `progress` is what a plan calls where the caller wants to know."""
    values = {name: getattr(message, name) for name in getattr(message, "__struct_fields__", ())}
    if isinstance(message, SLEEP):
        return SleepPlan(**values | {"progress": progress if message.progress else None})
    if isinstance(message, CONFIG):
        return WorkerConfig(**values | {"prepare_sleep": from_message(message.prepare_sleep)})
    return WakePlan(**values) if isinstance(message, _WAKE) else message


@dataclass(frozen=True)
class CallSchema:
    """How one call of the contract is sent.

    Attributes:
        arguments: types of the message's items, in the order of the call's parameters; None for those that are not in it.
        result: type of what comes back.
        takes_weights: its argument is an iterable of named tensors, which follow the message.
    """

    name: str
    signature: inspect.Signature
    arguments: tuple[Any, ...]
    result: Any

    @property
    def takes_weights(self) -> bool:
        return None in self.arguments

    def encode(self, arguments: Sequence[Any]) -> list[Buffer]:
        """Return a call's arguments as a message; raises TypeError where the contract has no such call, MalformedMessage."""
        values = zip(self._bound(arguments), self.arguments, strict=True)
        return encode([to_message(value) for value, kind in values if kind is not None])

    def decode(self, message: Buffer, progress: Progress | None = None, weights: Iterable[Any] = ()) -> list[Any]:
        """Return the arguments of a message; raises MalformedMessage.

        Args:
            progress: what a plan calls, where the caller wants to know.
            weights: takes the place of the iterable.
        """
        kinds = tuple(kind for kind in self.arguments if kind is not None)
        items = iter(decode(message, tuple[kinds] if kinds else tuple[()]))  # type: ignore[valid-type]
        return [weights if kind is None else from_message(next(items), progress) for kind in self.arguments]

    def weights_of(self, arguments: Sequence[Any]) -> Iterable[Any]:
        """Return the tensors among a call's arguments."""
        weights: Iterable[Any] = self._bound(arguments)[self.arguments.index(None)]
        return weights

    def progress_of(self, arguments: Sequence[Any]) -> Progress | None:
        """Return the callback among a call's arguments."""
        return next((item.progress for item in arguments if isinstance(item, SleepPlan)), None)

    def _bound(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        bound = self.signature.bind(*arguments)
        bound.apply_defaults()
        return bound.args


def _schema(name: str) -> CallSchema:
    method = getattr(Worker, name)
    signature = inspect.signature(method)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    hints = get_type_hints(method, localns={"Tensor": _Tensor})
    result = hints.pop("return")
    kinds = [hints[parameter] for parameter in signature.parameters]
    schema = CallSchema(name, signature, tuple(_SENT_AS.get(kind, kind) for kind in kinds), result)
    for kind in (*schema.arguments, result):
        if kind is not None:
            try:
                msgspec.msgpack.Decoder(kind)
            except (TypeError, NameError) as error:
                raise ContractError(f"the worker's call '{name}' cannot be sent", found=f"{kind}: {error}") from error
    return schema


SCHEMAS: Mapping[str, CallSchema] = {name: _schema(name) for name in sorted(WORKER_CALLS - {"submit", "collect"})}
"""Every call of the contract but those of steps."""

assert get_type_hints(Worker.submit)["step"] is StepInput

COMMUNICATING = frozenset({"start", "load", "profile", "initialize_kv", "warm_up", "commit"})
"""Calls within which a rank may wait for what another one does in the same call: steps are such, too, and a commit where communicators
sleep."""
