"""`/score`, `/rerank`, `/classify` and `/pooling`: against the cosine of what `/v1/embeddings` returns, and of a head against `LLM`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.conftest import Running, serving
from tests.vllm_scripts.models import SHAPE, write_tokenizer

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
    answer = server.users.post(f"/v1/{path}" if path in ("score", "rerank", "embeddings") else path, json=body)
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


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Any, Any]]:
    """A server of a cross-encoder; the same as transformers runs it, and its tokenizer."""
    import transformers

    folder = Path(tmp_path_factory.mktemp("reranker"))
    values = {**SHAPE, "num_key_value_heads": 4, "vocab_size": write_tokenizer(folder, pairs=True)}
    config = transformers.BertConfig(**values, id2label={0: "fits"}, label2id={"fits": 0})
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).float().eval()
    model.save_pretrained(folder)
    settings = {"hf_overrides": {"is_matryoshka": True}, "max_model_len": 128}
    with serving({"reranker": str(folder)}, settings) as running:
        yield running, model, transformers.AutoTokenizer.from_pretrained(folder)


def logit(model: Any, tokenizer: Any, *texts: str) -> float:
    with torch.inference_mode():
        encoded = tokenizer(*texts, return_token_type_ids=True, return_tensors="pt")
        return float(model(**{name: encoded[name] for name in ("input_ids", "token_type_ids")}).logits[0, 0])


def test_a_head_scores_pairs(reranker: tuple[Running, Any, Any]) -> None:
    server, model, tokenizer = reranker
    expected = [logit(model, tokenizer, QUERY, text) for text in TEXTS]
    scores = ask(server, "score", text_1=QUERY, text_2=TEXTS, use_activation=False)
    assert [one["score"] for one in scores["data"]] == pytest.approx(expected, abs=1e-4)
    best_first = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    ranking = ask(server, "/v2/rerank", query=QUERY, documents=TEXTS)
    assert [one["index"] for one in ranking["results"]] == best_first
    probabilities = torch.tensor(expected).sigmoid().sort(descending=True).values.tolist()
    assert [one["relevance_score"] for one in ranking["results"]] == pytest.approx(probabilities, abs=1e-5)


def test_labels_have_names_and_probabilities(reranker: tuple[Running, Any, Any]) -> None:
    server, model, tokenizer = reranker
    answer = ask(server, "/classify", input=TEXTS[:2], model="reranker")
    for one, text in zip(answer["data"], TEXTS, strict=False):
        probability = float(torch.tensor(logit(model, tokenizer, text)).sigmoid())
        assert (one["label"], one["num_classes"]) == ("fits", 1)
        assert one["probs"] == pytest.approx([probability], abs=1e-5)
    assert answer["usage"]["total_tokens"] == sum(len(tokenizer(text).input_ids) for text in TEXTS[:2])


def test_pooling_answers_any_task(reranker: tuple[Running, Any, Any]) -> None:
    server, _, tokenizer = reranker
    own = ask(server, "/pooling", input=TEXTS[0])["data"][0]["data"]
    assert own == ask(server, "/classify", input=TEXTS[0])["data"][0]["probs"]
    plain = ask(server, "/pooling", input=TEXTS[0], task="token_embed", dimensions=5)["data"][0]["data"]
    coded = ask(server, "/pooling", input=TEXTS[0], task="token_embed", dimensions=5, encoding_format="base64")
    values = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4").reshape(-1, 5)
    assert len(values) == len(tokenizer(TEXTS[0]).input_ids)
    np.testing.assert_allclose(values, plain, atol=1e-6)
    short = ask(server, "embeddings", input=TEXTS[0], dimensions=7)["data"][0]["embedding"]
    assert len(short) == 7
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "Give 1 to 64"),
        ("/pooling", {"input": "a", "task": "score"}, "task", "token_classify"),
        ("/pooling", {"input": "a", "dimensions": 4}, "dimensions", "dimensions is for embeddings"),
        ("/classify", {"input": []}, "input", "empty"),
        ("/classify", {"input": "a " * 99}, None, "198 tokens"),
        ("/rerank", {"query": "a " * 50, "documents": ["b " * 50]}, None, "tokens"),
    ],
)
def test_what_a_head_cannot_answer_is_refused(
    reranker: tuple[Running, Any, Any], path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = reranker[0].users.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


def test_a_model_without_a_head_has_no_labels(server: Running) -> None:
    answer = server.users.post("/classify", json={"input": "a"})
    assert answer.status_code == 400
    assert "no head that classifies" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/embeddings", {"input": ["word " * 500] * 20}),
        ("score", {"text_1": QUERY, "text_2": ["word " * 500] * 20}),
        ("rerank", {"query": QUERY, "documents": ["word " * 500] * 20}),
        ("pooling", {"input": ["word " * 500] * 20}),
    ],
)
def test_what_is_pooled_keeps_to_its_time(server: Running, path: str, body: dict[str, Any]) -> None:
    answer = server.users.post(path, json=body, headers={"X-Request-Timeout": "0.02"})
    assert answer.status_code == 408, answer.text
    assert answer.json()["error"]["code"] == "request_timeout"
