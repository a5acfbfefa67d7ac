"""What travels between an engine's process and its client: commands and answers, events, and what a participant of sleeps is told.

Three things are not values. A sleep's callback and participants stay where they are, and their calls come back; the tensors of
`UpdateWeights` are asked for one by one, and follow as frames of their own (`hardpoint.executor.weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import msgspec

from hardpoint.engine.commands import (
    Abort,
    Added,
    CheckStep,
    Command,
    DeclareWeightsValid,
    Died,
    Embed,
    Event,
    Finish,
    Generate,
    GetStats,
    GetStatus,
    GiveUp,
    ListAdapters,
    LoadAdapter,
    Lost,
    Pause,
    RegisterParticipant,
    ReloadWeights,
    ResetPrefixCache,
    Resume,
    ShutDown,
    Sleep,
    StartProfile,
    StepDone,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.info import EngineInfo, EngineStats
from hardpoint.engine.sleep import SleepReport, SleepStatus, WakeReport
from hardpoint.executor.calls import SLEEP, from_message, to_message
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.interfaces.errors import EngineDead, MalformedMessage
from hardpoint.interfaces.worker import ModelInfo

ENGINE = "the engine's process"
CLIENT = "the engine's client"

STARTED = tuple[EngineInfo, ModelInfo]
"""What an engine answers when it is there."""

REPLIES: Mapping[type, Any] = {
    Sleep: SleepReport,
    Pause: SleepReport,
    Wake: WakeReport,
    UpdateWeights: int,
    ReloadWeights: int,
    GetStats: EngineStats,
    GetStatus: SleepStatus,
    StopProfile: list[str],
    CheckStep: bool,
    ListAdapters: list[str],
}
"""Types of answers, where there is one."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class StreamWeights(_Message, frozen=True):
    """`UpdateWeights`, with tensors that are asked for."""


class RegisterRemote(_Message, frozen=True):
    """`RegisterParticipant`, for one of the client's process, which it knows by a number."""

    name: str
    number: int


class SleepRemote(_Message, frozen=True):
    """`Sleep`, whose progress the client wants to know."""

    sleep: Sleep


Sent: TypeAlias = (
    Generate
    | Embed
    | Abort
    | Finish
    | Sleep
    | SleepRemote
    | Pause
    | Resume
    | GiveUp
    | Wake
    | StreamWeights
    | ReloadWeights
    | DeclareWeightsValid
    | GetStats
    | GetStatus
    | ResetPrefixCache
    | RegisterRemote
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | StartProfile
    | StopProfile
    | CheckStep
    | ShutDown
)
"""What is sent for a `Command`."""


def encode_command(command: Command, number: int) -> list[Buffer]:
    """Return a command as a message; raises MalformedMessage.

    Args:
        number: of the participant, where one is registered.
    """
    match command:
        case UpdateWeights():
            return encode(StreamWeights())
        case RegisterParticipant(participant=participant):
            return encode(RegisterRemote(participant.name, number))
        case Sleep(request=request) if request.progress is not None:
            return encode(SleepRemote(msgspec.structs.replace(command, request=replace(request, progress=None))))
    return encode(command)


def decode_command(message: Buffer) -> Sent:
    """Return what was sent for a command; raises MalformedMessage."""
    command: Sent = decode(message, Sent)
    return command


class _LostMessage(_Message, frozen=True):
    keys: tuple[int, ...]
    error: Failure


class _DiedMessage(_Message, frozen=True):
    error: Failure


_EVENTS = list[Added | StepDone | _LostMessage | _DiedMessage]


def encode_events(events: Sequence[Event]) -> list[Buffer]:
    """Return events as a message."""
    return encode([_sent_event(event) for event in events])


def decode_events(message: Buffer) -> list[Event]:
    """Return the events of a message; raises MalformedMessage."""
    return [_event(event) for event in decode(message, _EVENTS)]


def _sent_event(event: Event) -> object:
    match event:
        case Lost(keys=keys, error=error):
            return _LostMessage(keys, describe(error))
        case Died(error=error):
            return _DiedMessage(describe(error))
    return event


def _event(message: Any) -> Event:
    match message:
        case _LostMessage(keys=keys, error=failure):
            return Lost(keys, rebuild(failure, ENGINE))
        case _DiedMessage(error=failure):
            error = rebuild(failure, ENGINE)
            return Died(error if isinstance(error, EngineDead) else EngineDead(str(error)))
    event: Event = message
    return event


def encode_config(config: EngineConfig) -> list[Buffer]:
    """Return an engine's configuration as a message."""
    return encode(asdict(config))


def decode_config(message: Buffer) -> EngineConfig:
    """Return the configuration of a message; raises MalformedMessage, ConfigError."""
    return EngineConfig(**decode(message, dict[str, Any]))


_ARGUMENTS: Mapping[str, Any] = {"before_sleep": SLEEP, "after_wake": frozenset[str], "resident_bytes": None}


def encode_told(number: int, method: str, argument: Any = None) -> list[Buffer]:
    """Return a call of a participant's method as a message."""
    return encode((number, method, to_message(argument)))


def decode_told(message: Buffer) -> tuple[int, str, tuple[Any, ...]]:
    """Return the participant's number, its method and the arguments; raises MalformedMessage."""
    number, method, argument = decode(message, tuple[int, str, msgspec.Raw])
    if method not in _ARGUMENTS:
        raise MalformedMessage(f"'{method}' is not a method of a participant")
    kind = _ARGUMENTS[method]
    return number, method, () if kind is None else (from_message(decode(bytes(argument), kind)),)
