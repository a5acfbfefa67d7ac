"""`/v1/score` and `/v1/rerank` against the cosine of what `/v1/embeddings` returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server.conftest import Running

TEXTS = [
    "The capital of France is Paris.",
    "def fibonacci(n):",
    "Berlin is the capital of Germany.",
    "Bananas are yellow.",
]
QUERY = "Which city is the capital of France?"


@pytest.fixture(scope="module")
def cosines(server: Running) -> list[float]:
    """Of the query with each text."""
    made = server.openai.embeddings.create(model="demo", input=[QUERY, *TEXTS], encoding_format="float").data
    query, *others = [np.asarray(one.embedding) / np.linalg.norm(one.embedding) for one in made]
    return [float(query @ one) for one in others]


def ask(server: Running, path: str, **body: Any) -> Any:
    answer = server.users.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_scores_are_cosines(server: Running, cosines: list[float]) -> None:
    one_with_many = ask(server, "score", text_1=QUERY, text_2=TEXTS)
    assert [one["score"] for one in one_with_many["data"]] == pytest.approx(cosines, abs=1e-5)
    assert [one["index"] for one in one_with_many["data"]] == [0, 1, 2, 3]
    pairs = ask(server, "score", text_1=[QUERY, TEXTS[1]], text_2=[TEXTS[0], TEXTS[1]])
    assert [one["score"] for one in pairs["data"]] == pytest.approx([cosines[0], 1.0], abs=1e-5)
    single = ask(server, "score", model="demo", text_1=QUERY, text_2=TEXTS[2])
    assert [one["score"] for one in single["data"]] == pytest.approx([cosines[2]], abs=1e-5)
    assert single["usage"]["total_tokens"] > 10


def test_documents_in_order_of_their_scores(server: Running, cosines: list[float]) -> None:
    best_first = sorted(range(len(TEXTS)), key=lambda index: -cosines[index])
    ranking = ask(server, "rerank", query=QUERY, documents=[TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]])
    assert [one["index"] for one in ranking["results"]] == best_first
    assert [one["document"]["text"] for one in ranking["results"]] == [TEXTS[index] for index in best_first]
    assert [one["relevance_score"] for one in ranking["results"]] == pytest.approx(sorted(cosines)[::-1], abs=1e-5)
    two = ask(server, "rerank", query=QUERY, documents=TEXTS, top_n=2, return_documents=False)
    assert [(one["index"], one["document"]) for one in two["results"]] == [(index, None) for index in best_first[:2]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("score", {"text_1": [], "text_2": []}, "text_1"),
        ("score", {"text_1": "a"}, "text_2"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("rerank", {"query": "a", "documents": [5]}, "documents"),
    ],
)
def test_what_cannot_be_compared_is_refused(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.users.post(f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
