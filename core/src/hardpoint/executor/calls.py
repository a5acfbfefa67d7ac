"""What each call of the worker contract takes and returns, as the contract's own annotations say, and how that is sent.

A call whose types cannot be sent is an error when this module is imported, so that a contract that grows cannot leave the executors
behind. Three things are not values: a sleep plan's callback stays where it is and its calls come back; the tensors of
`write_weights` follow one by one (`hardpoint.executor.weights`); and a step (`submit` and `collect`) has a form of its own
(`hardpoint.executor.steps`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, get_type_hints

import msgspec

from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.allocator import MemoryChange, Policy, SleepPlan, WakePlan
from hardpoint.interfaces.batch import StepInput
from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import ContractError, MalformedMessage
from hardpoint.interfaces.worker import WORKER_CALLS, Worker, WorkerConfig

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class PlanMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sleep"):
    """A sleep plan without its callback, and without tensors, which only a worker adds; fields as in `SleepPlan`.

    Attributes:
        reports: somebody wants to know of its progress.
    """

    policies: dict[str, Policy]
    tags: frozenset[str] | None
    tier: SleepTier
    keep: frozenset[str]
    verify: bool
    live_blocks: list[int] | None
    host_budget: int | None
    disk_directory: str | None
    disk_budget: int | None
    reports: bool = False

    @classmethod
    def of(cls, plan: SleepPlan) -> PlanMessage:
        """Return the part of a plan that can be sent; raises MalformedMessage for one with tensors."""
        if plan.live:
            raise MalformedMessage(
                "a sleep plan with tensors cannot be sent to another process", hint="Name KV blocks in live_blocks"
            )
        values = {name: getattr(plan, name) for name in cls.__struct_fields__ if name != "reports"}
        return cls(**values, reports=plan.progress is not None)

    def plan(self, progress: Progress | None = None) -> SleepPlan:
        """Return the plan; `progress` is called where somebody wants to know."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "reports"}
        return SleepPlan(**values, progress=progress if self.reports else None)


class WakeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wake"):
    """A `WakePlan`."""

    tags: frozenset[str] | None

    def plan(self, progress: Progress | None = None) -> WakePlan:
        """Return the plan; a wake reports no progress."""
        return WakePlan(self.tags)


def _change_message(change: MemoryChange) -> PlanMessage | WakeMessage:
    return PlanMessage.of(change) if isinstance(change, SleepPlan) else WakeMessage(change.tags)


class _Tensor:
    """Stands for torch's tensor, which this module does without."""


_WEIGHTS = Iterable[tuple[str, _Tensor]]
_CHANGE = PlanMessage | WakeMessage

ConfigMessage: type[msgspec.Struct] = msgspec.defstruct(
    "ConfigMessage",
    [
        (f.name, PlanMessage | None if f.name == "prepare_sleep" else get_type_hints(WorkerConfig)[f.name])
        for f in fields(WorkerConfig)
    ],
    frozen=True,
    forbid_unknown_fields=True,
)
"""A `WorkerConfig` with its sleep plan as a message."""


def config_message(config: WorkerConfig) -> msgspec.Struct:
    """Return a worker's configuration as a message."""
    plan = config.prepare_sleep
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return ConfigMessage(**values | {"prepare_sleep": None if plan is None else PlanMessage.of(plan)})


def config_of(message: Any) -> WorkerConfig:
    """Return the configuration of a `ConfigMessage`."""
    config = WorkerConfig(**{f.name: getattr(message, f.name) for f in fields(WorkerConfig)})
    return config if message.prepare_sleep is None else replace(config, prepare_sleep=message.prepare_sleep.plan())


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
        bound = self.signature.bind(*arguments)
        bound.apply_defaults()
        items = [
            _change_message(value) if kind == _CHANGE else value
            for value, kind in zip(bound.args, self.arguments, strict=True)
            if kind is not None
        ]
        return encode(items)

    def decode(self, message: Buffer, progress: Progress | None = None, weights: Iterable[Any] = ()) -> list[Any]:
        """Return the arguments of a message; raises MalformedMessage.

        Args:
            progress: what a plan calls, where the caller wants to know.
            weights: takes the place of the iterable.
        """
        kinds = tuple(kind for kind in self.arguments if kind is not None)
        items = iter(decode(message, tuple[kinds] if kinds else tuple[()]))  # type: ignore[valid-type]
        arguments: list[Any] = []
        for kind in self.arguments:
            value = weights if kind is None else next(items)
            arguments.append(value.plan(progress) if isinstance(value, PlanMessage | WakeMessage) else value)
        return arguments

    def weights_of(self, arguments: Sequence[Any]) -> Iterable[Any]:
        """Return the tensors among a call's arguments."""
        bound = self.signature.bind(*arguments)
        bound.apply_defaults()
        weights: Iterable[Any] = bound.args[self.arguments.index(None)]
        return weights

    def progress_of(self, arguments: Sequence[Any]) -> Progress | None:
        """Return the callback among a call's arguments."""
        return next((item.progress for item in arguments if isinstance(item, SleepPlan)), None)


def _schema(name: str) -> CallSchema:
    method = getattr(Worker, name)
    signature = inspect.signature(method)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    hints = get_type_hints(method, localns={"Tensor": _Tensor})
    result = hints.pop("return")
    schema = CallSchema(name, signature, tuple(_sent(hints[parameter]) for parameter in signature.parameters), result)
    for kind in (*schema.arguments, result):
        if kind is not None:
            try:
                msgspec.msgpack.Decoder(kind)
            except (TypeError, NameError) as error:
                raise ContractError(f"the worker's call '{name}' cannot be sent", found=f"{kind}: {error}") from error
    return schema


def _sent(hint: Any) -> Any:
    if hint == MemoryChange:
        return _CHANGE
    return None if hint == _WEIGHTS else hint


SCHEMAS: Mapping[str, CallSchema] = {name: _schema(name) for name in sorted(WORKER_CALLS - {"submit", "collect"})}
"""Every call of the contract but those of steps."""

assert get_type_hints(Worker.submit)["step"] is StepInput

_COMMUNICATING = frozenset({"start", "load", "profile", "initialize_kv", "warm_up"})


def may_wait_for_others(name: str) -> bool:
    """Whether a rank may wait, within this call, for what another rank does in the same call."""
    return name in _COMMUNICATING
