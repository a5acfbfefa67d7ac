"""Forks that stand for fresh processes: what a module finds there, and how its end is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint_conformance.fork_server import PROGRAM, ForkServer
from hardpoint_conformance.processes import end_group

CHILD = """
import json, os, signal, sys, time
if sys.argv[1:] == ["hang"]:
    time.sleep(60)
if sys.argv[1:] == ["crash"]:
    os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[1:] == ["fail"]:
    sys.exit(3)
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), dict(os.environ), os.getpgrp() == os.getpid(), "torch" in sys.modules]))
print("words", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(for_ranks=False, variables={"OMP_NUM_THREADS": "1"}) as server:
        yield server


def start(server: ForkServer, folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], Path, Path]:
    (folder / "child.py").write_text(CHILD)
    files = folder / "stdout", folder / "stderr"
    for file in files:
        file.write_bytes(b"")
    process = server.start("child", arguments, folder, *files, {"PATH": os.environ["PATH"], "ONLY": "this"})
    return process, *files  # type: ignore[return-value]


def test_a_module_runs_as_in_a_fresh_process(server: ForkServer, tmp_path: Path) -> None:
    process, stdout, stderr = start(server, tmp_path, "one", "two")
    assert process.wait(240) == 0
    name, arguments, folder, environment, leads, has_torch = json.loads(stdout.read_text())
    assert (name, arguments, folder) == ("__main__", ["one", "two"], str(tmp_path))
    assert environment == {"PATH": os.environ["PATH"], "ONLY": "this"}
    assert leads
    assert has_torch
    assert stderr.read_text() == "words\n"


OUTER = """
import atexit, os, sys
from pathlib import Path
from hardpoint_conformance import fork_server
atexit.register(lambda: print("the end", sys.modules["__main__"].kept))
kept = "kept"
inner = "import os, sys; print(sys.argv[1:], os.getpgrp() == int(sys.argv[1])); sys.exit(5)"
files = [Path(name) for name in sys.argv[1:3]]
arguments = (inner, str(os.getpgrp()))
started = fork_server.here().start(fork_server.PROGRAM, arguments, Path.cwd(), *files, dict(os.environ), os.getpgrp())
print(sys.argv[0], os.getpgrp() == os.getpid(), started.wait(60), flush=True)
"""


def test_a_program_has_its_names_to_the_end_and_can_start_others_in_its_group(
    server: ForkServer, tmp_path: Path
) -> None:
    stdout, stderr, inner_stdout, inner_stderr = files = [tmp_path / name for name in "abcd"]
    for file in files:
        file.write_bytes(b"")
    arguments = (OUTER, str(inner_stdout), str(inner_stderr))
    process = server.start(PROGRAM, arguments, tmp_path, stdout, stderr, dict(os.environ))
    assert process.wait(240) == 0, stderr.read_text()
    assert stdout.read_text() == "-c True 5\nthe end kept\n"
    assert inner_stdout.read_text() == f"['{process.pid}'] True\n"
    assert stderr.read_text() == inner_stderr.read_text() == ""


def test_a_program_whose_group_is_gone_does_not_begin(server: ForkServer, tmp_path: Path) -> None:
    ended, _, _ = start(server, tmp_path, "fail")
    assert ended.wait(240) == 3
    files = tmp_path / "stdout", tmp_path / "stderr"
    process = server.start(PROGRAM, ("print('begun')",), tmp_path, *files, dict(os.environ), ended.pid)
    assert process.wait(240) == 1
    assert files[0].read_text() == ""


@pytest.mark.parametrize(("does", "code"), [("fail", 3), ("crash", -signal.SIGSEGV)])
def test_the_end_of_a_process_is_told(server: ForkServer, tmp_path: Path, does: str, code: int) -> None:
    process, _, _ = start(server, tmp_path, does)
    assert process.wait(240) == code
    assert process.poll() == process.returncode == code


def test_a_process_that_hangs_can_be_ended_while_others_run(server: ForkServer, tmp_path: Path) -> None:
    process, _, _ = start(server, tmp_path, "hang")
    other, _, _ = start(server, tmp_path, "fail")
    assert other.wait(240) == 3
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(240) == -signal.SIGKILL


def test_a_process_can_be_ended_before_it_has_its_group(server: ForkServer, tmp_path: Path) -> None:
    for _ in range(20):
        process, _, _ = start(server, tmp_path, "hang")
        end_group(process)
        assert process.poll() == -signal.SIGKILL


def test_the_end_of_the_server_is_an_end_of_its_processes_and_an_error_of_the_next(tmp_path: Path) -> None:
    with ForkServer(for_ranks=False, variables={}) as server:
        process, _, _ = start(server, tmp_path, "hang")
        os.kill(int(Path(f"/proc/{process.pid}/stat").read_text().split()[3]), signal.SIGKILL)
        assert process.wait(240) == -signal.SIGKILL
        with pytest.raises(OSError, match=r"ended|pipe"):
            start(server, tmp_path, "fail")
        process.send_signal(signal.SIGKILL)  # not its group: it may not have made one yet


def test_a_server_ends_though_a_fork_of_its_client_goes_on(tmp_path: Path) -> None:
    with ForkServer(for_ranks=False, variables={}) as server:
        process, _, _ = start(server, tmp_path)
        assert process.wait(240) == 0
        held, holds = os.pipe()
        fork = os.fork()
        if fork == 0:
            os.close(holds)
            os.read(held, 1)
            os._exit(0)
    os.close(holds)
    os.close(held)
    assert os.waitpid(fork, 0)[1] == 0
