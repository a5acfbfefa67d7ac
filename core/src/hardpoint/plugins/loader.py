"""Finding backends: every installed candidate is loaded in isolation and gets a record.

A candidate passes these gates in order: not blocked, its name claimed once, imported, registered, no unknown hook,
described, contract version in range, probed. The backend's own code (import, hook, probe) runs in a thread with a time limit, so
that one that hangs, or ends the interpreter with `SystemExit`, costs a record and not the process.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

import pluggy

from hardpoint.interfaces import API_VERSION, BackendDescriptor, Device, ProbeResult
from hardpoint.interfaces.errors import BackendError
from hardpoint.plugins import hookspec
from hardpoint.plugins.guard import TIME_LIMIT, BackendCodeFailed, call_backend, format_traceback, in_backend_code
from hardpoint.plugins.hookspec import ENTRY_POINT_GROUP, PROJECT
from hardpoint.plugins.record import BackendRecord, BackendState

BLOCK_VARIABLE = "HARDPOINT_BLOCK_BACKENDS"
"""Environment variable: comma-separated names of backends, or of their distributions, that are not to be imported."""


class Registry:
    """The candidates among some entry points; each is loaded when it is first asked for, and once.

    Args:
        candidates: entry points; their order does not matter.
        blocked: names of backends or distributions that are not to be imported.
        time_limit: seconds for each call of a backend's own code.
    """

    def __init__(
        self, candidates: Iterable[EntryPoint], blocked: Iterable[str] = (), time_limit: float = TIME_LIMIT
    ) -> None:
        self._candidates = sorted(candidates, key=lambda entry: (entry.name, *_distribution(entry), entry.value))
        self._blocked = frozenset(blocked)
        self._time_limit = time_limit
        self._lock = threading.Lock()  # guards _records and _plugins; held while candidates are loaded
        self._records: dict[int, BackendRecord] = {}
        self._plugins = pluggy.PluginManager(PROJECT)
        self._plugins.add_hookspecs(hookspec)

    @property
    def unmatched_blocks(self) -> tuple[str, ...]:
        """Blocked names that belong to no candidate."""
        known = {name for entry in self._candidates for name in (entry.name, _distribution(entry)[0])}
        return tuple(sorted(self._blocked - known))

    def records(self, name: str | None = None) -> tuple[BackendRecord, ...]:
        """Return the records of all candidates in sorted order, or of those with a name (no other is imported then).

        Raises BackendError when a backend's own import, hook or probe calls it.
        """
        if in_backend_code():
            raise BackendError(
                "backends were asked for while one of them is being loaded",
                hint="A backend's import, hook and probe must not look for backends themselves",
            )
        with self._lock:
            wanted = [index for index, entry in enumerate(self._candidates) if name in (None, entry.name)]
            for index in wanted:
                if index not in self._records:
                    self._records[index] = self._examine(self._candidates[index])
            return tuple(self._records[index] for index in wanted)

    def _examine(self, entry: EntryPoint) -> BackendRecord:
        record = BackendRecord(entry.name, BackendState.OK, "", *_distribution(entry), entry.value)
        try:
            self._admit(entry)
            descriptor = self._describe(entry)
            record = replace(record, descriptor=descriptor)
            _check_api(descriptor)
            result = self._probe(descriptor)
            record = replace(record, devices=result.devices)
            if result.reason:
                raise _Rejected(BackendState.UNAVAILABLE, result.reason)
        except _Rejected as rejection:
            record = replace(record, state=rejection.state, reason=rejection.reason, traceback=rejection.traceback)
        except BackendCodeFailed as failure:
            record = replace(record, state=BackendState.BROKEN, reason=failure.reason, traceback=failure.traceback)
        return record

    def _admit(self, entry: EntryPoint) -> None:
        """Refuse a candidate that is blocked, or whose name another one claims: before its code is imported."""
        if self._is_blocked(entry):
            raise _Rejected(BackendState.BLOCKED, f"{BLOCK_VARIABLE} excludes it")
        claims = [other for other in self._candidates if other.name == entry.name and not self._is_blocked(other)]
        if len(claims) > 1:
            owners = " and ".join(f"{' '.join(_distribution(other))} ({other.value})" for other in claims)
            raise _Rejected(BackendState.SHADOWED, f"its name is claimed by {owners}")

    def _is_blocked(self, entry: EntryPoint) -> bool:
        return entry.name in self._blocked or _distribution(entry)[0] in self._blocked

    def _describe(self, entry: EntryPoint) -> BackendDescriptor:
        plugin = call_backend(f"importing {entry.value}", entry.load, self._time_limit)
        hook = self._register(entry, plugin)
        descriptor = call_backend("its hook hardpoint_backend", hook, self._time_limit)
        if not isinstance(descriptor, BackendDescriptor):
            found = type(descriptor).__name__
            raise _Rejected(BackendState.BROKEN, f"hardpoint_backend() returned {found}, not a BackendDescriptor")
        if descriptor.name != entry.name:
            reason = f"its entry point is named '{entry.name}' and its descriptor '{descriptor.name}'"
            raise _Rejected(BackendState.BROKEN, f"{reason}; the two must agree")
        problems = list(_wrong_types(descriptor))
        if problems:
            raise _Rejected(BackendState.BROKEN, f"its descriptor breaks the contract: {'; '.join(problems)}")
        return descriptor

    def _probe(self, descriptor: BackendDescriptor) -> ProbeResult:
        result = call_backend("its probe", descriptor.probe, self._time_limit)
        if not isinstance(result, ProbeResult):
            raise _Rejected(BackendState.BROKEN, f"its probe returned {type(result).__name__}, not a ProbeResult")
        devices = result.devices
        if not (isinstance(devices, tuple) and all(isinstance(device, Device) for device in devices)):
            raise _Rejected(
                BackendState.BROKEN, f"its probe must give its devices as a tuple of Device, not {devices!r}"
            )
        numbering = [(device.backend, device.index) for device in devices]
        if numbering != [(descriptor.name, index) for index in range(len(numbering))]:
            reason = f"its probe must number devices of '{descriptor.name}' from 0 in order, and returned {numbering}"
            raise _Rejected(BackendState.BROKEN, reason)
        return result

    def _register(self, entry: EntryPoint, plugin: object) -> Callable[[], object]:
        """Register a plugin and return its hook; a plugin that is refused leaves no trace in the manager."""
        label = f"{entry.name} = {entry.value} ({' '.join(_distribution(entry))})"
        try:
            self._plugins.register(plugin, label)
            self._plugins.check_pending()
        except Exception as error:
            if self._plugins.has_plugin(label):
                self._plugins.unregister(name=label)
            reason = f"its hooks cannot be registered: {' '.join(str(error).split())}"
            raise _Rejected(BackendState.BROKEN, reason, format_traceback(error)) from error
        for implementation in self._plugins.hook.hardpoint_backend.get_hookimpls():
            if implementation.plugin is plugin:
                hook: Callable[[], object] = implementation.function
                return hook
        self._plugins.unregister(plugin)
        reason = f"{entry.value} has no function hardpoint_backend marked with pluggy.HookimplMarker('{PROJECT}')"
        raise _Rejected(BackendState.BROKEN, reason)


def discover(
    *, refresh: bool = False, entry_points: Iterable[EntryPoint] | None = None, time_limit: float = TIME_LIMIT
) -> tuple[BackendRecord, ...]:
    """Return one record for every backend that is installed, in the order of names.

    Args:
        refresh: look again instead of returning what was found before (environment and installation may have changed).
        entry_points: look at these instead of the installed ones; nothing is remembered.
        time_limit: seconds for each call of a backend's own code; for explicit entry points.
    """
    if entry_points is not None:
        return Registry(entry_points, _blocked_names(), time_limit).records()
    return installed(refresh=refresh).records()


def installed(*, refresh: bool = False) -> Registry:
    """Return the registry of installed backends; one for the process until `refresh` asks for a new one."""
    global _installed
    with _installed_lock:
        if _installed is None or refresh:
            _installed = Registry(entry_points(group=ENTRY_POINT_GROUP), _blocked_names())
        return _installed


_installed: Registry | None = None
_installed_lock = threading.Lock()


class _Rejected(Exception):
    """A candidate does not pass a gate; carries its record's state, reason and traceback."""

    def __init__(self, state: BackendState, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.state, self.reason, self.traceback = state, reason, traceback


_FIELD_TYPES: dict[str, tuple[type, str]] = {
    "vendor": (str, "text"),
    "priority": (int, "an integer"),
    "accelerator": (bool, "True or False"),
    "cluster_resource": (str, "text"),
    "install_hint": (str, "text"),
}
_FUNCTIONS = ("probe", "capabilities", "allocator", "attention", "worker")
_OPTIONAL_FUNCTIONS = ("platform", "kernels", "graph_runner", "collectives", "driver")


def _wrong_types(descriptor: BackendDescriptor) -> Iterator[str]:
    """Yield what a descriptor's fields are where they are not what the contract says."""
    for name, (kind, words) in _FIELD_TYPES.items():
        if not isinstance(getattr(descriptor, name), kind):
            yield f"{name} is {getattr(descriptor, name)!r}, not {words}"
    for name in (*_FUNCTIONS, *_OPTIONAL_FUNCTIONS):
        value = getattr(descriptor, name)
        is_class = inspect.isclass(value) and name not in ("probe", "capabilities", "driver")
        if is_class:
            yield f"{name} is the class {value.__name__}, not a function that returns it"
        elif not callable(value) and not (value is None and name in _OPTIONAL_FUNCTIONS):
            yield f"{name} is {value!r}, not a function{' or None' if name in _OPTIONAL_FUNCTIONS else ''}"


def _check_api(descriptor: BackendDescriptor) -> None:
    low, high = descriptor.api
    if not low <= API_VERSION <= high:
        reason = f"it implements contract versions {low} to {high}, and this core has version {API_VERSION}"
        raise _Rejected(BackendState.INCOMPATIBLE, reason)


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    """Return the name and the version of what installed an entry point; empty when it is not known."""
    if entry.dist is None:
        return "", ""
    metadata = entry.dist.metadata
    # The type of metadata promises no `get`.
    name, version = (metadata[key] if key in metadata else "" for key in ("Name", "Version"))  # noqa: SIM401
    return name, version


def _blocked_names() -> frozenset[str]:
    names = (name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(","))
    return frozenset(name for name in names if name)
