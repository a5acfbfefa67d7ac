"""A memory driver between the core and another one: every call is seen, counted, and can be made to fail or to lie.

It works on any driver, in this tree or outside of it, on hardware or a simulation, because it is a table of the same contract
(`include/hardpoint/driver.h`) whose entries call those of the table below.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.memory import DriverFlags, DriverStatus, DriverTable
from hardpoint.memory.driver_table import _capsule

Call = Callable[..., int]
"""An entry without its context and its error: takes the entry's own arguments, returns its status."""

Replacement = Callable[..., int]
"""Takes the entry below (`Call`) and the entry's own arguments, returns a status.

Results are pointers of ctypes (`address[0] = ...`); an exception becomes FAILED, and is kept in `InterposedDriver.errors`.
"""

_NOT_ENTRIES = ("struct_size", "abi", "flags", "context")
_TEXT_SIZE = 320
_kept: list[Any] = []  # a table is valid to the end of the process: pools outlive what made them


@dataclass
class Ledger:
    """What has been taken of a driver and not given back, as its caller saw it.

    Attributes:
        handles, reservations, mappings, registered, streams: sizes by handle or address; streams have none.
        mapped_handles: the handle behind each mapping, by address.
        broken_rules: what the caller did that driver.h forbids, one sentence each.
    """

    handles: dict[int, int] = field(default_factory=dict)
    reservations: dict[int, int] = field(default_factory=dict)
    mappings: dict[int, int] = field(default_factory=dict)
    registered: dict[int, int] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    mapped_handles: dict[int, int] = field(default_factory=dict)
    broken_rules: list[str] = field(default_factory=list)

    def held(self) -> dict[str, int]:
        """Return the counts, and the bytes of memory and of addresses."""
        return {
            "handles": len(self.handles),
            "bytes": sum(self.handles.values()),
            "reservations": len(self.reservations),
            "address_bytes": sum(self.reservations.values()),
            "mappings": len(self.mappings),
            "streams": len(self.streams),
            "registered": len(self.registered),
        }

    def taken(self, entry: str, arguments: tuple[Any, ...]) -> None:
        """Note a call that succeeded."""
        if entry in ("reserve", "create", "stream_create"):
            book = {"reserve": self.reservations, "create": self.handles, "stream_create": self.streams}[entry]
            book[arguments[-1][0]] = 0 if entry == "stream_create" else arguments[0]
        elif entry == "host_register":
            self.registered[arguments[0]] = arguments[1]
        elif entry == "map":
            address, size, handle = arguments
            self._check_map(address, size, handle)
            self.mappings[address], self.mapped_handles[address] = size, handle

    def given_back(self, entry: str, arguments: tuple[Any, ...]) -> Callable[[], None]:
        """Note a call that is about to be made, since what it gives back may be somebody else's before it returns.

        Returns what undoes it, for a call that failed.
        """
        books = {
            "release_address": self.reservations,
            "release": self.handles,
            "unmap": self.mappings,
            "stream_destroy": self.streams,
            "host_unregister": self.registered,
        }
        if entry not in books:
            return lambda: None
        book, key = books[entry], arguments[0]
        size = arguments[1] if len(arguments) > 1 else 0
        known = book.pop(key, None)
        handle = self.mapped_handles.pop(key, None) if entry == "unmap" else None
        if known != size:
            self.broken_rules.append(f"{entry} of {size} bytes where there are {known}")
        if entry == "release" and key in self.mapped_handles.values():
            self.broken_rules.append("release of a handle that is mapped")

        def undo() -> None:
            if known is not None:
                book[key] = known
            if handle is not None:
                self.mapped_handles[key] = handle

        return undo

    def _check_map(self, address: int, size: int, handle: int) -> None:
        if self.handles.get(handle) != size:
            self.broken_rules.append(f"map of {size} bytes of a handle that has {self.handles.get(handle)}")
        if handle in self.mapped_handles.values():
            self.broken_rules.append("map of a handle that is mapped")
        if not any(low <= address and address + size <= low + length for low, length in self.reservations.items()):
            self.broken_rules.append("map outside of every reservation")


@dataclass
class _Fault:
    entry: str | None
    nth: int
    times: int
    status: int | None
    fired: bool = False

    def counts_down(self) -> bool:
        """Count one of its calls; return whether that one fails."""
        self.nth -= 1
        if self.nth > 0 or self.times == 0:
            return False
        self.times -= 1
        self.fired = True
        return True


class InterposedDriver(DriverTable):
    """A driver over another one. May be used from any thread; no exception leaves an entry.

    Attributes:
        base: the driver below.
        ledger: what its callers hold.
        errors: exceptions of replacements.
    """

    def __init__(self, base: DriverTable, replacements: Mapping[str, Replacement] | None = None) -> None:
        """Build the table.

        Args:
            replacements: by name of the entry. `f(call, *arguments) -> status`: `call(*arguments)` is the entry below, bound to
                its context and to the caller's error.

        Raises:
            KeyError: the driver has no such entry.
        """
        self.base = base
        self.ledger = Ledger()
        self.errors: list[Exception] = []
        self._lock = threading.RLock()  # guards the three books and the faults
        self._counts: Counter[str] = Counter()
        self._faults: list[_Fault] = []
        self._callbacks: list[Any] = []
        below: Any = base._table
        table = type(below)()
        ctypes.memmove(ctypes.byref(table), ctypes.byref(below), ctypes.sizeof(table))
        table.struct_size = ctypes.sizeof(table)
        replacements = dict(replacements or {})
        for name, type_ in entry_types(base):
            if getattr(below, name):
                setattr(table, name, self._entry(name, type_, getattr(below, name), replacements.pop(name, None)))
        if replacements:
            raise KeyError(f"the driver has no entry {', '.join(replacements)}")
        self._library = base._library
        self._table = table
        self.module = base.module
        self.flags = DriverFlags(table.flags)
        self.capsule = _capsule(ctypes.pointer(table))
        _kept.append(self)

    @property
    def entries(self) -> tuple[str, ...]:
        """The entries that this driver has."""
        return tuple(name for name, _ in entry_types(self.base) if getattr(self._table, name))

    def calls(self) -> dict[str, int]:
        """Return how often each entry was called, failed calls included; entries that were not are left out."""
        with self._lock:
            return dict(self._counts)

    def fail(self, entry: str | None, nth: int = 1, *, times: int = 1, status: int | None = None) -> None:
        """Make the nth call of an entry from now on (1 = the next) fail without doing anything, in place of earlier faults.

        Args:
            entry: None for the calls of all entries, counted together.
            times: how many calls in a row; -1 for all.
            status: None for OUT_OF_MEMORY from `create`, FAILED from all others.
        """
        with self._lock:
            self._faults = [_Fault(entry, nth, times, status)]

    def fail_calls(self, *numbers: int) -> None:
        """Make these calls from now on (1 = the next, of any entry) fail without doing anything, in place of earlier faults."""
        with self._lock:
            self._faults = [_Fault(None, number, 1, None) for number in numbers]

    def fail_call(self, nth: int) -> bool:
        """Let the driver below fail within an entry: at the nth call that it makes of its vendor's library in this thread, from now on.

        Unlike the faults of `fail`, the entry is called, and has to undo what it did before. 0 lets no call fail.

        Returns:
            False where the driver cannot be asked: it does not export `hp_driver_fail_call` (driver.h).
        """
        ask = getattr(self._library, "hp_driver_fail_call", None)
        if ask is None:
            return False
        ask.restype, ask.argtypes = None, [ctypes.c_int64]
        ask(nth)
        return True

    def disarm(self) -> bool:
        """Let no more calls fail; return whether all that were to fail have, once at least."""
        with self._lock:
            faults, self._faults = self._faults, []
        return bool(faults) and all(fault.fired for fault in faults)

    def held(self) -> dict[str, int]:
        """Return the counts of the ledger."""
        with self._lock:
            return self.ledger.held()

    def broken_rules(self) -> list[str]:
        """Return what callers did against the contract."""
        with self._lock:
            return list(self.ledger.broken_rules)

    def _entry(self, name: str, type_: Any, below: Any, replacement: Replacement | None) -> Any:
        # A callback is given a copy of what c_char_p points to; entries write there.
        argument_types = (ctypes.c_void_p if one is ctypes.c_char_p else one for one in type_._argtypes_)
        own_type = ctypes.CFUNCTYPE(type_._restype_, *argument_types)
        below = ctypes.cast(below, own_type)

        def entry(context: int, *arguments: Any) -> int:
            *own, error = arguments
            try:
                status = self._due(name)
                if status is not None:
                    _report(error, name, f"{DriverStatus(status).name}, injected")
                    return status

                def call(*changed: Any) -> int:
                    result: int = below(context, *changed, error)
                    return result

                with self._lock:
                    undo = self.ledger.given_back(name, tuple(own))
                status = DriverStatus.FAILED
                try:
                    status = call(*own) if replacement is None else int(replacement(call, *own))
                finally:
                    with self._lock:
                        if status == DriverStatus.OK:
                            self.ledger.taken(name, tuple(own))
                        else:
                            undo()
                if status != DriverStatus.OK and not error.contents.call:
                    _report(error, name, "failed in a replacement")
                return status
            except Exception as raised:  # an entry never throws
                with self._lock:
                    self.errors.append(raised)
                _report(error, name, repr(raised))
                return int(DriverStatus.FAILED)

        callback = own_type(entry)
        self._callbacks.append(callback)
        return ctypes.cast(callback, type_)

    def _due(self, name: str) -> int | None:
        """Count a call; return the status that it is to fail with."""
        with self._lock:
            self._counts[name] += 1
            due = [fault for fault in self._faults if fault.entry in (None, name) and fault.counts_down()]
            if not due:
                return None
            memory = DriverStatus.OUT_OF_MEMORY if name == "create" else DriverStatus.FAILED
            return int(memory if due[0].status is None else due[0].status)


def entry_types(driver: DriverTable) -> Iterator[tuple[str, Any]]:
    """Yield name and type of the entries of a driver's table."""
    for name, type_, *_ in type(driver._table)._fields_:
        if name not in _NOT_ENTRIES:
            yield name, type_


def _report(error: Any, call: str, text: str) -> None:
    error.contents.code = -1
    error.contents.call = call.encode()
    error.contents.text = text.encode(errors="replace")[: _TEXT_SIZE - 1]
