"""LoRA adapters of an engine: how a request names one, which are loaded, and which requests wait until a step has room for theirs."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
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
    """An adapter that is loaded by its name; `number` is the workers', None while they do not hold it."""

    path: str
    number: int | None


class Adapters:
    """The adapters of an engine.

    The workers keep the last `max_held` on the host, and read others again when a request comes for them. What they read gets a number of
    its own, by which prefix caches are kept apart.

    Args:
        max_adapters: most in one step, 0 for an engine without adapters.
        max_held: most on the host.
        load, unload: the workers' calls.
    """

    def __init__(
        self, max_adapters: int, max_held: int, load: Callable[[int, str], object], unload: Callable[[int], object]
    ) -> None:
        self._max_adapters, self._max_held = max_adapters, max_held
        self._load, self._unload = load, unload
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._active: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._numbers = 0

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
            raise AdapterInUse(
                f"the adapter '{name}' cannot be unloaded",
                found=f"{count} requests in progress go through it",
                hint="Unload it when they have ended, or abort them",
            )
        del self._known[name]
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
        self._numbers += 1
        self._load(self._numbers, path)
        self._known[name] = _Known(path, self._numbers)
        held = [(one, known) for one, known in self._known.items() if known.number is not None]
        for one, known in held[: max(len(held) - self._max_held, 0)]:
            if one != name and one not in self._active and known.number is not None:
                self._known[one] = _Known(known.path, None)
                self._unload(known.number)
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


def salted(number: int, salt: str) -> str:
    """Return the salt of a request's prefix cache that no request of another adapter has, nor one of none."""
    return f"\0adapter {number}\0{salt}"
