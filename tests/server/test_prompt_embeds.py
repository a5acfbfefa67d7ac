"""Completions of prompts that are embeddings, as vLLM's clients send them."""

from __future__ import annotations

import io
import zipfile
from base64 import b64encode
from collections import OrderedDict
from typing import Any

import pytest
import torch

from tests.server.conftest import Running


def saved(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return b64encode(file.getvalue()).decode()


def zeros(size: int) -> str:
    """Return a small archive of many bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(size))
    return b64encode(file.getvalue()).decode()


class Opens:
    """Runs a function where it is read without care."""

    def __reduce__(self) -> Any:
        return open, ("/dev/null",)


ROWS = torch.randn(5, 576, generator=torch.Generator().manual_seed(1)) / 10
BODY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_embeddings_are_prompts_beside_others_and_come_first(server: Running) -> None:
    one = server.users.post("/v1/completions", json=BODY | {"prompt_embeds": saved(ROWS)}).json()
    assert one["usage"]["prompt_tokens"] == 5
    text = {"prompt": "The capital of France is"}
    alone = server.users.post("/v1/completions", json=BODY | text).json()
    both = BODY | {"prompt_embeds": [saved(ROWS), saved(ROWS.half())], **text}
    found = [choice["text"] for choice in server.users.post("/v1/completions", json=both).json()["choices"]]
    assert found[0] == one["choices"][0]["text"]
    assert found[2] == alone["choices"][0]["text"] != found[0]
    asked = {"prompt_embeds": saved(ROWS), "ignore_eos": True}
    parts = server.openai.completions.create(
        model="demo", prompt=[], temperature=0, max_tokens=4, stream=True, extra_body=asked
    )
    assert "".join(choice.text for part in parts for choice in part.choices) == found[0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt_embeds": "not base64!"}, "not base64"),
        ({"prompt_embeds": b64encode(b"no archive").decode()}, "as torch.save writes it"),
        ({"prompt_embeds": zeros(64 << 20)}, "too large"),
        ({"prompt_embeds": saved(Opens())}, "cannot be read as a tensor"),
        ({"prompt_embeds": saved(OrderedDict(a=ROWS))}, "must be a tensor"),
        ({"prompt_embeds": saved(ROWS[:, :3])}, "must be a tensor"),
        ({"prompt_embeds": saved(ROWS * torch.inf)}, "no finite numbers"),
        ({"prompt_embeds": saved(ROWS), "echo": True}, "embeddings have no text"),
        ({"prompt_embeds": []}, "prompt: it is missing"),
        ({}, "prompt: it is missing"),
    ],
)
def test_what_is_no_tensor_of_embeddings_is_refused(server: Running, body: dict[str, Any], told: str) -> None:
    answer = server.users.post("/v1/completions", json=BODY | body)
    assert (answer.status_code, told in answer.text) == (400, True), answer.text
