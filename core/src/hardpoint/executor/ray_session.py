"""This process's part in a Ray cluster, which is left, or ended where it was started here, when the last executor is."""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass
from typing import Any

from hardpoint.interfaces.errors import ClusterError, ConfigError
from hardpoint.validation import PositiveFloat, Seconds, Validated

_LOCAL = "local"
_lock = threading.Lock()


@dataclass(frozen=True)
class RaySettings(Validated):
    """How ranks run on a Ray cluster.

    Attributes:
        address: of the cluster; None for the one that this process has joined already, else the one in `RAY_ADDRESS`, else one that
            is started on this machine and ends with the engine.
        resource: what Ray calls the devices; None for what the backend says, "CPU" where it runs on the host's processor.
        amount: of the resource, for each rank; below 1 where ranks share a device.
        placement_seconds: for the cluster to have room.
    """

    _called = "a setting for Ray"
    _inside = "ray."

    address: str | None = None
    resource: str | None = None
    amount: PositiveFloat = 1.0
    placement_seconds: Seconds = 60.0

    def __post_init__(self) -> None:
        self._check_types()
        if self.amount > 1 and self.amount != int(self.amount):
            raise ConfigError(
                f"Ray's setting 'amount' is {self.amount!r}", hint="Give a part of one device, or a whole number"
            )


def import_ray() -> Any:
    """Return the module `ray`; raises ConfigError where it is not installed or cannot be imported."""
    # Nothing of an engine's is sent to Ray's makers unless somebody asks for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "the executor 'ray' was asked for, and Ray cannot be imported",
            found=str(error),
            hint="Install it with `pip install 'hardpoint[ray]'`, on every machine of the cluster",
        ) from error


class RaySession:
    """One time that this process is in a cluster.

    Attributes:
        is_ours: it was joined or started here, and is left with the last executor.
    """

    def __init__(self, ray: Any, *, is_ours: bool) -> None:
        self._ray, self.is_ours = ray, is_ours
        self._users = 0

    @classmethod
    def join(cls, ray: Any, settings: RaySettings) -> RaySession:
        """Return the session of the cluster that the settings mean; to be followed by one `leave`. Raises ClusterError."""
        global _current
        with _lock:
            if not ray.is_initialized():
                _init(ray, settings.address or os.environ.get("RAY_ADDRESS") or _LOCAL)
                _current = cls(ray, is_ours=True)
            elif _current is None:
                _current = cls(ray, is_ours=False)
            if not (_current.is_ours and settings.address == _LOCAL):
                _check_address(ray, settings.address)
            _current._users += 1
            return _current

    @property
    def address(self) -> str:
        """Of the cluster, for other processes of this machine that join it."""
        return str(self._ray.get_runtime_context().gcs_address)

    def leave(self) -> None:
        """Leave the cluster, unless another executor is in it or this process had joined it before."""
        global _current
        with _lock:
            self._users -= 1
            if self._users == 0 and _current is self:
                _current = None
                if self.is_ours and self._ray.is_initialized():
                    self._ray.shutdown()


_current: RaySession | None = None


def _init(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ClusterError(
            "an engine cannot reach its ranks through Ray's client server",
            found=address,
            hint="Run the engine on a machine of the cluster, and give the address as host:port",
        )
    is_local = address == _LOCAL
    options = {"include_dashboard": False} if is_local else {}
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "Ray cannot be started on this machine" if is_local else f"the Ray cluster at '{address}' cannot be joined",
            found=str(error) or type(error).__name__,
            hint="Look at `ray status`; RAY_ADDRESS or ray={'address': ...} says where the cluster is",
        ) from error


def _check_address(ray: Any, address: str | None) -> None:
    joined = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", joined):
        raise ClusterError(
            f"the Ray cluster at '{address}' was asked for, and this process has joined another one",
            found=joined,
            hint="Leave it with ray.shutdown(), or leave the address out",
        )
