"""Ray's workers as forks of processes that have imported Ray, torch and the engine, which takes most of a short actor's time.

A node runs a small program where it would run Python. For a worker, the program asks a server for a fork and ends: Ray knows a worker by
the process id that this registers with. All else that a node runs is started as ever, and so is all of a cluster that an engine starts.

The server is a fork of the tests' process (tests/warm_processes.py) that has not imported Ray. Ray reads the environment when it is
imported, so that there is one process for each environment (a node and a job) which imports Ray in it, and of which workers are forks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.warm_processes import WarmPopen, children_by, end_with, freeze, start_server

_BEFORE_RAY = (
    "fastapi.openapi.models",
    "google.protobuf.json_format",
    "grpc.aio",
    "hardpoint.executor.ray_transport",
    "hardpoint.server.ray_app",
    "jsonschema",
    "opentelemetry.proto.metrics.v1.metrics_pb2",
    "prometheus_client",
    "requests",
    "uvicorn",
    "yaml",
)
_WITH_RAY = (
    "hardpoint.executor.ray_actor",
    "hardpoint.server.ray_router",
    "ray._private.node",
    "ray._private.runtime_env.setup_hook",
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
)

_PROGRAM = """\
#!{python} -SE
import json, os, socket, sys

python, (program, *arguments) = {python!r}, sys.argv[1:]
if program.endswith("/default_worker.py"):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect({address!r})
        message = {{"command": [program, *arguments], "environment": dict(os.environ), "folder": os.getcwd()}}
        socket.send_fds(server, [json.dumps(message).encode()], [0, 1, 2])
        server.recv(1)
else:
    os.execv(python, [python, program, *arguments])
"""
STARTS_ENGINES = "HARDPOINT_TEST_STARTS_ENGINES"
"""In the environment of a node, it has engines that the node's workers start be forks, too."""

_MESSAGE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


def import_early() -> None:
    """Import what can be before Ray is, in the process that all are forks of."""
    for name in _BEFORE_RAY:
        import_module(name)


@contextmanager
def warm_workers(folder: Path) -> Iterator[None]:
    """Have the nodes of a cluster that are started in the context start their workers so.

    Args:
        folder: of this context's own.
    """
    from ray._private import services

    address, program = str(folder / "server"), folder / "python"
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked, pytest.MonkeyPatch.context() as patch:
        asked.bind(address)
        asked.listen(64)
        command = [sys.executable, "-P", __file__, str(asked.fileno())]
        with WarmPopen(command, pass_fds=[asked.fileno()]) as server:
            patch.setattr(services, "sys", SimpleNamespace(**vars(sys) | {"executable": str(program)}))
            yield
            server.terminate()


# In the server's process, and its forks


def _serve(asked: socket.socket) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the tests' process at the latest
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    freeze()
    forks: dict[str, socket.socket] = {}
    while True:
        connection, _ = asked.accept()
        with connection:
            data, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
            environment = json.loads(data)["environment"]
            key = json.dumps(environment, sort_keys=True)
            if key not in forks:
                inherited = [asked.fileno(), connection.fileno(), *map(socket.socket.fileno, forks.values()), *files]
                forks[key] = _fork_with(environment, inherited)
            socket.send_fds(forks[key], [data], files)
            for file in files:
                os.close(file)


def _fork_with(environment: Mapping[str, str], inherited: Sequence[int]) -> socket.socket:
    """Make a process whose forks the workers with an environment are, and return where it is asked for them.

    Args:
        inherited: files that it is to close.
    """
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for file in (requests.detach(), *inherited):
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        folders = environment.get("PYTHONPATH", "")
        sys.path[:0] = folders.split(os.pathsep) if folders else []
        invalidate_caches()
        _import_with_ray()
        gc.freeze()
        while True:
            data, files, _, _ = socket.recv_fds(theirs, _MESSAGE_BYTES, 3)
            if not data:
                os._exit(0)  # the server has ended
            if os.fork() == 0:
                theirs.close()
                end_with(partial(_be, json.loads(data), files))
            for file in files:
                os.close(file)
    theirs.close()
    return requests


def _import_with_ray() -> None:
    from ray import ActorClassID

    # Ray draws random numbers for classes of actors, and all forks of who has drawn any would draw the same further ones for their objects.
    drawn_here = SimpleNamespace(from_random=lambda: ActorClassID(os.urandom(ActorClassID.size())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.actor.ActorClassID", drawn_here)
        for name in _WITH_RAY:
            import_module(name)


def _be(message: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be a worker that has just been started."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(message["folder"])
    sys.argv = message["command"]
    with ExitStack() as to_the_end:
        if STARTS_ENGINES in os.environ:
            # As Ray will have it: forks have the same settings of Python.
            os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb.set_trace"
            start_server()
            to_the_end.enter_context(children_by(WarmPopen))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
