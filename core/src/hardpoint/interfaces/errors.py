"""Typed errors of the contract and the engine.

Every error says what was asked or wrong (`problem`), what was found, and what to do (`hint`); `str(error)` joins the three.
Each class also derives from the built-in exception that a caller would expect (`ValueError` for bad input, `MemoryError`
for memory, ...), so that ordinary Python code handles it without importing this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self


def _told(cause: BaseException) -> str:
    """Return an error's class and text; who waits for it is to learn of it also where its text cannot be made."""
    try:
        return f"{type(cause).__name__}: {cause}"
    except Exception as error:
        return f"{type(cause).__name__}, whose text cannot be made ({type(error).__name__})"


class HardpointError(Exception):
    """Base of all errors that Hardpoint raises on purpose.

    Args:
        problem: what was asked and could not be done, one sentence without a final stop.
        found: what was found instead.
        hint: what the reader can do about it.

    Attributes:
        rank: the rank that raised it, where there are several.
    """

    rank: int | None = None

    def __init__(self, problem: str, *, found: str | None = None, hint: str | None = None) -> None:
        self.problem = _printable(problem)
        self.found = None if found is None else _printable(found)
        self.hint = hint
        text = self.problem if self.found is None else f"{self.problem}: {self.found}"
        super().__init__(text if hint is None else f"{text}. {hint}")

    def name_rank(self, rank: int) -> None:
        """Say which rank raised it."""
        self.rank = rank
        self.args = (f"rank {rank}: {self}",)

    @classmethod
    def restore(cls, args: tuple[object, ...], state: Mapping[str, object]) -> Self:
        """Return an error as it was in another process, or before it was pickled.

        Args:
            args, state: its `args` and attributes.
        """
        # Not cls.__new__: where a built-in exception comes later among the bases, that finds one that refuses the class.
        base: Any = cls.__base__
        error: Self = base.__new__(cls)
        error.args = args
        error.__dict__.update(state)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).restore, (self.args, self.__dict__)


def _printable(text: str) -> str:
    """Return a text with lone surrogates, which no terminal takes, as escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class ConfigError(HardpointError, ValueError):
    """An engine or command-line setting is impossible or contradicts another."""


class ContractError(HardpointError, TypeError):
    """A class does not implement the contract that it derives from; raised when the class is defined."""


# Requests


class InvalidRequest(HardpointError, ValueError):
    """A request cannot be served as asked; the engine goes on with the others."""


class EmptyPrompt(InvalidRequest):
    """A prompt has no tokens."""


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for one new token within the context length."""


class TokenOutOfRange(InvalidRequest):
    """A token id is negative or not in the vocabulary."""


class InvalidSamplingParams(InvalidRequest):
    """A sampling parameter is out of range or contradicts another."""


class InvalidAdapter(InvalidRequest):
    """A LoRA adapter is damaged, made for another model, or of a kind that is not computed; nothing was loaded."""


class AdapterNotFound(InvalidAdapter, LookupError):
    """A request or command names an adapter that is not loaded."""


class AdapterInUse(InvalidAdapter):
    """An adapter is to be unloaded or replaced while requests go through it; nothing was done."""


class RequestNeverFits(InvalidRequest):
    """A request needs more KV blocks or sequence slots than the engine has in all (`NEVER`)."""


# Models


class ModelError(HardpointError):
    """A model cannot be loaded."""


class ModelNotFound(ModelError, FileNotFoundError):
    """Neither a known model name nor a folder or file with a model."""


class UnsupportedArchitecture(ModelError):
    """The model's architecture is not one that Hardpoint can run; the hint lists those that are."""


class CorruptWeights(ModelError, ValueError):
    """A weight file is damaged, truncated, or lacks a tensor that the configuration asks for."""


# Backends


class BackendError(HardpointError):
    """No backend can be used as asked."""


class BackendNotFound(BackendError, LookupError):
    """A backend was asked for by a name that no candidate has; the hint lists the records."""


class BackendUnavailable(BackendError):
    """The backend is sound, but its driver or device is not here."""


class BackendIncompatible(BackendError):
    """The backend declares a range of contract versions that does not include this core's."""


class BackendBroken(BackendError):
    """The backend failed to import, to register, or to probe."""


class AmbiguousBackend(BackendError):
    """Several available backends share the highest priority, or several distributions claim the same name."""


class CapabilityRefused(BackendError, ValueError):
    """A backend cannot do what was asked; raised before any work is done.

    Attributes:
        reasons: one sentence for each thing that the backend cannot do.
    """

    def __init__(self, problem: str, reasons: Sequence[str], *, hint: str | None = None) -> None:
        self.reasons = tuple(reasons)
        super().__init__(problem, found="; ".join(self.reasons), hint=hint)


# Steps


class InvalidBatch(HardpointError, ValueError):
    """A step's arrays or tensors contradict the plan, the cache or each other; nothing was written."""


# Memory


class MemoryFault(HardpointError):
    """A memory operation failed; the state before it still holds."""


class DeviceOutOfMemory(MemoryFault, MemoryError):
    """The device has not enough free memory."""


class HostBudgetExceeded(MemoryFault, MemoryError):
    """A backup would need more host or disk space than its budget allows or than there is; refused before any call."""


class DriverError(MemoryFault):
    """A driver call failed.

    Attributes:
        call: name of the vendor's call.
        code: the vendor's status code.
        text: the vendor's message.
    """

    def __init__(self, call: str, code: int, text: str, *, hint: str | None = None) -> None:
        self.call, self.code, self.text = call, code, text
        # A driver's own refusal has no code of the vendor's, and 0 would read as success.
        super().__init__(
            f"driver call {call} failed", found=f"status {code} ({text})" if code else text or "no text", hint=hint
        )


class UnknownTag(MemoryFault, ValueError):
    """A sleep or wake names a tag that no allocation has; nothing was done."""


class MemoryAsleep(MemoryFault):
    """Memory was used or allocated in a way that is not legal while it is asleep."""


class MemoryBusy(MemoryFault):
    """A sleep, wake or resize was started from within another one (its progress callback, a rebuild callback, a participant), or the engine
    was called from within a step (a function of `logits_processors`)."""


class InvalidTransaction(MemoryFault, ValueError):
    """A transaction's number is not positive, not above all earlier ones, or not that of the one that is open; nothing was done."""


class RanksDiverged(MemoryFault):
    """A sleep or wake was not ended on every rank: they may differ in what is asleep, and nothing is served before a wake of all.

    Attributes:
        ranks: those that did not end it.
    """

    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: str, failures: Mapping[int, BaseException]) -> RanksDiverged:
        """Return the error for `what` (as "commit a sleep"), in which the ranks failed so."""
        error = cls(
            f"cannot {what} on every rank",
            found="; ".join(f"rank {rank}: {_told(cause)}" for rank, cause in failures.items()),
            hint="wake_up() brings the ranks together where they can be; otherwise make a new engine",
        )
        error.ranks = tuple(failures)
        return error


class InvalidAllocation(MemoryFault, ValueError):
    """An allocation of no bytes, or of a size that cannot be addressed."""


class ForeignMemory(MemoryFault, ValueError):
    """A tensor or address that this allocator did not hand out, or that it has taken back."""


class BackupCorrupt(MemoryFault):
    """A backup or a source file does not hold the bytes that were saved; it is never served. `discard_backup` is the way out."""


class BackupStale(MemoryFault):
    """A kept backup differs from the device's bytes: something wrote to memory whose writers were to call `mark_written`."""


class ForkedProcess(MemoryFault):
    """Device memory was used in a forked child; device drivers do not survive a fork, use spawn."""


class WeightsMissing(MemoryFault):
    """The weights were discarded and have not been loaded again; the engine refuses to generate."""


class SleepRefused(MemoryFault, ValueError):
    """A sleep or wake was asked for in a way that is not possible or contradicts the present state; nothing was done."""


class KVCacheTooSmall(MemoryFault, ValueError):
    """The memory left for the KV cache does not hold one block, or not one request of the context length.

    Attributes:
        enough: the share of the device's memory that would hold it; None where all of it would not.
        others: what can be done instead of giving it that much.
    """

    enough: float | None = None
    others: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, problem: str, found: str | None, others: Sequence[str], last: str, enough: float | None
    ) -> KVCacheTooSmall:
        """Return the error whose hint is all of `others`, or else `last`, which gives it enough where that is possible."""
        hint = ", or ".join([*others, last])
        error = cls(problem, found=found, hint=hint[0].upper() + hint[1:])
        error.enough, error.others = enough, tuple(others)
        return error


# Engine


class WorkerError(HardpointError, RuntimeError):
    """A worker failed in a step; the sequences of that step are ended, all others go on."""

    @classmethod
    def of(cls, cause: Exception) -> WorkerError:
        """Return the error for a step that `cause` ended; chain it to `cause`."""
        return cls("the worker failed in a step", found=_told(cause), hint="The cause is chained")


class OutputFailed(WorkerError):
    """The driver rank could not make a step's output (sampling, pooling) after its last exchange with the other ranks in that step.

    The ranks are in step with one another: the sequences of this step are ended, and the next step can follow.
    """

    @classmethod
    def after(cls, cause: Exception) -> OutputFailed:
        """Return the error for what `cause` ended; chain it to `cause`."""
        if isinstance(cause, HardpointError):
            return cls(cause.problem, found=cause.found, hint=cause.hint)
        return cls("the step's output could not be made", found=_told(cause))


class NothingToCollect(WorkerError):
    """A step's output was asked for, and no step was submitted whose output was not collected yet."""


class GraphCaptureFailed(HardpointError, RuntimeError):
    """A decode step could not be captured into a device graph; the cause is chained."""


class EngineAsleep(HardpointError, RuntimeError):
    """A request or step came while the engine is asleep; `wake_up` it first."""


class InboxFull(HardpointError, RuntimeError):
    """More commands wait for the engine than its inbox holds; nothing was done, and a later try may succeed."""


class RequestTimeout(HardpointError, TimeoutError):
    """A request was not served to its end within the time that it was given; it was aborted."""


class DrainTimeout(HardpointError, TimeoutError):
    """Requests were still running when the time to drain them was over; the engine did not sleep and runs on."""


class ParticipantError(HardpointError, RuntimeError):
    """A participant of sleep failed; the cause is chained.

    Attributes:
        participant: its name.
    """

    participant: str = ""

    @classmethod
    def of(cls, participant: str, what: str, cause: Exception) -> ParticipantError:
        """Return the error for `participant`, which failed in its method `what`."""
        error = cls(f"the participant '{participant}' failed in {what}", found=_told(cause))
        error.participant = participant
        return error


class EngineDead(HardpointError, RuntimeError):
    """The engine failed and cannot serve any more; build a new one."""


class RankFailed(EngineDead):
    """A rank ended, was stopped, or does not answer; all ranks were ended, and the engine cannot serve any more.

    Attributes:
        ended: what became of it: an exit code, a signal, a time limit, or an error that left it out of step with the others.
        output: its traceback, or the last lines that it wrote.
    """

    ended: str = ""
    output: str = ""

    @classmethod
    def of(cls, rank: int, ended: str, output: str = "", hint: str = "") -> RankFailed:
        """Return the error for what became of `rank`; `output` is what it left behind."""
        found = f"{ended}; it left:\n{output.rstrip()}\n" if output.strip() else ended
        error = cls(f"rank {rank} failed", found=found, hint=hint or "All ranks were ended; make a new engine")
        error.rank, error.ended, error.output = rank, ended, output
        return error


class ClusterError(HardpointError, RuntimeError):
    """A cluster of machines cannot be joined, has no room for the ranks, or its machines do not fit together."""


class MalformedMessage(HardpointError, ValueError):
    """A message between processes is of no known kind, out of sequence, or not what its kind says; or a value cannot be sent."""
