"""The process of one rank: `python -m hardpoint.executor.rank_main`; see `hardpoint.executor.child`."""

from __future__ import annotations

import sys

from hardpoint.executor.child import Connection, run_child
from hardpoint.executor.rank_server import RankServer


def _serve(connection: Connection) -> None:
    RankServer(connection.receive, connection.send).serve()


if __name__ == "__main__":
    run_child(sys.argv[1:], _serve)
