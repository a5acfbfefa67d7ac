"""Where ranks meet: an `init_method`, taken apart, and the network that leads there."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from hardpoint.interfaces.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SERVED = "served"
_BACKLOG = 128

_servers: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class RendezvousPoint:
    """An `init_method`, taken apart.

    Attributes:
        group: name of the group; empty where none is given.
        served: somebody serves the address already.
    """

    host: str
    port: int
    group: str = ""
    served: bool = False

    @classmethod
    def parse(cls, init_method: str) -> RendezvousPoint:
        """Read `tcp://host:port[/group][?served]`; raises ConfigError."""
        try:
            parts = urlsplit(init_method)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != "tcp" or parts.query not in ("", _SERVED) or parts.fragment:
            raise ConfigError(
                "the address where the ranks meet cannot be read",
                found=repr(init_method),
                hint="Give init_method as tcp://host:port/group, with ?served at the end where the address is served already",
            )
        return cls(host, port, parts.path.strip("/"), parts.query == _SERVED)

    def subgroup(self, name: str, *, served: bool) -> str:
        """Return the `init_method` of a group whose name goes on with `name`, at the same address."""
        group = f"{self.group}/{name}" if self.group else name
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{group}" + (f"?{_SERVED}" if self.served or served else "")


def store_at(rendezvous: RendezvousPoint, *, serve: bool, timeout: timedelta) -> Store:
    """Return the store at an address, which ends when nobody of this process holds it any more; raises RuntimeError, OSError.

    Args:
        serve: this process serves the address, on that interface alone, unless it does already for another group.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not serve:
        client: Store = TCPStore(rendezvous.host, rendezvous.port, timeout=timeout, wait_for_workers=False)
        return client
    address = (rendezvous.host, rendezvous.port)
    with _lock:
        store = _servers.get(address)
        if store is None:
            family = socket.AF_INET6 if ":" in rendezvous.host else socket.AF_INET
            with socket.create_server(address, family=family, backlog=_BACKLOG) as listening:
                # The store owns the file descriptor from here on.
                store = TCPStore(
                    *address,
                    is_master=True,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                )
            _servers[address] = store
        return store


def local_address(host: str) -> str:
    """Return this machine's address on the network that leads to `host`; raises WorkerError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WorkerError(f"no network leads to {host}, where the ranks meet", found=str(error)) from error
