"""Where ranks meet: a key-value store on a port that the system chose."""

from __future__ import annotations

import socket
import uuid
from typing import Any

_BACKLOG = 128


class RendezvousServer:
    """torch's TCP store, served by this process.

    Args:
        host: this machine's address on the network from which ranks come; by default only this machine's own processes reach it.

    Attributes:
        init_method: what the ranks are given; the group's name is its own, so that no two engines meet.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
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
