"""Where the ranks of one machine meet: a key-value store that the engine's process serves."""

from __future__ import annotations

import socket
import uuid
from typing import Any

_BACKLOG = 128


class MeetingServer:
    """torch's TCP store, on a port that the system chose and that only this machine reaches.

    Attributes:
        init_method: what the ranks are given; the group's name is its own, so that no two engines meet.
    """

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(_BACKLOG)
            host, port = listening.getsockname()
            self.init_method = f"tcp://{host}:{port}/{uuid.uuid4().hex}?served"
            # The store owns the file descriptor from here on.
            self._store: Any = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )

    def close(self) -> None:
        """End the store and close its port; legal more than once."""
        self._store = None
