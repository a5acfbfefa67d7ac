"""`/v1/score` and `/v1/rerank`: how alike texts are, by the cosine of their embeddings, under the fields that vLLM's users know."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import request_limits
from hardpoint.server.http import until_gone
from hardpoint.server.protocol import Inert, Usage, new_id, now
from hardpoint.server.served_model import ServedModel, WhenAsleep
from hardpoint.server.texts import vectors


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    user: Inert = None


class ScoreRequest(_Request):
    """`POST /v1/score`: one text with each of several, or pairs of two lists of one length."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(BaseModel):
    """A text to rank."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str


class RerankRequest(_Request):
    """`POST /v1/rerank`: documents by how well they fit a query.

    Attributes:
        top_n: how many of the best are returned; None for all.
        return_documents: with their texts.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool = True


class Score(BaseModel):
    """How alike two texts are, in [-1, 1]."""

    index: int
    object: str
    score: float


class Scores(BaseModel):
    """The answer of `/v1/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Ranked(BaseModel):
    """A document's place among those of the request, and how well it fits, in [-1, 1]."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(BaseModel):
    """The answer of `/v1/rerank`, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


def router(fleet: Fleet) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/v1/score", response_model=Scores)
    async def score(body: ScoreRequest, request: Request) -> Response:
        work = _score(fleet.get(body.model), body, request_limits(request).get("when_asleep"))
        return Response((await until_gone(request.receive, work)).model_dump_json(), media_type="application/json")

    @routes.post("/v1/rerank", response_model=Ranking)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        work = _rerank(fleet.get(body.model), body, request_limits(request).get("when_asleep"))
        return Response((await until_gone(request.receive, work)).model_dump_json(), media_type="application/json")

    return routes


async def _score(model: ServedModel, body: ScoreRequest, when_asleep: WhenAsleep | None) -> Scores:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not first or len(first) not in (1, len(second)):
        found = f"{len(first)} and {len(second)} texts"
        raise ApiError(400, f"text_1: one text, or as many as text_2 has: {found}", "invalid_value", param="text_1")
    made, tokens = await vectors(model, [*first, *second], when_asleep)
    pairs = zip(made[: len(first)] * (len(second) // len(first)), made[len(first) :], strict=True)
    return Scores(
        id=new_id("score"),
        object="list",
        created=now(),
        model=model.name,
        data=[Score(index=index, object="score", score=float(a @ b)) for index, (a, b) in enumerate(pairs)],
        usage=_usage(tokens),
    )


async def _rerank(model: ServedModel, body: RerankRequest, when_asleep: WhenAsleep | None) -> Ranking:
    if not body.documents:
        raise ApiError(400, "documents: an empty list", "invalid_value", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, "top_n: at least 1 is needed", "invalid_value", param="top_n")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    (query, *made), tokens = await vectors(model, [body.query, *texts], when_asleep)
    found = [
        Ranked(
            index=index,
            relevance_score=float(query @ vector),
            document=Document(text=text) if body.return_documents else None,
        )
        for index, (text, vector) in enumerate(zip(texts, made, strict=True))
    ]
    found.sort(key=lambda one: -one.relevance_score)
    return Ranking(id=new_id("rerank"), model=model.name, results=found[: body.top_n], usage=_usage(tokens))


def _usage(tokens: int) -> Usage:
    return Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)
