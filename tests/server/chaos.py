"""Load, sleeps and wakes of two operators, aborts, and kills of engines, all at once and at random from one seed.

`python -m tests.server.chaos --seconds 180 --seed N` runs it for three minutes; the gate runs a shorter one (`test_chaos.py`). Every
request has to be answered, with the text that it has when nobody disturbs it, or refused with a reason; afterwards no engine may
have anything left of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hardpoint.interfaces.errors import HardpointError
from hardpoint.server.errors import ApiError
from tests.e2e.test_command_interrupts import write_model
from tests.leaks import Belongings
from tests.server.conftest import KEY, TOKEN, Running, serving

SETTINGS = {
    "max_model_len": 64,
    "num_device_blocks": 24,
    "block_size": 8,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}
OPTIONS = {"max_requests": 24}
NAMES = ("a", "b")
CLIENTS = 10

REFUSED = {
    "model_asleep": 503,
    "weights_missing": 503,
    "engine_dead": 503,
    "model_restarting": 503,
    "queue_full": 429,
    "request_timeout": 408,
}
"""Reasons for which a request may be refused, and their status."""
NOT_DONE = {
    "busy": 409,
    "not_cancellable": 409,
    "memory_asleep": 409,
    "sleep_refused": 400,
    "requests_in_progress": 503,
    "model_asleep": 503,
    "weights_missing": 503,
    "engine_dead": 503,
    "model_restarting": 503,
}
"""Reasons for which what an operator asks may not be done."""


class Wrong(Exception):
    """What must not have happened, and after which nothing more can be said."""


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        requests, operations: by how they ended.
        wrong: what must not have happened.
    """

    requests: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.kills} kills", f"requests: {dict(self.requests.most_common())}"]
        lines += [f"operations: {dict(self.operations.most_common())}", *self.wrong[:20]]
        return "\n".join(lines)


def bodies() -> list[dict[str, Any]]:
    """Return the requests that are asked again and again."""
    starts = ["hello", "a", "the cat", "hhh eee", "0123456789", "hello hello hello he"]
    found: list[dict[str, Any]] = []
    for number, start in enumerate(starts * 3):
        body: dict[str, Any] = {"prompt": start, "max_tokens": 4 + 7 * (number % 6), "ignore_eos": True, "seed": number}
        body["temperature"] = 0.9 if number % 3 else 0
        if number % 5 == 4:
            body["n"] = 2
        if number % 6 == 5:
            body |= {"echo": True, "logprobs": 1}
        found.append(body)
    return found


class Chaos:
    """One run against a server."""

    def __init__(self, server: Running, seed: int, seconds: float) -> None:
        self._server, self._seed, self._seconds = server, seed, seconds
        self.outcome = Outcome()
        self._expected: dict[tuple[str, int], list[str]] = {}
        self._end = 0.0

    async def run(self) -> Outcome:
        """Disturb the server, and see that it is whole afterwards."""
        urls = self._server.server
        limits = httpx.Limits(max_connections=200)
        keys = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(base_url=urls.url, headers=keys[0], timeout=240, limits=limits) as self._users,
            httpx.AsyncClient(base_url=urls.control_url or "", headers=keys[1], timeout=240) as self._operators,
        ):
            self._expected = await self._undisturbed()
            memory = await self._memory()
            self._end = time.monotonic() + self._seconds
            actors: list[Coroutine[Any, Any, None]] = [self._client(number) for number in range(CLIENTS)]
            actors += [self._operator(number) for number in range(2)]
            await asyncio.gather(*actors, self._killer())
            await self._check_whole(memory)
        return self.outcome

    def _note(self, what: str) -> None:
        self.outcome.wrong.append(what)

    def _random(self, who: str) -> random.Random:
        return random.Random(f"{self._seed} {who}")

    async def _undisturbed(self) -> dict[tuple[str, int], list[str]]:
        found = {}
        for name in NAMES:
            for number, body in enumerate(bodies()):
                answer = await self._users.post("/v1/completions", json=body | {"model": name})
                if answer.status_code != 200:
                    raise Wrong(f"undisturbed: {answer.text}")
                found[name, number] = [choice["text"] for choice in answer.json()["choices"]]
        return found

    # Clients

    async def _client(self, number: int) -> None:
        rng, all_bodies = self._random(f"client {number}"), bodies()
        while time.monotonic() < self._end:
            which, name = rng.randrange(len(all_bodies)), rng.choice(NAMES)
            body = all_bodies[which] | {"model": name, "stream": rng.random() < 0.6}
            headers = {"X-Request-Timeout": str(rng.choice([0.05, 0.5, 5, 20]))}
            if rng.random() < 0.8:
                headers["X-When-Asleep"] = rng.choice(["reject", "queue", "wake"])
            leaves = rng.random() < 0.2
            patience = rng.random() * 0.1 if leaves else 50
            texts = [""] * body.get("n", 1)
            try:
                async with asyncio.timeout(patience):
                    how = await self._ask(body, headers, texts)
            except TimeoutError:
                how = "left"
                if not leaves:
                    self._note(f"no answer within {patience} s: {body} {headers}")
            except httpx.HTTPError as error:
                how = "connection lost"
                self._note(f"the connection was lost: {error!r}")
            self._check_texts(how, texts, self._expected[name, which], body)
            self.outcome.requests[how] += 1
            # As a well-behaved client, it does not come back at once where there is no engine.
            await asyncio.sleep(rng.random() * (1.0 if how == "model_restarting" else 0.15))

    async def _ask(self, body: dict[str, Any], headers: dict[str, str], texts: list[str]) -> str:
        """Ask, and note the texts as they come; returns how it ended."""
        if not body["stream"]:
            answer = await self._users.post("/v1/completions", json=body, headers=headers)
            if answer.status_code != 200:
                return self._refusal(answer.status_code, answer.json())
            reasons = set()
            for choice in answer.json()["choices"]:
                texts[choice["index"]] = choice["text"]
                reasons.add(choice["finish_reason"])
            return "aborted" if "abort" in reasons else "answered"
        ended: set[str] = set()
        async with self._users.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return self._refusal(answer.status_code, json.loads(await answer.aread()))
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "aborted" if "abort" in ended else "answered"
                if not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return self._refusal(None, event)
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                    if choice["finish_reason"] is not None:
                        ended.add(choice["finish_reason"])
        self._note(f"a stream ended without a word: {body}")
        return "cut off"

    def _refusal(self, status: int | None, answer: dict[str, Any]) -> str:
        code, message = answer["error"]["code"], answer["error"]["message"]
        if not message or REFUSED.get(code) != (REFUSED.get(code) if status is None else status) or code not in REFUSED:
            self._note(f"refused: {status} {answer}")
        return str(code)

    def _check_texts(self, how: str, texts: Sequence[str], expected: Sequence[str], body: dict[str, Any]) -> None:
        for text, whole in zip(texts, expected, strict=True):
            fits = text == whole if how == "answered" else whole.startswith(text.rstrip("�"))
            if not fits:
                self._note(f"{how}: {text!r} instead of {whole!r} for {body}")

    # Operators

    async def _operator(self, number: int) -> None:
        rng = self._random(f"operator {number}")
        while time.monotonic() < self._end:
            name = rng.choice(NAMES)
            level = rng.choice([0, 1, 1, 1, 2])
            how: dict[str, Any] = {"level": level, "mode": rng.choice(["abort", "wait", "keep"]), "drain_timeout": 0.5}
            if level == 1:
                how |= rng.choice([{}, {"tier": "host"}, {"tier": "disk"}, {"kv": "preserve"}, {"tags": ["kv_cache"]}])
            begun = await self._operate("POST", f"/models/{name}/sleep?wait={rng.choice(['true', 'false'])}", json=how)
            await self._operate("GET", rng.choice(["/models", "/operations", f"/models/{name}", "/metrics"]))
            if begun and rng.random() < 0.3:
                await self._operate("DELETE", f"/operations/{begun['id']}")
            await asyncio.sleep(rng.random() * 0.4)
            if rng.random() < 0.3:
                await self._operate("POST", f"/models/{name}/wake", json={"tags": ["weights"]})
            await self._make_whole(name)
            if rng.random() < 0.2:
                await self._operate("DELETE", f"/models/{name}/prefix-cache")
            await asyncio.sleep(rng.random() * 0.8)

    async def _make_whole(self, name: str) -> bool:
        """Have a model serve again; returns whether it could be done now."""
        done = [
            await self._operate("POST", f"/models/{name}/wake"),
            await self._operate("POST", f"/models/{name}/resume"),
        ]
        shown = await self._operate("GET", f"/models/{name}")
        if shown and "sleep" in shown and not shown["sleep"]["weights_valid"]:
            done.append(await self._operate("POST", f"/models/{name}/reload"))
        return None not in done

    async def _operate(self, method: str, path: str, **more: Any) -> dict[str, Any] | None:
        """Do what an operator asks; returns the answer, None where it was not done."""
        answer = await self._operators.request(method, path, **more)
        kind = path.partition("?")[0].rpartition("/")[2]
        if "/operations/" in path:
            kind = "cancel"
        if answer.status_code < 400:
            self.outcome.operations[kind] += 1
            return None if kind == "metrics" else dict(answer.json())
        error = answer.json()["error"]
        if NOT_DONE.get(error["code"]) != answer.status_code or not error["message"]:
            self._note(f"{method} {path} {more}: {answer.status_code} {error}")
        self.outcome.operations[f"{kind}: {error['code']}"] += 1
        return None

    async def _killer(self) -> None:
        rng = self._random("killer")
        # Each death of one engine soon after another doubles the time until it is back.
        pause = max(self._seconds / 8, 4.0)
        while True:
            await asyncio.sleep(pause * (0.5 + rng.random()))
            if time.monotonic() > self._end - 2:
                return
            try:
                pid = self._server.model(rng.choice(NAMES)).llm.pid
            except (ApiError, HardpointError):
                continue
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.outcome.kills += 1

    # Afterwards

    async def _check_whole(self, memory: dict[str, tuple[int, dict[str, int]]]) -> None:
        """All engines come back, serve as before, and hold what they held."""
        deadline = time.monotonic() + 240
        for name in NAMES:
            while not await self._make_whole(name):
                if time.monotonic() > deadline:
                    raise Wrong(f"'{name}' did not come back: {await self._operate('GET', f'/models/{name}')}")
                await asyncio.sleep(0.2)
        if await self._undisturbed() != self._expected:
            self._note("afterwards the texts are others")
        for name in NAMES:
            shown = await self._operate("GET", f"/models/{name}")
            assert shown is not None
            stats = shown["stats"]
            left = {key: stats[key] for key in ("running", "waiting", "swapped", "blocks_used")}
            if any(left.values()) or shown["requests"]:
                self._note(f"'{name}' has something left: {left}, {shown['requests']} requests")
            if (shown["state"], shown["sleep"]["asleep"]) != ("running", []):
                self._note(f"'{name}' is not awake: {shown['state']}, {shown['sleep']}")
            if shown["device_bytes"] != self._server.model(name).need:
                self._note(f"'{name}' is said to hold {shown['device_bytes']} bytes")
        if (now := await self._memory()) != memory:
            self._note(f"sleeps free and leave {now} bytes, and before {memory}")
        waiting = [
            one for one in (await self._operators.get("/operations")).json()["operations"] if one["state"] == "running"
        ]
        if waiting:
            self._note(f"operations that are not over: {waiting}")

    async def _memory(self) -> dict[str, tuple[int, dict[str, int]]]:
        """Return of each model what a sleep gives back to the device, and what it leaves there, both by the driver."""
        found = {}
        for name in NAMES:
            slept = await self._operate("POST", f"/models/{name}/sleep")
            assert slept is not None
            found[name] = slept["result"]["memory"]["unmapped"], slept["result"]["residual"]
            await self._operate("POST", f"/models/{name}/wake")
        return found


def chaos(seed: int, seconds: float) -> Outcome:
    """Run it for so many seconds, with a server of its own; nothing of that is left."""
    before = Belongings.now()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model.gguf")
        settings = SETTINGS | {"sleep_disk_directory": folder}
        with serving(dict.fromkeys(NAMES, model), settings, **OPTIONS) as server:
            outcome = asyncio.run(Chaos(server, seed, seconds).run())
        left = [file.name for file in Path(folder).iterdir() if file.name != "model.gguf"]
    if left:
        outcome.wrong.append(f"left in the directory of backups: {left}")
    # OpenMP's names are of other programs on this machine: no engine makes any.
    if found := [one for one in Belongings.now().new_since(before) if not one.startswith("__KMP_")]:
        outcome.wrong.append(f"left by the server: {found}")
    return outcome


def main() -> None:
    """Run it from the command line; exits with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome = chaos(options.seed, options.seconds)
    print(outcome)
    raise SystemExit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    main()
