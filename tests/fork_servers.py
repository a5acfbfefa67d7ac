"""Runs of the conformance suite in one process, whose processes are forks of the same servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest

from hardpoint_conformance.fork_server import ForkServer
from hardpoint_conformance.report import canonical


@contextmanager
def shared_fork_servers() -> Iterator[None]:
    """Keep a server for each set of settings to the context's end: to start one takes most of a short run's time.

    A server finds modules where PYTHONPATH was when it started, and so do its forks.
    """
    known: dict[bytes, ForkServer] = {}
    with ExitStack() as servers, pytest.MonkeyPatch.context() as patch:

        def shared(**settings: Any) -> AbstractContextManager[ForkServer]:
            key = canonical([settings, os.environ.get("PYTHONPATH")])
            if key not in known:
                known[key] = servers.enter_context(ForkServer(**settings))
            return nullcontext(known[key])

        patch.setattr("hardpoint_conformance.runner.ForkServer", shared)
        yield
