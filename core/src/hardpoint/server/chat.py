"""`POST /v1/chat/completions`: answers to conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint.server.errors import ApiError
from hardpoint.server.events import TextEvents, written
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import Counted, request_limits, respond, sampling_params, stream_options, top_logprobs
from hardpoint.server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    TokenLogprob,
    new_id,
    now,
)
from hardpoint.server.served_model import ServedModel

P = TypeVar("P", ChatChoice, ChatDelta)

_MOST_LOGPROBS = 20
"""OpenAI's limit."""


def router(fleet: Fleet) -> APIRouter:
    """Return the route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await respond(request, _Answer(fleet.get(body.model), body, request), body.stream)

    return routes


class _Answer:
    """The answer to one request."""

    def __init__(self, model: ServedModel, body: ChatRequest, request: Request) -> None:
        self._model, self._body = model, body
        self._options = stream_options(body)
        self._limits = request_limits(request)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        defaults = model.llm.get_default_sampling_params()
        self._params = sampling_params(body, defaults, max_tokens=most, logprobs=_wanted_logprobs(body))
        self._id, self._created, self._counted = new_id("chatcmpl"), now(), Counted()
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._texts = TextEvents(lambda index, text: self._chunk([_delta(index, AnswerMessage(content=text))]))
        self._is_text_alone = not (body.logprobs or body.return_token_ids or self._options.continuous_usage_stats)

    async def whole(self) -> ChatCompletion:
        """Return the answer as one."""
        last: RequestOutput | None = None
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                last = output
        assert last is not None
        made = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model.name,
            choices=[self._choice(completion) for completion in last.outputs],
            usage=self._counted.usage(),
        )
        if self._body.return_token_ids:
            made.prompt_token_ids = list(last.prompt_token_ids)
        return made

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                # All that an output brings is sent at once.
                if found := b"".join(map(self._new, output.outputs)):
                    yield found
        if self._options.include_usage:
            yield written(self._chunk([], with_usage=True))

    def _new(self, completion: CompletionOutput) -> bytes:
        """Return the events of what is new of a completion."""
        index, begin = completion.index, b""
        if index in self._ended:
            return begin
        if index not in self._begun:
            self._begun.add(index)
            begin = written(self._chunk([_delta(index, AnswerMessage(role="assistant", content=""))]))
        if completion.finished:
            self._ended.add(index)
        elif not completion.token_ids:
            return begin
        elif self._is_text_alone:
            return begin + self._texts.written(index, completion.text)
        return begin + written(self._chunk([self._delta(completion)]))

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        async with self._model.taken():
            prompt = await self._prompt()
            stream = self._model.generate(prompt, self._params, priority=self._body.priority, **self._limits)
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    self._counted.add(0, output)
                    yield output

    async def _prompt(self) -> TokenizedPrompt:
        body = self._body
        made = await self._model.apply_template(
            [message.model_dump(exclude_unset=True) for message in body.messages],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        return made.salted(body.cache_salt)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=completion.text)
        return self._filled(
            ChatChoice(index=completion.index, message=message, logprobs=None, finish_reason=None), completion
        )

    def _delta(self, completion: CompletionOutput) -> ChatDelta:
        return self._filled(_delta(completion.index, AnswerMessage(content=completion.text)), completion)

    def _filled(self, part: P, completion: CompletionOutput) -> P:
        """Return a choice or delta with what both have of a completion beside its text."""
        part.finish_reason = completion.finish_reason
        if completion.stop_reason is not None:
            part.stop_reason = completion.stop_reason
        if completion.logprobs is not None:
            part.logprobs = _logprobs(completion.logprobs)
        if self._body.return_token_ids:
            part.token_ids = list(completion.token_ids)
        return part

    def _chunk(self, deltas: list[ChatDelta], *, with_usage: bool = False) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model.name,
            choices=deltas,
        )
        if with_usage or self._options.continuous_usage_stats:
            chunk.usage = self._counted.usage()
        return chunk


def _delta(index: int, message: AnswerMessage) -> ChatDelta:
    return ChatDelta(index=index, delta=message, logprobs=None, finish_reason=None)


def _wanted_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs=true", "invalid_value", param="top_logprobs")
        if not 0 <= body.top_logprobs <= _MOST_LOGPROBS:
            raise ApiError(400, f"top_logprobs: 0 to {_MOST_LOGPROBS}", "invalid_value", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    found = []
    for position in positions:
        sampled, *others = top_logprobs(position)
        found.append(
            TokenLogprob(**sampled.model_dump(), top_logprobs=sorted([sampled, *others], key=lambda one: -one.logprob))
        )
    return ChatLogprobs(content=found)
