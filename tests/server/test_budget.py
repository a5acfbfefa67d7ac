"""Several models under a budget of device memory that does not hold all of them."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import DeviceOutOfMemory
from hardpoint.server.budget import DeviceBudget
from hardpoint_conformance.tiny_model import Shape, tiny_model
from tests.server.conftest import ENGINE, Running

SHAPE = Shape(hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=4096, max_len=512)
SETTINGS: Any = {"skip_tokenizer_init": True, "max_model_len": 512, "num_device_blocks": 32, "sleep_tier": "source"}
MIB = 1 << 20
LIMIT = 112 * MIB


@pytest.fixture(scope="module")
def models() -> dict[str, str]:
    return {name: str(tiny_model(replace(SHAPE, seed=seed)).path) for seed, name in enumerate("abc")}


def alone(model: str) -> list[list[int]]:
    """Return the tokens of each prompt, from an engine without a server."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(model, **ENGINE | SETTINGS) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": [1 + number, 2, 3]} for number in range(7)], params, use_tqdm=False
        )
    return [list(output.outputs[0].token_ids) for output in outputs]


def ask(server: Running, name: str, number: int) -> list[int]:
    answer = server.users.post(
        "/v1/completions",
        json={
            "model": name,
            "prompt": [1 + number % 7, 2, 3],
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


class DeviceMemory:
    """What each engine has mapped of the device, which is the host here, as the kernel counts it."""

    def __init__(self, server: Running) -> None:
        self._engines = [Path(f"/proc/{model.llm.pid}") for model in server.server.fleet]
        self._counts: dict[tuple[Path, str], list[int]] = {}

    def read(self) -> list[int]:
        """Return it in bytes.

        To tell what belongs to its mappings takes the kernel long: it is asked where they changed, until two answers are alike, since what
        is asked for a mapping comes after it.
        """
        found = []
        for engine in self._engines:
            counts = self._counts.setdefault((engine, (engine / "maps").read_text()), [])
            if len(counts) < 2 or counts[-1] != counts[-2]:
                counts.append(self._count((engine / "smaps").read_text()))
            found.append(counts[-1])
        return found

    @staticmethod
    def _count(smaps: str) -> int:
        """Return the bytes that the CPU's driver mapped.

        It asks for huge pages ("hg") for all that it maps, or for none ("nh"). Nobody else in an engine's process does but the kernel, for
        the stacks of threads ("nh"), which have a page without access before them.
        """
        total = guard_end = begin = size = 0
        access = ""
        for line in smaps.splitlines():
            if edges := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
                begin, size, access = int(edges[1], 16), int(edges[2], 16) - int(edges[1], 16), edges[3]
            elif line.startswith("VmFlags:"):
                flags = line.split()
                if access.startswith("---"):
                    guard_end = begin + size if "nh" in flags else 0
                elif "hg" in flags or ("nh" in flags and begin != guard_end):
                    total += size
        return total


def test_three_models_where_one_fits(start: Any, models: dict[str, str]) -> None:
    expected = {(name, number): tokens for name in models for number, tokens in enumerate(alone(models[name]))}
    assert expected["a", 0] != expected["b", 0] != expected["c", 0]
    with start(models, SETTINGS, budget=lambda: DeviceBudget(LIMIT, min_awake=0.2)) as server:
        needs = [model.need for model in server.server.fleet]
        assert max(needs) < LIMIT < 2 * min(needs)
        most, ended, memory = [0, 0], threading.Event(), DeviceMemory(server)

        def watch() -> None:
            while not ended.is_set():
                most[0] = max(most[0], sum(model.device_bytes for model in server.server.fleet))
                # Read one after the other, so that they count only where nothing changed meanwhile.
                if (now := memory.read()) == memory.read():
                    most[1] = max(most[1], sum(now))
                time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        asked = [("abc"[number % 3], number % 7) for number in range(300)]
        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(lambda one: ask(server, *one), asked))
        ended.set()
        watcher.join()
        assert found == [expected[one] for one in asked]
        # The engines' books, and the kernel: one was awake, and never two.
        assert max(needs) <= most[0] <= LIMIT, (most, needs)
        assert max(needs) <= most[1] <= LIMIT, (most, needs)
        shown = server.operators.get("/models").json()
        assert shown["device_memory"] == LIMIT
        assert 3 <= len(shown["decisions"]) <= 200
        assert all(one["slept"] != one["for_model"] and one["reason"] for one in shown["decisions"])
        awake = [one for one in shown["models"] if one["state"] == "running"]
        assert len(awake) == 1
        assert all("was asked for" in one["reason"] for one in shown["models"] if one not in awake)


def test_a_busy_model_ends_what_it_has_before_it_makes_way(start: Any, models: dict[str, str]) -> None:
    pair = {name: models[name] for name in "ab"}
    with start(pair, SETTINGS, budget=lambda: DeviceBudget(LIMIT, min_awake=0.0)) as server:
        assert server.model("a").need < LIMIT < 2 * server.model("a").need
        body: Any = {"model": "a", "prompt": [1, 2], "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(server.openai.completions.create, **body)
            while not server.model("a").in_progress:
                time.sleep(0.002)
            other = pool.submit(ask, server, "b", 1)
            answer = long.result()
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 400
            assert len(other.result()) == 6


def test_a_paused_model_wakes_while_another_waits_for_its_room(start: Any, models: dict[str, str]) -> None:
    pair = {name: models[name] for name in "ab"}
    with start(pair, SETTINGS, budget=lambda: DeviceBudget(LIMIT, min_awake=0.5)) as server:
        assert len(ask(server, "a", 0)) == 6
        server.operators.post("/pause", params={"model": "a"}).raise_for_status()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, server, "b", 1)
            while not server.model("b").waiting:
                time.sleep(0.002)
            second = pool.submit(ask, server, "a", 2)
            assert [len(one.result(60)) for one in (second, first)] == [6, 6]


def test_a_model_that_is_paused_amid_requests_does_not_make_way(start: Any, models: dict[str, str]) -> None:
    pair = {name: models[name] for name in "ab"}
    with start(pair, SETTINGS, budget=lambda: DeviceBudget(LIMIT, min_awake=0.0)) as server:
        body: Any = {"model": "a", "prompt": [1, 2], "max_tokens": 500, "extra_body": {"ignore_eos": True}}
        with ThreadPoolExecutor(2) as pool:
            ask(server, "a", 0)
            long = pool.submit(server.openai.completions.create, **body)
            while not server.call(server.model("a").llm.stats()).running:
                time.sleep(0.002)
            server.operators.post("/pause", params={"model": "a"}).raise_for_status()
            other = pool.submit(ask, server, "b", 1)
            time.sleep(0.2)
            assert [long.done(), other.done()] == [False, False]
            server.operators.post("/resume", params={"model": "a"}).raise_for_status()
            answer = long.result(60)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 500
            assert len(other.result(60)) == 6


def test_a_model_larger_than_the_budget_is_said_at_the_start(start: Any, models: dict[str, str]) -> None:
    with (
        pytest.raises(DeviceOutOfMemory, match="--device-memory"),
        start({"a": models["a"]}, SETTINGS, budget=lambda: DeviceBudget(8 * MIB, min_awake=0.0)),
    ):
        pass
