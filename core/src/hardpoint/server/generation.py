"""What the routes that generate text share: from a request's fields to sampling parameters, and from outputs to the parts of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import fields, replace
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypedDict, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.outputs import PositionLogprobs, RequestOutput
from hardpoint.interfaces.errors import InvalidSamplingParams
from hardpoint.sampling import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from hardpoint.server.errors import ApiError
from hardpoint.server.http import event_stream, until_gone
from hardpoint.server.protocol import CachedTokens, CompletionRequest, Sampling, StreamOptions, TopLogprob, Usage
from hardpoint.server.served_model import WhenAsleep
from hardpoint.validation import INT32_MAX

T = TypeVar("T")

_OTHERWISE_MADE = {"logit_bias", "logprobs", "max_tokens", "structured_outputs"}
# Sampling parameters that a request has as fields of the same name and meaning.
_SAME = tuple(
    one.name
    for one in fields(SamplingParams)
    if one.name in CompletionRequest.model_fields and one.name not in _OTHERWISE_MADE
)
_OF_BEAMS = ("n", "temperature", "ignore_eos", "include_stop_str_in_output")
# Parameters that a beam search is allowed to have and ignores.
_NEUTRAL_FOR_BEAMS = ("seed", "top_p", "top_k", "min_p", "skip_special_tokens", "spaces_between_special_tokens")
_MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""
TIMEOUT_HEADER, ASLEEP_HEADER = "X-Request-Timeout", "X-When-Asleep"


class Limits(TypedDict, total=False):
    """What a request's headers say: seconds that it may take, and what becomes of it while its model sleeps."""

    timeout: float
    when_asleep: WhenAsleep


def sampling_params(request: Sampling, defaults: SamplingParams, **more: Any) -> SamplingParams:
    """Return what a request asks for, over what the model's publisher recommends; raises ApiError.

    Args:
        more: parameters that are called otherwise in the request.
    """
    given = {name: value for name in _SAME if (value := getattr(request, name, None)) is not None}
    if request.logit_bias:
        given["logit_bias"] = {_token_id(token): bias for token, bias in request.logit_bias.items()}
    if (structure := structured_outputs(request)) is not None:
        given["structured_outputs"] = structure
    given["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return changed(defaults, request, given | more)


def recommended_most_tokens(defaults: SamplingParams) -> int | None:
    """Return how many tokens an answer has at most where a request does not say it; None where the publisher recommends nothing."""
    return None if defaults.max_tokens == SamplingParams().max_tokens else defaults.max_tokens


def changed(defaults: SamplingParams, request: BaseModel, given: Mapping[str, Any]) -> SamplingParams:
    """Return parameters with some changed as a request asks for; raises ApiError, which names the request's field."""
    try:
        return defaults.clone(**given)
    except InvalidSamplingParams as error:
        # What is wrong begins with the parameter's name.
        name = error.problem.partition(" ")[0]
        raise ApiError(
            400, str(error), "invalid_value", name if name in type(request).model_fields else None
        ) from error


def check_most_tokens(name: str, most: int | None) -> None:
    """Raise ApiError where a request's field of this name, which is `max_tokens` of the parameters, is too small or too large."""
    if most is not None and not 1 <= most <= INT32_MAX:
        message = f"{name} must be an integer in 1..{INT32_MAX}: {name}={most}"
        raise ApiError(400, message, "invalid_value", param=name)


def beam_search_params(request: Sampling, max_tokens: int) -> BeamSearchParams | None:
    """Return how a request searches; None where it asks for no beam search. Raises InvalidSamplingParams, ApiError.

    Args:
        max_tokens: that it asks for, or may have.
    """
    if not request.use_beam_search:
        return None
    others = [*_SAME, "logit_bias", "response_format", "structured_outputs", "tools"]
    others += ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "echo"]
    for name in set(others).difference(_OF_BEAMS, _NEUTRAL_FOR_BEAMS):
        if getattr(request, name, None):
            raise ApiError(400, f"{name}: not with use_beam_search", "invalid_value", param=name)
    given = {name: value for name in _OF_BEAMS[1:] if (value := getattr(request, name)) is not None}
    return BeamSearchParams(
        beam_width=1 if request.n is None else request.n,
        max_tokens=max_tokens,
        length_penalty=request.length_penalty,
        **given,
    )


def with_logprobs(output: RequestOutput, count: int | None) -> RequestOutput:
    """Return what a beam search found with the log probabilities of so many other candidates for each token.

    Args:
        count: None for no log probabilities at all, -1 for those of all candidates.
    """
    most = None if count is None or count < 0 else 1 + count

    def shown(positions: Sequence[PositionLogprobs]) -> Sequence[PositionLogprobs] | None:
        return None if count is None else [dict(islice(one.items(), most)) for one in positions]

    outputs = [replace(one, logprobs=shown(one.logprobs or ())) for one in output.outputs]
    return replace(output, outputs=outputs)


def structured_outputs(request: Sampling) -> StructuredOutputsParams | None:
    """Return what a request's text must match, by whichever of the fields it says it; raises InvalidSamplingParams, ApiError."""
    given: dict[str, dict[str, Any]] = {
        f"guided_{name}": {name: value}
        for name in ("json", "regex", "choice", "grammar")
        if (value := getattr(request, f"guided_{name}")) is not None
    }
    if request.structured_outputs is not None:
        given["structured_outputs"] = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    shape = request.response_format
    if shape is not None and shape.type == "json_object":
        given["response_format"] = {"json_object": True}
    elif shape is not None and shape.type == "json_schema":
        if shape.json_schema is None:
            raise ApiError(400, "response_format.json_schema: it is missing", "invalid_value", param="response_format")
        given["response_format"] = {"json": shape.json_schema.json_schema or {}}
    if len(given) > 1:
        names = " and ".join(sorted(given))
        raise ApiError(400, f"{names}: at most one of them", "invalid_value", param=max(given))
    return StructuredOutputsParams(**next(iter(given.values()))) if given else None


def _token_id(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise ApiError(400, f"logit_bias: '{text[:50]}' is not a token id", "invalid_value", param="logit_bias")


def stream_options(request: Sampling) -> StreamOptions:
    """Return how a request wants its stream; raises ApiError where it wants none."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only with stream=true", "invalid_value", param="stream_options")
    return request.stream_options or StreamOptions()


def request_limits(request: Request) -> Limits:
    """Return what a request's headers say of its time limit, and of a model that sleeps; raises ApiError."""
    limits = Limits()
    timeout, asleep = request.headers.get(TIMEOUT_HEADER), request.headers.get(ASLEEP_HEADER)
    if timeout is not None:
        try:
            limits["timeout"] = float(timeout)
        except ValueError:
            limits["timeout"] = -1.0
        if not 0 < limits["timeout"] <= 1e9:
            raise ApiError(400, f"{TIMEOUT_HEADER}: seconds above 0 are needed", "invalid_value", param=TIMEOUT_HEADER)
    if asleep is not None:
        if asleep not in set(WhenAsleep):
            message = f"{ASLEEP_HEADER}: one of {', '.join(WhenAsleep)} is needed"
            raise ApiError(400, message, "invalid_value", param=ASLEEP_HEADER)
        limits["when_asleep"] = WhenAsleep(asleep)
    return limits


class Counted:
    """The tokens of one HTTP request, over its prompts, as its outputs come."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take a delta or the only output of a prompt."""
        self._prompts[index] = len(output.prompt_token_ids), output.num_cached_tokens
        for one in output.outputs:
            self._completion += len(one.token_ids)

    def usage(self) -> Usage:
        """Return the counts until now."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._completion,
            total_tokens=prompt + self._completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(cached for _, cached in self._prompts.values())),
        )


def top_logprobs(position: PositionLogprobs, detokenizer: Detokenizer) -> list[TopLogprob]:
    """Return one position's log probabilities, the sampled token first."""
    return [
        TopLogprob(
            token=detokenizer.token_text(token_id) if one.decoded_token is None else one.decoded_token,
            logprob=max(one.logprob, _MIN_LOGPROB),
            bytes=list(detokenizer.token_bytes(token_id)),
        )
        for token_id, one in position.items()
    ]


class Answer(Protocol):
    """The answer to one request, either way."""

    async def whole(self) -> BaseModel:
        """Return it as one."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield it as server-sent events."""


async def respond(request: Request, answer: Answer, stream: bool | None) -> Response:
    """Return the response to a request; its work ends when the client leaves."""
    if stream:
        return await event_stream(request, answer.events())
    done = await until_gone(request.receive, answer.whole())
    return Response(done.model_dump_json(exclude_unset=True), media_type="application/json")


async def entered(stack: AsyncExitStack, contexts: Sequence[AbstractAsyncContextManager[T]]) -> list[T]:
    """Enter contexts side by side, since each may wait for the engine; where one fails, those that were entered end with the stack."""
    if len(contexts) == 1:
        return [await stack.enter_async_context(contexts[0])]
    try:
        async with asyncio.TaskGroup() as group:
            entering = [group.create_task(stack.enter_async_context(one)) for one in contexts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in entering]


def numbered(iterators: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Return an iterator over (index of the iterator, item) of several, as items come."""
    return _Numbered(iterators[0]) if len(iterators) == 1 else _merged(iterators)


class _Numbered(Generic[T]):
    """Iterates over one iterator, which takes less than to look which of several has an item."""

    def __init__(self, iterator: AsyncIterator[T]) -> None:
        self._iterator = iterator

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, T]:
        return 0, await self._iterator.__anext__()


async def _merged(iterators: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    waiting = {asyncio.ensure_future(anext(one)): index for index, one in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
