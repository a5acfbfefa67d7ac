"""Where ranks of several machines meet."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hardpoint.executor.rendezvous import RendezvousServer
from hardpoint.worker.ranks import RendezvousPoint


def test_a_store_is_made_when_somebody_reaches_its_port() -> None:
    server = RendezvousServer("127.0.0.1")
    point = RendezvousPoint.parse(server.init_method)
    assert point.served
    assert server._store is None, "torch is not imported for it"
    first, second = (TCPStore(point.host, point.port, timeout=timedelta(seconds=60)) for _ in range(2))
    first.set("name", "value")
    assert second.get("name") == b"value"
