"""Pictures over the server's chat completions, through the openai client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import openai
import pytest

from tests.picture_models import picture, save_picture_model
from tests.server.conftest import Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pictures")
    save_picture_model(folder)
    with serving({"pictures": str(folder)}, {"max_model_len": 256, "limit_mm_per_prompt": {"image": 2}}) as running:
        yield running


def url(seed: int) -> str:
    file = BytesIO()
    picture(seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(server: Running, *urls: str, **options: Any) -> Any:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    content = [{"type": "text", "text": "What is this?"}, *parts]
    messages: list[Any] = [{"role": "user", "content": content}]
    return server.openai.chat.completions.create(
        model="pictures", messages=messages, temperature=0, max_tokens=8, **options
    )


def test_a_picture_as_a_data_url_is_answered_and_found_again(server: Running) -> None:
    first, again, other = (ask(server, url(seed)) for seed in (1, 1, 2))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 16 > other.usage.prompt_tokens_details.cached_tokens
    streamed = ask(server, url(1), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == first.choices[0].message.content


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["http://169.254.169.254/latest/meta-data"], "not fetched over the network"),
        (["file:///etc/hostname"], "local pictures are not read"),
        (["data:image/png;base64,AAAA"], "cannot be read"),
        ([url(1)] * 3, "at most 2"),
    ],
)
def test_what_is_no_picture_is_a_bad_request(server: Running, urls: list[str], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, *urls)
    assert ask(server, url(3)).usage.completion_tokens > 0
