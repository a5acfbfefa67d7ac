"""The server beside the offline engine on a CPU: the same requests, and what HTTP and text cost.

    python benchmarks/serving.py [--rounds N] [--threads N] [--json FILE]

`hardpoint serve demo` and an offline engine of the same settings are loaded at once, each in processes of its own, and take turns at every
single measurement; the median of the ratios of neighbours is held against the bar. The offline engine is stopped (SIGSTOP) while it waits;
the server's sleeps in a read of its inbox. The client is this process, which reads sockets and does little else, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
from revisions import ENVIRONMENT, MAX_MODEL_LEN, REQUESTS, Revision, short_lengths

FIRST_TOKEN_BAR, THROUGHPUT_BAR, COST_BAR = 5.0, 0.95, 60.0
"""ms beside the offline engine's, share of its rate, µs of processor time a token."""


class Server:
    """`hardpoint serve demo`, and requests to it."""

    def __init__(self, threads: int) -> None:
        command = [shutil.which("hardpoint") or "hardpoint", "serve", "demo", "--port", "0"]
        command += ["--threads", str(threads), "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(REQUESTS)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self._draw = random.Random(20240901)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"Serving at http://([\d.]+):(\d+)", line):
                self._address = found[1], int(found[2])
                break
        else:
            raise SystemExit("the server did not start")
        # What it logs is read, or the pipe would fill.
        self._drain = subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)

    def prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(256, 49_000) for _ in range(length)]

    def processor_seconds(self) -> float:
        """Processor time of the server's process, without its engine's."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def ask(self, prompt: list[int], count: int, stream: bool) -> tuple[float, int]:
        """Send a request and read its answer; returns seconds to the first part of its body, and how many parts had text."""
        body = json.dumps(
            {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": stream}
        ).encode()
        start, first, parts = time.perf_counter(), 0.0, 0
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n")[0]:
            raise SystemExit(f"the server answered {status!r}")
        while data := await reader.read(1 << 16):
            first = first or time.perf_counter() - start
            parts += data.count(b'"text":')
        writer.close()
        return first, parts

    def rates(self, stream: bool) -> tuple[float, float]:
        """Return tokens per second of the same requests as the offline engine's, and µs of processor time a token."""
        lengths = short_lengths()
        prompts = [self.prompt(length) for length, _ in lengths]

        async def whole() -> None:
            await asyncio.gather(*(self.ask(p, count, stream) for p, (_, count) in zip(prompts, lengths, strict=True)))

        tokens = sum(count for _, count in lengths)
        before, start = self.processor_seconds(), time.perf_counter()
        asyncio.run(whole())
        seconds = time.perf_counter() - start
        return tokens / seconds, (self.processor_seconds() - before) / tokens * 1e6

    def first_token(self) -> float:
        """Return ms until the only token of a prompt of 512 is here."""
        return asyncio.run(self.ask(self.prompt(512), 1, True))[0] * 1e3

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._drain.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()

    offline, server = Revision([sys.executable], arguments.threads), Server(arguments.threads)
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    try:
        offline.wait_ready()
        server.rates(True), server.first_token()
        for number in range(arguments.rounds):
            for who in ("offline", "server") if number % 2 else ("server", "offline"):
                if who == "offline":
                    note("offline rate", offline.measure("short"))
                    note("offline first token", offline.measure("first_token"))
                    continue
                for kind, stream in (("stream", True), ("whole", False)):
                    rate, cost = server.rates(stream)
                    note(f"server {kind}", rate)
                    note(f"server {kind} cost", cost)
                note("server first token", server.first_token())
    finally:
        offline.close()
        server.close()

    def pairs(name: str, other: str) -> list[tuple[float, float]]:
        return list(zip(samples[name], samples[other], strict=True))

    rows, verdicts = [], []
    for label, value, bar, met in (
        *(
            (
                f"{REQUESTS} short requests, {kind}: share of the offline rate",
                share,
                f"≥ {THROUGHPUT_BAR}",
                share >= THROUGHPUT_BAR,
            )
            for kind in ("stream", "whole")
            for share in [statistics.median(a / b for a, b in pairs(f"server {kind}", "offline rate"))]
        ),
        *(
            (f"HTTP and text, {kind} (µs of processor time a token)", cost, f"≤ {COST_BAR:g}", cost <= COST_BAR)
            for kind in ("stream", "whole")
            for cost in [statistics.median(samples[f"server {kind} cost"])]
        ),
        *(
            (
                "first token of 512, beside the offline engine's (ms)",
                late,
                f"≤ {FIRST_TOKEN_BAR:g}",
                late <= FIRST_TOKEN_BAR,
            )
            for late in [statistics.median(a - b for a, b in pairs("server first token", "offline first token"))]
        ),
    ):
        rows.append([label, report.number(value), bar, "met" if met else "NOT MET"])
        verdicts.append({"metric": label, "value": value, "bar": bar, "met": met})
    print(report.table(["metric", "value", "bar", "verdict"], rows))
    for name, values in samples.items():
        print(f"{name}: {report.number(statistics.median(values))} (median of {len(values)})")
    print(f"Reproduce: {report.command()}")
    if arguments.json:
        document: dict[str, Any] = {
            "benchmark": "serving",
            "command": "python benchmarks/serving.py",
            "machine": report.machine(("hardpoint", "hardpoint-cpu", "torch", "fastapi", "uvicorn", "uvloop")),
            "rounds": arguments.rounds,
            "threads": arguments.threads,
            "verdicts": verdicts,
            "samples": samples,
        }
        report.write_json(arguments.json, document)


if __name__ == "__main__":
    main()
