"""Routes that generate nothing: embeddings, tokens of texts and texts of tokens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.interfaces.batch import FloatArray
from hardpoint.sampling import PoolingParams
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import request_limits
from hardpoint.server.http import until_gone
from hardpoint.server.protocol import (
    Detokenized,
    DetokenizeRequest,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    TokenizeRequest,
    Tokens,
    Usage,
)
from hardpoint.server.served_model import ServedModel, WhenAsleep


def router(fleet: Fleet) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=Embeddings)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        limits = request_limits(request)
        work = _embed(fleet.get(body.model), body, limits.get("when_asleep"))
        found = await until_gone(request.receive, work)
        return Response(found.model_dump_json(), media_type="application/json")

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        model = fleet.get(body.model)
        prompt = await _tokenized(model, body)
        strings = [model.llm.decode([one]) for one in prompt.token_ids] if body.return_token_strs else None
        longest = model.llm.info.max_model_len
        return Tokens(count=len(prompt.token_ids), max_model_len=longest, tokens=prompt.token_ids, token_strs=strings)

    @routes.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        return Detokenized(prompt=fleet.get(body.model).llm.decode(body.tokens))

    return routes


async def vectors(
    model: ServedModel,
    inputs: Sequence[str | list[int]],
    when_asleep: WhenAsleep | None,
    *,
    normalize: bool = True,
    truncate: int | None = None,
) -> tuple[list[FloatArray], int]:
    """Return the embeddings of some inputs, and how many tokens all have; errors as for `ServedModel.embed`."""
    params = PoolingParams(normalize=normalize, truncate_prompt_tokens=truncate)
    async with model.taken(len(inputs)):
        prompts = [await model.tokenize(one, reserve=0, truncate=truncate) for one in inputs]
        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(model.embed(prompt, params, when_asleep)) for prompt in prompts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return [one.result().outputs.embedding for one in made], tokens


async def _embed(model: ServedModel, body: EmbeddingRequest, when_asleep: WhenAsleep | None) -> Embeddings:
    given = body.input
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not inputs:
        raise ApiError(400, "input: an empty list", "invalid_value", param="input")
    made, tokens = await vectors(model, inputs, when_asleep, normalize=body.normalize)  # type: ignore[arg-type]
    return Embeddings(
        data=[Embedding(index=index, embedding=_written(one, body.encoding_format)) for index, one in enumerate(made)],
        model=model.name,
        usage=Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens),
    )


def _written(vector: FloatArray, encoding: str | None) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()


async def _tokenized(model: ServedModel, body: TokenizeRequest) -> TokenizedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages is needed", "invalid_value", param="prompt")
    if body.prompt is not None:
        return await model.tokenize(body.prompt, add_special_tokens=body.add_special_tokens, reserve=0)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages or ()]
    return await model.apply_template(messages, add_generation_prompt=body.add_generation_prompt)
