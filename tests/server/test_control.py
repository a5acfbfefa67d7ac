"""What operators ask for: sleep, wake and weights over HTTP, as operations that say how they went."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from hardpoint_conformance.tiny_model import Shape, tiny_model
from tests.server.conftest import Running
from tests.server.test_robust import LONG, running, until

PROMPT = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}


def test_a_profile_is_asked_for_by_operators_and_lies_where_the_server_was_told(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARDPOINT_PROFILE_DIR", str(tmp_path))
    assert server.users.post("/start_profile").status_code == 404
    server.operators.post("/start_profile").raise_for_status()
    assert server.operators.post("/start_profile").status_code == 400
    server.openai.completions.create(model="demo", prompt="x", max_tokens=2)
    assert list(map(Path, server.operators.post("/stop_profile").json()["result"])) == list(tmp_path.iterdir())


def text(server: Running) -> str:
    answer = server.users.post("/v1/completions", json=PROMPT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_level_2_serves_nothing_until_the_weights_are_back(server: Running) -> None:
    before = text(server)
    slept = server.operators.post("/models/demo/sleep", json={"level": 2}).json()["result"]
    assert slept["weights_valid"] is False
    shown = server.operators.get("/models/demo").json()
    assert (shown["state"], "weights" in shown["sleep"]["asleep"]) == ("sleeping", True)
    assert 'engine_sleep_state{model_name="demo",sleep_state="discard_all"} 1.0' in server.users.get("/metrics").text
    server.operators.post("/wake_up", params={"tags": ["weights", "kv_cache", "buffers", "default"]})
    assert code(server.users.post("/v1/completions", json=PROMPT)) == (503, "weights_missing")
    assert server.users.get("/ready").status_code == 200
    reloaded = server.operators.post("/collective_rpc", json={"method": "reload_weights"}).json()
    assert reloaded["result"] > 0
    assert text(server) == before


def test_weights_by_upload_shared_memory_and_path(start: Any) -> None:
    shape = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=256, max_len=256)
    first, second = tiny_model(shape), tiny_model(replace(shape, seed=2))
    body = {"prompt": [1, 2, 3, 4], "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    with start({"tiny": str(first.path)}, {"skip_tokenizer_init": True, "max_model_len": 256}) as server:

        def tokens() -> Any:
            return server.users.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

        def update(**place: str) -> httpx.Response:
            return server.operators.post("/models/tiny/weights", json=place)

        before = tokens()
        content = save({name: tensor.contiguous() for name, tensor in second.weights.items()})
        done = server.operators.put("/models/tiny/weights", content=content).json()
        assert done["state"] == "succeeded", done
        changed = tokens()
        assert changed != before
        server.operators.post("/models/tiny/reload", json={"model": str(second.path)})
        assert tokens() == changed
        server.operators.post("/models/tiny/reload", json={"model": str(first.path)})
        assert tokens() == before
        # What shm_open makes on Linux; Python's own class would leave its tracker's process.
        memory = Path("/dev/shm", f"hardpoint-test-{os.getpid()}")
        memory.write_bytes(content)
        try:
            assert update(shared_memory=memory.name).json()["state"] == "succeeded"
        finally:
            memory.unlink()
        assert tokens() == changed
        assert code(update(shared_memory=memory.name)) == (400, "invalid_model")
        assert update(file=f"{first.path}/model.safetensors").json()["state"] == "succeeded"
        assert tokens() == before
        for wrong_place in (
            {},
            {"shared_memory": "../a"},
            {"shared_memory": ".."},
            {"file": "a", "shared_memory": "b"},
        ):
            assert code(update(**wrong_place)) == (400, "invalid_value")
        assert code(server.operators.put("/models/tiny/weights", content=b"x" * 100)) == (400, "invalid_weights")
        wrong = save({"model.norm.weight": torch.zeros(7)})
        assert code(server.operators.put("/models/tiny/weights", content=wrong))[0] == 400
        assert code(server.operators.post("/models/tiny/reload", json={"model": "/nowhere"})) == (400, "invalid_model")
        assert tokens() == before


def test_an_upload_that_finds_no_room_or_ends_early_changes_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = text(server)
    full = partial(open, "/dev/full", "wb")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", lambda suffix: full())
        assert code(server.operators.put("/models/demo/weights", content=b"x" * 100)) == (507, "no_space")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def half() -> Iterator[bytes]:
        yield b"x" * 100
        until(lambda: any(tmp_path.iterdir()))
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        server.operators.put("/models/demo/weights", content=half())
    until(lambda: not any(tmp_path.iterdir()))
    assert text(server) == before


def test_a_sleep_that_waits_is_an_operation_and_can_be_given_up(slow_server: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(slow_server.openai.completions.create, **LONG | {"max_tokens": 500})
        until(lambda: running(slow_server) == 1)
        begun = slow_server.operators.post(
            "/models/demo/sleep", params={"wait": "false"}, json={"level": 0, "mode": "wait"}
        )
        assert begun.status_code == 202
        place = begun.headers["location"]
        assert slow_server.operators.get(place).json()["state"] == "running"
        until(lambda: slow_server.operators.get("/models/demo").json()["state"] == "draining")
        given_up = slow_server.operators.delete(place).json()
        assert given_up["state"] == "cancelled"
        assert code(slow_server.operators.delete(place)) == (409, "not_cancellable")
        answer = busy.result()
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 500
    assert slow_server.operators.get("/models/demo").json()["state"] == "running"
    assert code(slow_server.operators.get("/operations/none")) == (404, "operation_not_found")
    kinds = [one["kind"] for one in slow_server.operators.get("/operations").json()["operations"]]
    assert kinds[-1] == "sleep"


@pytest.mark.parametrize("tier", ["host", "source"])
def test_the_state_says_where_the_bytes_of_each_tag_are(server: Running, tier: str) -> None:
    def memory(tag: str) -> dict[str, Any]:
        return dict(server.operators.get("/models/demo").json()["sleep"]["memory"][tag])

    def metric(place: str) -> float:
        name = f'hardpoint:memory_bytes{{model_name="demo",place="{place}",tag="weights"}} '
        return float(server.users.get("/metrics").text.partition(name)[2].partition("\n")[0])

    awake = memory("weights")
    assert awake["mapped"] >= awake["allocated"] > 0
    server.operators.post("/models/demo/sleep", json={"level": 1, "tier": tier})
    asleep = memory("weights")
    assert (asleep["allocated"], asleep["mapped"]) == (awake["allocated"], 0)
    assert 0.9 * awake["allocated"] < asleep["copies"][tier] <= awake["allocated"]
    assert memory("kv_cache") == {"allocated": memory("kv_cache")["allocated"], "mapped": 0, "copies": {}}
    assert metric(tier) == asleep["copies"][tier]
    server.operators.post("/models/demo/wake")
    assert memory("weights")["mapped"] == awake["mapped"]
    assert metric("device") == awake["mapped"]
    assert metric("source") == 0


def test_pause_and_resume(server: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        server.operators.post("/pause")
        assert server.operators.get("/is_sleeping").json() == {"is_sleeping": True}
        waits = pool.submit(server.users.post, "/v1/completions", json=PROMPT, headers={"X-When-Asleep": "queue"})
        assert server.operators.post("/resume").json()["state"] == "succeeded"
        assert waits.result().status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("POST", "/models/other/sleep", {}, 404, "model_not_found"),
        ("POST", "/models/demo/sleep", {"level": 3}, 400, "invalid_value"),
        ("POST", "/models/demo/sleep", {"levle": 1}, 400, "unknown_field"),
        ("POST", "/models/demo/sleep", {"tags": ["wieghts"]}, 400, "unknown_tag"),
        ("POST", "/models/demo/sleep", {"level": 2, "kv": "preserve"}, 400, "sleep_refused"),
        ("POST", "/models/demo/wake", {"tags": []}, 400, "sleep_refused"),
        ("POST", "/models/demo/wake", {"tags": ["\ud800"]}, 400, "invalid_value"),
        ("POST", "/models/demo/sleep", {"tags": ["\ud800"]}, 400, "invalid_value"),
        ("POST", "/models/demo/reload", {"model": "\ud800"}, 400, "invalid_value"),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "\ud800"}, 400, "invalid_value"),
        ("POST", "/collective_rpc", {"method": "__class__"}, 400, "invalid_value"),
        ("POST", "/collective_rpc", {"method": "reload_weights", "args": ["/etc"]}, 400, "invalid_value"),
        ("POST", "/sleep?level=7", None, 400, "invalid_value"),
        ("GET", "/nothing", None, 404, "unknown_path"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    server: Running, method: str, path: str, body: Any, status: int, error: str
) -> None:
    # Not as httpx writes JSON, which has no lone surrogates.
    content = None if body is None else json.dumps(body)
    answer = server.operators.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert code(answer) == (status, error)
    assert server.operators.get("/is_sleeping").json() == {"is_sleeping": False}


def test_users_are_no_operators(server: Running) -> None:
    assert server.users.post("/sleep").status_code == 404
    assert server.users.post("/models/demo/sleep").status_code == 404
    url = server.server.control_url
    assert url is not None
    for headers in ({}, dict(server.users.headers)):
        assert httpx.post(f"{url}/sleep", headers=headers).status_code == 401
