"""Where ranks meet: a key-value store in memory that they inherit, or on a port that the system chose."""

from __future__ import annotations

import os
import select
import socket
import threading
import uuid
from typing import Any

_BACKLOG = 128


class PrivateRendezvous:
    """A file for torch's file store, without a name: who was not started with its descriptor cannot open it, but the user's own processes.

    Attributes:
        file: the descriptor that the ranks inherit.
        init_method: what the ranks are given.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("hardpoint-rendezvous", os.MFD_CLOEXEC)
        self.init_method = f"file:///proc/self/fd/{self.file}#ranks"

    def close(self) -> None:
        """Close it; ranks keep theirs. Idempotent."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class RendezvousServer:
    """torch's TCP store, served by this process to whoever reaches its port, from when somebody first does.

    Until then torch is not imported, which takes a second: ranks do so at the same time, each in its process.

    Args:
        host: this machine's address on the network from which ranks come.

    Attributes:
        init_method: what the ranks are given; the group's name is its own, so that no two engines meet.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((host, 0))
            listening.listen(_BACKLOG)
            port = listening.getsockname()[1]
            quoted = f"[{host}]" if ":" in host else host
            self.init_method = f"tcp://{quoted}:{port}/{uuid.uuid4().hex}?served"
            self._store: Any = None
            # The thread, and then the store, owns the file descriptor.
            arguments = (host, port, listening.detach())
        threading.Thread(target=self._serve, args=arguments, name="hardpoint rendezvous", daemon=True).start()

    def _serve(self, host: str, port: int, listening: int) -> None:
        arrivals = select.poll()
        arrivals.register(listening, select.POLLIN)
        arrivals.poll()
        # All of torch before its parts, as the thread of this process's rank does: both wait for one another's imports otherwise.
        import torch  # noqa: F401
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
