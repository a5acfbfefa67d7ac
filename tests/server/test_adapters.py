"""LoRA adapters over HTTP: named as models by users, loaded and unloaded by operators while requests are served."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from hardpoint import AsyncLLM
from hardpoint.interfaces.errors import WorkerError
from hardpoint.server.metrics import Metrics
from hardpoint.server.served_model import ServedModel, ServingOptions
from tests.adapter_folders import write_adapter
from tests.leaks import Belongings
from tests.server.conftest import ENGINE, Running, serving
from tests.shallow_demo import write_shallow_demo

HIDDEN = 576


def folder_of(root: Path, seed: int) -> str:
    """Write an adapter of the demo model's first layer, which changes what it says."""
    generator = torch.Generator().manual_seed(seed)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{layer}.lora_A.weight": torch.randn(4, HIDDEN, generator=generator),
        f"{layer}.lora_B.weight": torch.randn(HIDDEN, 4, generator=generator),
    }
    return str(write_adapter(root / f"a{seed}", tensors, layers_to_transform=[0]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_shallow_demo(tmp_path_factory.mktemp("model") / "shallow.gguf")
    with serving({"demo": model}, {"enable_lora": True, "max_loras": 2}) as running:
        yield running


def text(served: Running, model: str) -> str:
    answer = served.openai.completions.create(
        model=model, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def load(served: Running, name: str, path: str) -> httpx.Response:
    return served.operators.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def unload(served: Running, name: str) -> httpx.Response:
    return served.operators.post("/v1/unload_lora_adapter", json={"lora_name": name})


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_adapters_are_models_from_load_to_unload(served: Running, tmp_path: Path) -> None:
    base = text(served, "demo")
    for seed in (1, 2):
        answer = load(served, f"a{seed}", folder_of(tmp_path, seed))
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter 'a{seed}' added successfully.")
    cards = {one["id"]: one for one in served.users.get("/v1/models").json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"demo": None, "a1": "demo", "a2": "demo"}
    texts = [text(served, name) for name in ("demo", "a1", "a2")]
    assert texts[0] == base
    assert len(set(texts)) == 3
    chat = served.openai.chat.completions.create(model="a1", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert chat.model == "a1"
    # Users load nothing.
    assert served.users.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/"}).status_code == 404
    assert code(load(served, "demo", folder_of(tmp_path, 1))) == (409, "name_taken")
    assert code(load(served, "a1", folder_of(tmp_path, 2))) == (409, "adapter_in_use")
    assert code(load(served, "b", str(tmp_path))) == (400, "invalid_adapter")
    assert unload(served, "a1").status_code == 200
    assert code(unload(served, "a1")) == (404, "adapter_not_found")
    assert code(served.users.post("/v1/completions", json={"model": "a1", "prompt": "x"})) == (404, "model_not_found")
    assert text(served, "a2") == texts[2]
    unload(served, "a2").raise_for_status()


def test_an_adapter_in_use_is_not_unloaded(served: Running, tmp_path: Path) -> None:
    load(served, "a3", folder_of(tmp_path, 3)).raise_for_status()
    body = {"model": "a3", "prompt": "x", "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": True}
    with served.users.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        shown = served.operators.get("/metrics").text
        assert 'hardpoint:lora_requests_running{lora_name="a3",model_name="demo"} 1.0' in shown
        assert 'hardpoint:lora_adapters_running{model_name="demo"} 1.0' in shown
        assert 'lora_requests_info{max_lora="2",model_name="demo",running_lora_adapters="a3",' in shown
        assert code(unload(served, "a3")) == (409, "adapter_in_use")
    unload_again = unload(served, "a3")
    while unload_again.status_code == 409:
        unload_again = unload(served, "a3")
    assert unload_again.status_code == 200


def test_a_model_starts_again_without_an_adapter_whose_folder_is_gone(served: Running, tmp_path: Path) -> None:
    for seed in (4, 5):
        load(served, f"a{seed}", folder_of(tmp_path, seed)).raise_for_status()
    kept = text(served, "a4")
    shutil.rmtree(tmp_path / "a5")
    pid = served.model().llm.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 120
    while served.model().restarts == 0:
        assert time.monotonic() < end, served.model().failure
        time.sleep(0.1)
    assert text(served, "a4") == kept
    assert code(served.users.post("/v1/completions", json={"model": "a5", "prompt": "x"})) == (404, "model_not_found")
    unload(served, "a4").raise_for_status()


def test_an_engine_is_closed_where_something_fails_after_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Belongings.now()

    async def fails(llm: AsyncLLM) -> None:
        raise WorkerError("no status")

    async def start() -> None:
        model = ServedModel("demo", "demo", ENGINE | {"backend": device}, ServingOptions(), Metrics().of("demo"))
        with pytest.raises(WorkerError):
            await model.start()

    monkeypatch.setattr(AsyncLLM, "sleep_status", fails)
    asyncio.run(start())
    assert Belongings.now().new_since(before) == []
