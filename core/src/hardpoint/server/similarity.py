"""`/score` and `/rerank`: how well texts fit, by a head or by the cosine of embeddings, under the fields that vLLM's users know."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from hardpoint.engine.outputs import ScoringRequestOutput
from hardpoint.engine.pooling import cosine_score
from hardpoint.sampling import PoolingParams
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import Limits, request_limits
from hardpoint.server.http import until_gone
from hardpoint.server.pooling import pooled, usage
from hardpoint.server.protocol import Inert, Usage, new_id, now
from hardpoint.server.served_model import ServedModel


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    user: Inert = None


class ScoreRequest(_Request):
    """`POST /score`: one text with each of several, or pairs of two lists of one length."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(BaseModel):
    """A text to rank."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str


class RerankRequest(_Request):
    """`POST /rerank`: documents by how well they fit a query.

    Attributes:
        top_n: how many of the best are returned; None for all.
        return_documents: with their texts.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool = True


class Score(BaseModel):
    """How well two texts fit: a probability of the model's head, or the cosine of their embeddings, in [-1, 1]."""

    index: int
    object: str
    score: float


class Scores(BaseModel):
    """The answer of `/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Ranked(BaseModel):
    """A document's place among those of the request, and how well it fits; see `Score`."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(BaseModel):
    """The answer of `/rerank`, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


def router(fleet: Fleet) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/score", response_model=Scores)
    @routes.post("/v1/score", response_model=Scores)
    async def score(body: ScoreRequest, request: Request) -> Response:
        work = _score(fleet.asked(body.model), body, request_limits(request))
        return Response((await until_gone(request.receive, work)).model_dump_json(), media_type="application/json")

    @routes.post("/rerank", response_model=Ranking)
    @routes.post("/v1/rerank", response_model=Ranking)
    @routes.post("/v2/rerank", response_model=Ranking)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        work = _rerank(fleet.asked(body.model), body, request_limits(request))
        return Response((await until_gone(request.receive, work)).model_dump_json(), media_type="application/json")

    return routes


async def _score(model: ServedModel, body: ScoreRequest, limits: Limits) -> Scores:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not first or len(first) not in (1, len(second)):
        found = f"{len(first)} and {len(second)} texts"
        raise ApiError(400, f"text_1: one text, or as many as text_2 has: {found}", "invalid_value", param="text_1")
    made, tokens = await _scores(model, first, second, body, limits)
    return Scores(
        id=new_id("score"),
        object="list",
        created=now(),
        model=model.name,
        data=[Score(index=index, object="score", score=score) for index, score in enumerate(made)],
        usage=tokens,
    )


async def _rerank(model: ServedModel, body: RerankRequest, limits: Limits) -> Ranking:
    if not body.documents:
        raise ApiError(400, "documents: an empty list", "invalid_value", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, "top_n: at least 1 is needed", "invalid_value", param="top_n")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    made, tokens = await _scores(model, [body.query], texts, body, limits)
    found = [
        Ranked(index=index, relevance_score=score, document=Document(text=text) if body.return_documents else None)
        for index, (text, score) in enumerate(zip(texts, made, strict=True))
    ]
    found.sort(key=lambda one: -one.relevance_score)
    return Ranking(id=new_id("rerank"), model=model.name, results=found[: body.top_n], usage=tokens)


async def _scores(
    model: ServedModel, first: list[str], second: list[str], body: _Request, limits: Limits
) -> tuple[list[float], Usage]:
    """Return how well texts fit, as `LLM.score` says it, and how many tokens they have; the first text may be one for all others."""
    own, truncate = model.llm.pooling_model, body.truncate_prompt_tokens
    params = own.check_scores(PoolingParams(use_activation=body.use_activation, truncate_prompt_tokens=truncate))
    times = len(second) // len(first)
    if own.scores_pairs:
        pairs = zip(first * times, second, strict=True)
        prompts = [await model.tokenize_pair(one, other, truncate=truncate) for one, other in pairs]
        found = await pooled(model, prompts, params, limits)
        return [ScoringRequestOutput.from_base(one).outputs.score for one in found], usage(found)
    prompts = [await model.tokenize(one, reserve=0, truncate=truncate) for one in (*first, *second)]
    found = await pooled(model, prompts, params, limits)
    both = zip(found[: len(first)] * times, found[len(first) :], strict=True)
    return [cosine_score(one, other, ()).outputs.score for one, other in both], usage(found)
