"""Where ranks of several machines meet."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hardpoint.executor.rendezvous import RendezvousServer
from hardpoint.worker.ranks import RendezvousPoint


def test_a_store_is_there_for_who_reaches_its_port() -> None:
    server = RendezvousServer("127.0.0.1")
    point = RendezvousPoint.parse(server.init_method)
    assert point.served
    first, second = (TCPStore(point.host, point.port, timeout=timedelta(seconds=60)) for _ in range(2))
    first.set("name", "value")
    assert second.get("name") == b"value"


def test_torch_is_not_imported_while_nobody_comes() -> None:
    program = """
import sys, time
from hardpoint.executor.rendezvous import RendezvousServer
server = RendezvousServer("127.0.0.1")
time.sleep(0.1)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
