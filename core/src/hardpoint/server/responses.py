"""`POST /v1/responses`: OpenAI's newer interface, for text. Nothing is stored, so every request brings its whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from hardpoint.engine.async_llm import OutputStream
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import RequestOutput
from hardpoint.interfaces.errors import HardpointError
from hardpoint.sampling import RequestOutputKind
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import changed, check_most_tokens, recommended_most_tokens, request_limits, respond
from hardpoint.server.http import STREAMED
from hardpoint.server.protocol import Inert, Unicode, new_id
from hardpoint.server.served_model import ServedModel

_TEXT = {"format": {"type": "text"}}
# Fields that may be given with these values alone, since the server does nothing else.
_ONLY: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "store": (None, False),
    "background": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "auto", "none"),
    "include": (None, []),
    "top_logprobs": (None, 0),
    "reasoning": (None, {}),
    "truncation": (None, "disabled"),
    "text": (None, {}, _TEXT),
}


class InputPart(BaseModel):
    """A part of a message; what else an answer's own parts have is passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """A message of the conversation, also one that an answer had."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    input: str | list[InputMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    metadata: dict[Unicode, Unicode] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    store: Any = None
    background: Any = None
    tools: Any = None
    tool_choice: Any = None
    include: Any = None
    top_logprobs: Any = None
    reasoning: Any = None
    truncation: Any = None
    text: Any = None
    # Accepted, and without meaning here
    parallel_tool_calls: Inert = None
    max_tool_calls: Inert = None
    stream_options: Inert = None
    user: Inert = None
    service_tier: Inert = None
    safety_identifier: Inert = None
    prompt_cache_key: Inert = None
    prompt_cache_retention: Inert = None


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    """The model's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class InputDetails(BaseModel):
    """How much of the prompt the prefix cache had."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Tokens of reasoning, which is not told apart here."""

    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ModelResponse(BaseModel):
    """The answer of `/v1/responses`, and what the events of its stream carry at its beginning and its end."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    completed_at: float | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: dict[str, Any] = _TEXT
    tool_choice: str = "none"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None


def router(fleet: Fleet) -> APIRouter:
    """Return the route."""
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=ModelResponse, responses=STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await respond(request, _Answer(fleet.asked(body.model), body, request), body.stream)

    return routes


class _Answer:
    """The answer to one request."""

    def __init__(self, model: ServedModel, body: ResponsesRequest, request: Request) -> None:
        for name, accepted in _ONLY.items():
            if getattr(body, name) not in accepted:
                told = " or ".join(map(repr, accepted[1:])) or "nothing"
                message = f"{name}: only {told} is supported; nothing is stored, and there is no more than text here"
                raise ApiError(400, message, "unsupported", param=name)
        self._model, self._body = model, body
        self._limits = request_limits(request)
        check_most_tokens("max_output_tokens", body.max_output_tokens)
        given = {"temperature": body.temperature, "top_p": body.top_p}
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        defaults, most = model.llm.get_default_sampling_params(), body.max_output_tokens
        asked["max_tokens"] = recommended_most_tokens(defaults) if most is None else most
        asked["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        self._params = changed(defaults, body, asked)
        self._created, self._number = time.time(), 0
        self._id, self._message_id = new_id("resp"), new_id("msg")

    async def whole(self) -> ModelResponse:
        """Return the answer as one."""
        last: RequestOutput | None = None
        async with self._outputs() as outputs:
            async for output in outputs:
                last = output
        assert last is not None
        made = self._ended(last, last.outputs[0].text, len(last.outputs[0].token_ids))
        # Made anew, so that fields with default values count as set and are in the answer.
        return ModelResponse(**made.model_dump())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events, in OpenAI's order."""
        text, tokens, begun = "", 0, False
        try:
            async with self._outputs() as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    text, tokens = text + completion.text, tokens + len(completion.token_ids)
                    # The first event waits for the first output, so that a request which is refused is answered with an HTTP status.
                    events = b"" if begun else self._beginning()
                    begun = True
                    if completion.text:
                        events += self._event(
                            "response.output_text.delta", self._part | {"delta": completion.text, "logprobs": []}
                        )
                    if output.finished:
                        events += self._end(self._ended(output, text, tokens))
                    if events:
                        yield events
        except (HardpointError, ApiError) as error:
            if not begun:
                raise
            told = error if isinstance(error, ApiError) else ApiError.of(error)
            failed = self._response("failed", error=ResponseError(code=told.code, message=told.message))
            yield self._event("response.failed", {"response": failed.model_dump()})

    @property
    def _part(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _beginning(self) -> bytes:
        started = {"response": self._response("in_progress").model_dump()}
        item = OutputMessage(id=self._message_id, status="in_progress", content=[]).model_dump()
        part = OutputText(text="").model_dump()
        return b"".join(
            (
                self._event("response.created", started),
                self._event("response.in_progress", started),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event("response.content_part.added", self._part | {"part": part}),
            )
        )

    def _end(self, ended: ModelResponse) -> bytes:
        item = ended.output[0]
        part = item.content[0]
        return b"".join(
            (
                self._event("response.output_text.done", self._part | {"text": part.text, "logprobs": []}),
                self._event("response.content_part.done", self._part | {"part": part.model_dump()}),
                self._event("response.output_item.done", {"output_index": 0, "item": item.model_dump()}),
                self._event(f"response.{ended.status}", {"response": ended.model_dump()}),
            )
        )

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        event = _Event(type=kind, sequence_number=self._number, **content)
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), event.model_dump_json().encode())

    @asynccontextmanager
    async def _outputs(self) -> AsyncIterator[OutputStream[RequestOutput]]:
        async with self._model.taken():
            prompt = await self._prompt()
            async with self._model.stream(prompt, self._params, **self._limits) as outputs:
                yield outputs

    async def _prompt(self) -> TokenizedPrompt:
        given, messages = self._body.input, []
        if self._body.instructions is not None:
            messages.append({"role": "system", "content": self._body.instructions})
        for message in [InputMessage(role="user", content=given)] if isinstance(given, str) else given:
            content = message.content
            text = content if isinstance(content, str) else "".join(part.text for part in content)
            # Chat templates know the role by its older name.
            role = "system" if message.role == "developer" else message.role
            messages.append({"role": role, "content": text})
        return await self._model.apply_template(messages, add_generation_prompt=True)

    def _ended(self, output: RequestOutput, text: str, tokens: int) -> ModelResponse:
        """Return the response at its end.

        Args:
            output: the last one.
            text, tokens: of the whole completion, and how many.
        """
        reason, prompt = output.outputs[0].finish_reason, len(output.prompt_token_ids)
        made = self._response("completed")
        if reason == "length":
            made.status, made.incomplete_details = "incomplete", IncompleteDetails()
        elif reason != "stop":
            made.status = "failed"
            made.error = ResponseError(code="server_error", message="the request was ended before its answer was whole")
        if made.status == "completed":
            made.completed_at = time.time()
        done = "completed" if made.status == "completed" else "incomplete"
        made.output = [OutputMessage(id=self._message_id, status=done, content=[OutputText(text=text)])]
        made.usage = ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details=InputDetails(cached_tokens=output.num_cached_tokens),
            output_tokens=tokens,
            total_tokens=prompt + tokens,
        )
        return made

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], error: ResponseError | None = None
    ) -> ModelResponse:
        return ModelResponse(
            id=self._id,
            created_at=self._created,
            status=status,
            error=error,
            instructions=self._body.instructions,
            max_output_tokens=self._body.max_output_tokens,
            metadata=self._body.metadata or {},
            model=self._model.name,
            temperature=self._params.temperature,
            top_p=self._params.top_p,
        )


class _Event(BaseModel):
    """One event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
