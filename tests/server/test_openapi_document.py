"""What the OpenAPI documents describe, asked at random: nothing breaks the server, and all answers are as described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.test_command_interrupts import write_model
from tests.server.conftest import KEY, TOKEN, Running, serving

SMALL: Any = {"max_model_len": 64, "num_device_blocks": 32, "max_num_seqs": 8, "max_num_batched_tokens": 64}
REFUSALS = {503: "the model cannot serve now", 507: "there is not enough memory"}
"""The statuses of servers' failures that the documents declare; any other one is a defect."""
EXAMPLES = 12
LIKELY = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0.1, "maximum": 1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "minimum": 0.5, "maximum": 2},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "best_of": {"type": "integer", "minimum": 3, "maximum": 4},
    "top_k": {"type": "integer", "minimum": 0, "maximum": 50},
    "seed": {"type": "integer", "minimum": 0, "maximum": 100},
    "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 1},
    "prompt": {"anyOf": [{"type": "string", "maxLength": 20, "minLength": 1}, {"enum": [[1, 2, 3], [[1], [2, 3]]]}]},
    "input": {"anyOf": [{"type": "string", "maxLength": 20, "minLength": 1}, {"enum": [[1, 2, 3], [[1], [2, 3]]]}]},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    "allowed_token_ids": {"type": "array", "minItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    "logit_bias": {"enum": [{}, {"5": 1.0}, {"x": 1.0}]},
    "stop": {"enum": [None, "e", ["a", "b"]]},
    "model": {"enum": ["tiny", "none"]},
}
"""What fields of requests are given where they are given well: their types alone would have nearly all requests refused."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model of one layer, which operators may do anything to."""
    model = write_model(tmp_path_factory.mktemp("small") / "model.gguf")
    with serving({"tiny": model}, SMALL, when_asleep="reject") as running:
        yield running


def narrowed(part: Any) -> Any:
    """Return a document whose requests are likely ones."""
    if isinstance(part, list):
        return [narrowed(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {name: narrowed(value) for name, value in part.items()}
    if part.get("name") in ("name", "model") and "in" in part:
        found["schema"] = {"type": "string", "enum": ["tiny", "none"]}
    if str(part.get("title")).endswith("Request"):
        found["properties"] |= {name: LIKELY[name] for name in found["properties"].keys() & LIKELY.keys()}
    return found


def check(url: str, token: str) -> Counter[int]:
    """Ask everything that a server's document describes, well and badly; returns how often each status came."""
    headers = {"Authorization": f"Bearer {token}"}
    document = narrowed(httpx.get(f"{url}/openapi.json", headers=headers).json())
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    seen: Counter[int] = Counter()
    checks = [content_type_conformance, response_schema_conformance, status_code_conformance]
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                answer = case.call(headers=headers, timeout=240)
                seen[answer.status_code] += 1
                more = [] if answer.status_code in REFUSALS else [not_a_server_error]
                case.validate_response(answer, checks=[*checks, *more])

            with suppress(Unsatisfiable):  # where there is nothing that could be given badly
                ask()
    return seen


def test_the_interface_for_users(small: Running) -> None:
    seen = check(small.server.url, KEY)
    assert seen[200] > 30, seen
    assert seen[400] > 30, seen


def test_the_interface_for_operators(small: Running) -> None:
    assert small.server.control_url is not None
    seen = check(small.server.control_url, TOKEN)
    assert seen[200] > 60, seen
    assert seen[404] > 10, seen
    # Whatever they did, it can be undone.
    for path in ("wake", "resume", "reload"):
        answer = small.operators.post(f"/models/tiny/{path}")
        assert answer.status_code == 200, answer.text
    asked = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    answer = small.users.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
