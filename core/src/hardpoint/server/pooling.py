"""Routes of what is made of prompts' hidden states: embeddings, labels, rewards, of texts and of tokens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import PoolingOutput, PoolingRequestOutput
from hardpoint.interfaces.batch import FloatArray
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.sampling import PoolingParams, PoolingUse
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import Limits, request_limits
from hardpoint.server.http import until_gone
from hardpoint.server.protocol import (
    Classification,
    Classifications,
    ClassifyRequest,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    Pooled,
    PooledPrompt,
    PooledRequest,
    PoolingRequest,
    Usage,
    new_id,
    now,
)
from hardpoint.server.served_model import ServedModel

Found = PoolingRequestOutput[PoolingOutput]


def router(fleet: Fleet) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=Embeddings)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await _answer(request, _embed(fleet.asked(body.model), body, request_limits(request)))

    @routes.post("/classify", response_model=Classifications)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        return await _answer(request, _classify(fleet.asked(body.model), body, request_limits(request)))

    @routes.post("/pooling", response_model=Pooled)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        return await _answer(request, _pool(fleet.asked(body.model), body, request_limits(request)))

    return routes


async def pooled(
    model: ServedModel, prompts: Sequence[TokenizedPrompt], params: PoolingParams, limits: Limits
) -> list[Found]:
    """Return what is made of some prompts; errors as for `ServedModel.encode`, and ApiError where a request was aborted."""
    async with model.taken(len(prompts)):
        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(model.encode(prompt, params, **limits)) for prompt in prompts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    found = [one.result() for one in made]
    if any(one.finish_reason == "abort" for one in found):
        # These answers have no place for a finish reason: an empty embedding would pass for one.
        told = f"the request was aborted before it was done: '{model.name}' was put to sleep, or the server ends"
        raise ApiError(503, told, "request_aborted", retry_after=5)
    return found


def usage(found: Sequence[Found]) -> Usage:
    """Return the tokens of some prompts."""
    tokens = sum(len(one.prompt_token_ids) for one in found)
    return Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)


async def _answer(request: Request, work: Any) -> Response:
    return Response((await until_gone(request.receive, work)).model_dump_json(), media_type="application/json")


async def _of_inputs(model: ServedModel, body: PooledRequest, limits: Limits, **how: Any) -> list[Found]:
    """Return what is made of a request's inputs; raises ApiError for what is not possible."""
    truncate = body.truncate_prompt_tokens
    params = PoolingParams(use_activation=body.use_activation, truncate_prompt_tokens=truncate, **how)
    try:
        model.llm.pooling_model.plan(params)
    except InvalidRequest as error:
        named = next((name for name, value in how.items() if value is not None and f"{name}=" in str(error)), None)
        raise ApiError(400, str(error), "invalid_value", param=named) from error
    given = body.input
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not inputs:
        raise ApiError(400, "input: an empty list", "invalid_value", param="input")
    prompts = [await model.tokenize(one, reserve=0, truncate=truncate) for one in inputs]  # type: ignore[arg-type]
    return await pooled(model, prompts, params, limits)


async def _embed(model: ServedModel, body: EmbeddingRequest, limits: Limits) -> Embeddings:
    found = await _of_inputs(model, body, limits, task=PoolingUse.EMBED, dimensions=body.dimensions)
    return Embeddings(
        data=[
            Embedding(index=index, embedding=_written(one.outputs.data, body.encoding_format))
            for index, one in enumerate(found)
        ],
        model=model.name,
        usage=usage(found),
    )


async def _classify(model: ServedModel, body: ClassifyRequest, limits: Limits) -> Classifications:
    found = await _of_inputs(model, body, limits, task=PoolingUse.CLASSIFY)
    names = model.llm.pooling_model.defaults.label_names
    data = [
        Classification(
            index=index,
            label=names[int(one.outputs.data.argmax())],
            probs=one.outputs.data.tolist(),
            num_classes=len(one.outputs.data),
        )
        for index, one in enumerate(found)
    ]
    return Classifications(id=new_id("classify"), created=now(), model=model.name, data=data, usage=usage(found))


async def _pool(model: ServedModel, body: PoolingRequest, limits: Limits) -> Pooled:
    found = await _of_inputs(model, body, limits, task=body.task, dimensions=body.dimensions)
    data = [
        PooledPrompt(index=index, data=_written(one.outputs.data, body.encoding_format))
        for index, one in enumerate(found)
    ]
    return Pooled(id=new_id("pool"), created=now(), model=model.name, data=data, usage=usage(found))


def _written(values: FloatArray, encoding: str | None) -> Any:
    return base64.b64encode(values.astype("<f4").tobytes()).decode() if encoding == "base64" else values.tolist()
