"""LoRA adapters of an engine: how a request names one, which are loaded, and which requests wait until a step has room for theirs."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from hardpoint.interfaces.errors import AdapterInUse, AdapterNotFound, InvalidAdapter, InvalidRequest
from hardpoint.validation import Validated, shown


@dataclass(frozen=True, slots=True)
class LoRARequest(Validated):
    """An adapter for a request; it is loaded with the first one. Raises InvalidRequest.

    Attributes:
        lora_name: by which the engine knows it. One name is one folder until it is unloaded.
        lora_int_id: vLLM's number of the adapter, from 1; the name alone says which adapter it is.
        lora_path: folder of the adapter, as PEFT writes it.
    """

    _error = InvalidRequest

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        self._check_types()
        if not self.lora_name or not self.lora_path or self.lora_int_id < 1:
            raise InvalidRequest(
                "an adapter has a name, a number from 1 and a folder",
                found=f"lora_name={shown(self.lora_name)}, lora_int_id={self.lora_int_id}, lora_path={shown(self.lora_path)}",
            )

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id


AdapterName: TypeAlias = "LoRARequest | str | None"
"""How a request says which adapter it goes through: one to be loaded where it is not, the name of one that is loaded, or none."""


def adapter_name(lora_request: AdapterName, load: Callable[[LoRARequest], object]) -> str:
    """Return the name of a request's adapter, empty for none, which `load` has loaded where it must be; raises InvalidRequest."""
    if lora_request is None or isinstance(lora_request, str):
        if lora_request == "":
            raise InvalidRequest("an adapter has a name", found="an empty text", hint="Leave lora_request out")
        return lora_request or ""
    if not isinstance(lora_request, LoRARequest):
        raise InvalidRequest(
            "lora_request must be a LoRARequest or the name of an adapter that is loaded", found=shown(lora_request)
        )
    load(lora_request)
    return lora_request.lora_name


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter that is loaded by its name; `number` is the workers', None while they do not hold it, in so many bytes."""

    path: str
    number: int | None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """What an engine does with adapters; of several engines of a model, together.

    Attributes:
        loaded: adapters that requests can name.
        held, max_held: those of them that the host holds, and most that it does.
        active, max_active: those of them that requests in progress go through, and most in one step.
        host_bytes: what those held take on the host, of all ranks.
        device_bytes, device_budget: what those active take on the device, of all ranks, and what it has for adapters.
        loads: folders that were read, those of adapters included that had given way to others.
        unloads, evictions: adapters that were forgotten, and those that gave way to others on the host.
        running, waiting: requests in progress, and those that wait for room among the adapters of a step, by the adapter's name.
    """

    loaded: int = 0
    held: int = 0
    max_held: int = 0
    active: int = 0
    max_active: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    device_budget: int = 0
    loads: int = 0
    unloads: int = 0
    evictions: int = 0
    running: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)


class Adapters:
    """The adapters of an engine.

    The workers keep the last `max_held` on the host, and read others again when a request comes for them. What they read gets a number of
    its own, by which prefix caches are kept apart.

    Args:
        max_adapters: most in one step, 0 for an engine without adapters.
        max_held: most on the host.
        load, unload: the workers' calls; the first returns an adapter's bytes on the host.
        slot_bytes: the device's for each of `max_adapters`.
    """

    def __init__(
        self,
        max_adapters: int,
        max_held: int,
        load: Callable[[int, str], int],
        unload: Callable[[int], object],
        slot_bytes: int = 0,
    ) -> None:
        self._max_adapters, self._max_held, self._slot_bytes = max_adapters, max_held, slot_bytes
        self._load, self._unload = load, unload
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._active: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._numbers = self._unloads = self._evictions = 0

    def stats(self) -> AdapterStats:
        """Return counts of now, and since the engine was made."""
        if not self._max_adapters:
            return AdapterStats()
        held = [known for known in self._known.values() if known.number is not None]
        return AdapterStats(
            loaded=len(self._known),
            held=len(held),
            max_held=self._max_held,
            active=len(self._active),
            max_active=self._max_adapters,
            host_bytes=sum(known.nbytes for known in held),
            device_bytes=len(self._active) * self._slot_bytes,
            device_budget=self._max_adapters * self._slot_bytes,
            loads=self._numbers,
            unloads=self._unloads,
            evictions=self._evictions,
            running=dict(self._active),
            waiting=dict(self._waiting),
        )

    @property
    def names(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return sorted(self._known)

    def load(self, name: str, path: str) -> None:
        """Read an adapter and check it; does nothing where it is loaded. Raises InvalidAdapter, AdapterInUse."""
        self._check_enabled()
        known = self._known.get(name)
        if known is not None and known.path == os.path.abspath(path):
            return
        if known is not None:
            raise AdapterInUse(
                f"the adapter '{name}' is loaded from another folder",
                found=f"{known.path}, and {path} is asked for",
                hint="Unload it first, or give the other one another name",
            )
        self._hold(name, os.path.abspath(path))

    def unload(self, name: str) -> None:
        """Forget an adapter; raises AdapterNotFound, AdapterInUse."""
        self._check_enabled()
        known = self._find(name)
        count = self._active[name] + self._waiting[name]
        if count:
            raise in_use(name, count)
        del self._known[name]
        self._unloads += 1
        if known.number is not None:
            self._unload(known.number)

    def has_room(self, name: str) -> bool:
        """Whether a request of this adapter can be in the steps from here on; raises AdapterNotFound."""
        self._check_enabled()
        self._find(name)
        return name in self._active or len(self._active) < self._max_adapters

    def wait(self, name: str) -> None:
        """Count a request that waits for room."""
        self._waiting[name] += 1

    def end_wait(self, name: str) -> None:
        """Count a request that waits no more."""
        self._lower(self._waiting, name)

    def begin(self, name: str) -> int:
        """Count a request in the steps, and return the number of its adapter; raises InvalidAdapter where that cannot be read again."""
        known = self._find(name)
        number = self._hold(name, known.path) if known.number is None else known.number
        self._known.move_to_end(name)
        self._active[name] += 1
        return number

    def end(self, name: str) -> None:
        """Count a request that is in the steps no more."""
        self._lower(self._active, name)

    def _hold(self, name: str, path: str) -> int:
        number = self._numbers + 1
        self._known[name] = _Known(path, number, self._load(number, path))
        self._numbers = number
        self._known.move_to_end(name)
        held = [(one, known.path, known.number) for one, known in self._known.items() if known.number is not None]
        idle = [each for each in held if each[0] != name and each[0] not in self._active]
        for one, known_path, gone in idle[: max(len(held) - self._max_held, 0)]:
            self._known[one] = _Known(known_path, None)
            self._evictions += 1
            self._unload(gone)
        return self._numbers

    def _find(self, name: str) -> _Known:
        known = self._known.get(name)
        if known is None:
            loaded = ", ".join(self.names) or "none"
            raise AdapterNotFound(
                f"there is no adapter '{name}'", found=f"loaded are {loaded}", hint="Load it first, or give its folder"
            )
        return known

    def _check_enabled(self) -> None:
        if not self._max_adapters:
            raise InvalidAdapter(
                "the engine takes no LoRA adapters", found="enable_lora=False", hint="Make it with enable_lora=True"
            )

    @staticmethod
    def _lower(counts: Counter[str], name: str) -> None:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]


def in_use(name: str, count: int) -> AdapterInUse:
    """Return the error of an adapter that so many requests in progress keep from being unloaded."""
    return AdapterInUse(
        f"the adapter '{name}' cannot be unloaded",
        found=f"{count} requests in progress go through it",
        hint="Unload it when they have ended, or abort them",
    )


def salted(number: int, salt: str) -> str:
    """Return the salt of a request's prefix cache that no request of another adapter has, nor one of none."""
    return f"\0adapter {number}\0{salt}"


def adapters_over_engines(stats: Sequence[AdapterStats]) -> AdapterStats:
    """Return what several engines of a model do together."""
    by_name = ("running", "waiting")
    sums = {
        one.name: sum(getattr(each, one.name) for each in stats)
        for one in fields(AdapterStats)
        if one.name not in by_name
    }
    requests = [dict(sum((Counter(getattr(each, name)) for each in stats), Counter())) for name in by_name]
    return AdapterStats(**sums, running=requests[0], waiting=requests[1])
