"""Where ranks meet: a key-value store in memory that they inherit, or on a port that the system chose."""

from __future__ import annotations

import os
import socket
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
    """torch's TCP store, served by this process to whoever reaches its port.

    Args:
        host: this machine's address on the network from which ranks come.

    Attributes:
        init_method: what the ranks are given; the group's name is its own, so that no two engines meet.
    """

    def __init__(self, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((host, 0))
            listening.listen(_BACKLOG)
            port = listening.getsockname()[1]
            quoted = f"[{host}]" if ":" in host else host
            self.init_method = f"tcp://{quoted}:{port}/{uuid.uuid4().hex}?served"
            # The store owns the file descriptor from here on.
            self._store: Any = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )

    def close(self) -> None:
        """End the store and close its port; idempotent."""
        self._store = None
