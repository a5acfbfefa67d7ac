"""`hardpoint serve` as a command: what it answers, how signals end it, and how it refuses what it is given."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from hardpoint.cli import app
from hardpoint.cli.exit_codes import ExitCode
from tests.leaks import Belongings
from tests.server.conftest import NO_TLS
from tests.server.test_robust import LONG, until

ENGINE = ("--max-model-len", "1024", "--num-blocks", "256", "--dtype", "float32")
KEY = "a-user's-key"


class Command:
    """A server in a process of its own, as a user starts it."""

    def __init__(self, *arguments: str, device: str, key: str | None = None) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
        environment |= {} if key is None else {"HARDPOINT_API_KEY": key}
        self.process = subprocess.Popen(
            [
                "sh",
                "-c",
                'ulimit -Sn 256; exec "$@"',
                "sh",
                sys.executable,
                "-m",
                "hardpoint.cli",
                "serve",
                *arguments,
                "--port",
                "0",
                "--backend",
                device,
                *ENGINE,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    def url(self) -> str:
        """Wait until it serves, and return where."""
        until(lambda: "Serving at" in self.text or self.process.poll() is not None, 90)
        found = re.search(r"Serving at (\S+)", self.text)
        assert found is not None, self.text
        return found[1]

    @property
    def text(self) -> str:
        """What it has said."""
        return "".join(self.lines)

    def engines(self) -> list[int]:
        """Return the process ids of its engines."""
        with suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            tasks = children.parent.parent.glob("*/children")
            return [int(pid) for task in tasks for pid in task.read_text().split()]
        return []

    def ended(self) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(240)
        self._reader.join(240)
        return code


@contextmanager
def command(*arguments: str, **where: Any) -> Iterator[Command]:
    before = Belongings.now()
    one = Command(*arguments, **where)
    try:
        yield one
    finally:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.ended()
        assert one.process.stderr is not None
        one.process.stderr.close()
    # Sockets and files may be the test's own.
    assert replace(before, shared=Belongings.now().shared).new_since(before) == []


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs any more."""
    return not any(
        Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text() for pid in pids
    )


def test_tls_keys_and_sigterm(device: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key, roots, control = (tmp_path / name for name in ("certificate", "key", "roots", "control"))
    issued.private_key_pem.write_to_path(str(key))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(certificate), append=True)
    authority.cert_pem.write_to_path(str(roots))
    options = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--control-socket", str(control)]
    with command("demo", *options, device=device, key=KEY) as server, ThreadPoolExecutor(1) as pool:
        url = server.url()
        assert url.startswith("https://127.0.0.1:")
        engines = server.engines()
        assert engines
        with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
            httpx.get(f"{url}/health")
        trusting = ssl.create_default_context(cafile=str(roots))
        http = httpx.Client(verify=trusting, timeout=240)
        operators = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(control), verify=trusting), base_url="https://127.0.0.1"
        )
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=http, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another").models.list()
        stream = client.completions.create(stream=True, **LONG)
        next(iter(stream))
        whole = pool.submit(client.completions.create, **LONG)
        until(lambda: operators.get("/models/demo").json()["requests"] == 2)
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "python" in maps
        assert "libtorch" not in maps, "torch, which takes 180 MiB, is for the engine's process"
        server.process.send_signal(signal.SIGTERM)
        until(lambda: http.get(f"{url}/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="demo", prompt="x")
        assert [choice.finish_reason for part in stream for choice in part.choices][-1] == "length"
        assert whole.result().choices[0].finish_reason == "length"
        assert server.ended() == ExitCode.OK
        assert not control.exists()
        assert gone(engines)
        assert "Traceback" not in server.text


def test_ctrl_c_ends_it_in_order_and_twice_at_once(device: str, tmp_path: Path) -> None:
    control = tmp_path / "control"
    with command("demo", "--control-socket", str(control), device=device) as server:
        client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(stream=True, **LONG | {"max_tokens": 900})
        next(iter(stream))
        engines = server.engines()
        server.process.send_signal(signal.SIGINT)
        until(lambda: httpx.get(f"{server.url()}/ready", verify=NO_TLS).status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == -signal.SIGINT
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        until(lambda: gone(engines))
    assert control.exists()
    # What a killed server left is in nobody's way.
    with command("demo", "--control-socket", str(control), device="cpu") as server:
        client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
        # More connections than files that may be open at the start.
        host, port = server.url().removeprefix("http://").split(":")
        assert re.search(r"multiplied as blocks: \d+ in Q4_1", server.text)
        idle = [socket.create_connection((host, int(port))) for _ in range(300)]
        assert "Paris" in client.completions.create(**asked).choices[0].text
        question: Any = {"input": "What is the capital of France?", "instructions": "Be brief."}
        response = client.responses.create(model="demo", temperature=0, max_output_tokens=40, **question)
        assert (response.status, response.error) == ("completed", None)
        assert "Paris" in response.output_text
        for one in idle:
            one.close()
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == ExitCode.OK
        assert not control.exists()
        assert "Traceback" not in server.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_models_are_loaded(device: str, tmp_path: Path, number: signal.Signals) -> None:
    control = tmp_path / "control"
    models = [f"{name}=demo" for name in "abcdefgh"]
    with command(*models, "--control-socket", str(control), device=device) as server:
        until(lambda: bool(server.engines()))
        engines = server.engines()
        server.process.send_signal(number)
        assert server.ended() == ExitCode.OK
        assert "Serving at" not in server.text
        assert not control.exists()
        until(lambda: gone(engines))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["/no/such/model"], ExitCode.FAILED, "there is no model '/no/such/model'"),
        (["demo", "--device-memory", "8Gob"], ExitCode.USAGE, "'8Gob' is not a size"),
        (["demo", "--when-asleep", "never"], ExitCode.FAILED, "'reject', 'queue', 'wake'"),
        (["demo", "--control-port", "0"], ExitCode.FAILED, "HARDPOINT_CONTROL_TOKEN"),
        (["demo", "--tls-key", "key"], ExitCode.FAILED, "TLS needs both"),
        (["demo", "--tls-key", "/no/key", "--tls-certificate", "/no/certificate"], ExitCode.FAILED, "'/no/key'"),
        (["demo", "demo"], ExitCode.FAILED, "two models or adapters are served under one name: demo"),
        (["=demo"], ExitCode.FAILED, "names no model"),
        (["demo", "--backend", "none"], ExitCode.FAILED, "no backend named 'none'"),
        (["demo", "--port", "{used}"], ExitCode.FAILED, "cannot listen at 127.0.0.1:{used}"),
        (["demo", "--port", "70000"], ExitCode.FAILED, "cannot listen at 127.0.0.1:70000"),
        (["demo", "--control-socket", "/no/folder/control"], ExitCode.FAILED, "cannot listen at '/no/folder/control'"),
        (["demo", "--device-memory", "1"], ExitCode.FAILED, "raise --device-memory to "),
        (
            ["demo", "--device-memory", "1", "--memory-utilization", "0.000001"],
            ExitCode.FAILED,
            "raise memory_utilization to 0.",
        ),
        (["demo", "--replicas", "2"], ExitCode.FAILED, "replicas run on a Ray cluster"),
        (["demo", "--replicas", "2", "--executor", "ray"], ExitCode.FAILED, "Ray cannot be imported"),
        (["demo", "other", "--replicas", "2", "--executor", "ray"], ExitCode.FAILED, "replicas are of one model"),
        (["demo", "--replicas", "2", "--device-memory", "1GiB"], ExitCode.FAILED, "--device-memory"),
        (["demo", "--replicas", "2", "--min-replicas", "3", "--executor", "ray"], ExitCode.FAILED, "at most 2"),
        ([], ExitCode.USAGE, "Missing argument"),
    ],
)
def test_what_cannot_be_served_is_one_message(
    arguments: list[str], code: ExitCode, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARDPOINT_CONTROL_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "400")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = str(taken.getsockname()[1])
        given = [one.replace("{used}", used) for one in arguments]
        with pytest.raises(SystemExit) as ended:
            app.run(["serve", *([] if "--port" in given else ["--port", "0"]), *given])
    assert ended.value.code == code
    told = capfd.readouterr().err
    assert said.replace("{used}", used) in told
    assert "Traceback" not in told
    if code is ExitCode.FAILED:
        assert told.count("error: ") == 1
        assert len(told.strip().splitlines()) <= 2
