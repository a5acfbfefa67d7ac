"""`POST /v1/chat/completions`: answers to conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from hardpoint.engine.async_llm import OutputStream
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint.interfaces.errors import InvalidSamplingParams
from hardpoint.sampling import SamplingParams
from hardpoint.server.errors import ApiError
from hardpoint.server.events import TextEvents, written
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import (
    Counted,
    beam_search_params,
    check_most_tokens,
    recommended_most_tokens,
    request_limits,
    respond,
    sampling_params,
    stream_options,
    top_logprobs,
    with_logprobs,
)
from hardpoint.server.http import STREAMED
from hardpoint.server.protocol import (
    AnswerMessage,
    CallFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    TokenLogprob,
    ToolCall,
    new_id,
    now,
)
from hardpoint.server.reasoning import CLOSE, OPEN, ReasoningParser, begins_reasoning, is_closed, parser_of
from hardpoint.server.served_model import ServedModel
from hardpoint.server.tools import CallPart, ToolChoice, ToolParser, in_template

P = TypeVar("P", ChatChoice, ChatDelta)

_BESIDE = "tools beside a text that must match: only with tool_choice 'none'"

_MAX_LOGPROBS = 20
"""OpenAI's limit."""


def router(fleet: Fleet) -> APIRouter:
    """Return the route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await respond(request, _Answer(fleet.asked(body.model), body, request), body.stream)

    return routes


class _Answer:
    """The answer to one request."""

    def __init__(self, model: ServedModel, body: ChatRequest, request: Request) -> None:
        self._model, self._body = model, body
        self._options = stream_options(body)
        self._limits = request_limits(request)
        check_most_tokens("max_completion_tokens", body.max_completion_tokens)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        defaults = model.llm.get_default_sampling_params()
        most = recommended_most_tokens(defaults) if most is None else most
        self._params = sampling_params(body, defaults, max_tokens=most, logprobs=_wanted_logprobs(body))
        self._beams = beam_search_params(body, model.llm.info.max_model_len if most is None else most)
        self._template = template = model.chat_template
        options = model.options
        named = options.reasoning_parser
        self._reasoning = parser_of(template) if named == "auto" else named
        self._tools = ToolChoice(body, template, options.tool_call_parser)
        if self._tools.grammar is not None:
            if self._params.structured_outputs is not None:
                raise ApiError(400, _BESIDE, "invalid_value", param="tool_choice")
            self._params = self._params.clone(structured_outputs=self._tools.grammar)
        elif self._tools.parser is not None and self._params.structured_outputs is not None:
            raise ApiError(400, _BESIDE, "invalid_value", param="tool_choice")
        marks: tuple[str, ...] = () if self._reasoning is None else (OPEN, CLOSE)
        marks += () if self._tools.parser is None else self._tools.parser.marks
        if body.skip_special_tokens is None and any(map(model.leaves_out, marks)):
            self._params = self._params.clone(skip_special_tokens=False)
        self._reasons = False
        self._readers: dict[int, _Reader] = {}
        self._id, self._created, self._counted = new_id("chatcmpl"), now(), Counted()
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._texts = TextEvents(lambda index, text: self._chunk([_delta(index, AnswerMessage(content=text))]))
        self._is_text_alone = not (body.logprobs or body.return_token_ids or self._options.continuous_usage_stats)
        self._is_plain = self._reasoning is None and self._tools.parser is None

    async def whole(self) -> ChatCompletion:
        """Return the answer as one."""
        last: RequestOutput | None = None
        async with self._outputs() as outputs:
            async for output in outputs:
                last = self._noted(output)
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
        async with self._outputs() as outputs:
            async for output in outputs:
                # All that an output brings is sent at once.
                if found := b"".join(map(self._new, self._noted(output).outputs)):
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
        if completion.finished():
            self._ended.add(index)
        elif not completion.token_ids:
            return begin
        elif self._is_text_alone and self._is_plain:
            return begin + self._texts.written(index, completion.text)
        delta = self._delta(completion)
        if self._is_text_alone and not (completion.finished() or delta.delta.model_fields_set):
            # The delta is empty where the parsers hold its text back, which may begin a mark of theirs.
            return begin
        return begin + written(self._chunk([delta]))

    @asynccontextmanager
    async def _outputs(self) -> AsyncIterator[OutputStream[RequestOutput]]:
        async with self._model.taken():
            prompt = await self._prompt()
            params = self._beams or self._after_reasoning(prompt)
            stream = self._model.stream(prompt, params, priority=self._body.priority, **self._limits)
            async with AsyncExitStack() as stack:
                try:
                    outputs = await stack.enter_async_context(stream)
                except InvalidSamplingParams as error:
                    if self._tools.grammar is None or not error.problem.startswith("structured_outputs "):
                        raise
                    # The client asked for tool calls, and knows nothing of the grammar by which they are enforced.
                    told = f"tools: their parameters allow no grammar of calls, as tool_choice needs one: {error}"
                    raise ApiError(400, told, "invalid_value", param="tools") from error
                yield outputs

    def _noted(self, output: RequestOutput) -> RequestOutput:
        """Count an output, and return what is shown of it."""
        self._counted.add(0, output)
        return output if self._beams is None else with_logprobs(output, self._params.logprobs)

    def _after_reasoning(self, prompt: TokenizedPrompt) -> SamplingParams:
        """Return the parameters for a prompt, by which the model reasons or not before it writes what must match."""
        params, structured = self._params, self._params.structured_outputs
        if self._reasoning is None:
            return params
        self._reasons = begins_reasoning(self._reasoning, prompt.text or "")
        if structured is None or is_closed(prompt.text or ""):
            return params
        self._reasons = True
        return params.clone(structured_outputs=replace(structured, after=CLOSE))

    async def _prompt(self) -> TokenizedPrompt:
        body = self._body
        messages, tools = in_template(body.messages, self._template, self._tools.tools)
        made = await self._model.apply_template(
            messages,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            tools=tools,
            variables=body.chat_template_kwargs,
            truncate=body.truncate_prompt_tokens,
        )
        return made.salted(body.cache_salt)

    def _message(self, completion: CompletionOutput) -> AnswerMessage:
        """Return what is new of a completion, or all of it, divided into reasoning, content and calls."""
        if self._is_plain:
            return AnswerMessage(content=completion.text)
        reader = self._readers.get(completion.index)
        if reader is None:
            reasoning = None if self._reasoning is None else ReasoningParser(begins=self._reasons)
            parser = self._tools.parser
            reader = self._readers[completion.index] = _Reader(reasoning, None if parser is None else parser())
        return reader.read(completion.text, ended=completion.finished())

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        reader = self._readers.get(completion.index)
        called = reader is not None and reader.has_calls
        return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        message = self._message(completion)
        message.role = "assistant"
        if not message.content:
            message.content = None if message.tool_calls else ""
        if message.tool_calls:
            calls = [ToolCall(id=call.id, type=call.type, function=call.function) for call in message.tool_calls]
            message.tool_calls = calls
        return self._filled(
            ChatChoice(index=completion.index, message=message, logprobs=None, finish_reason=None), completion
        )

    def _delta(self, completion: CompletionOutput) -> ChatDelta:
        return self._filled(_delta(completion.index, self._message(completion)), completion)

    def _filled(self, part: P, completion: CompletionOutput) -> P:
        """Return a choice or delta with what both have of a completion beside its text."""
        part.finish_reason = self._finish_reason(completion)
        if completion.stop_reason is not None:
            part.stop_reason = completion.stop_reason
        if completion.logprobs is not None:
            part.logprobs = self._logprobs(completion.logprobs)
        if self._body.return_token_ids:
            part.token_ids = list(completion.token_ids)
        return part

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
        """Return the sampled tokens, each with the most probable ones, of which it is one or not."""
        found, most, detokenizer = [], self._body.top_logprobs or 0, self._model.llm.detokenizer
        for position in positions:
            entries = top_logprobs(position, detokenizer)
            best = sorted(entries, key=lambda one: -one.logprob)[:most]
            found.append(TokenLogprob(**entries[0].model_dump(), top_logprobs=best))
        return ChatLogprobs(content=found)

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


class _Reader:
    """Reads one answer as it grows.

    Attributes:
        has_calls: there was a call.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools
        self.has_calls = False

    def read(self, text: str, *, ended: bool) -> AnswerMessage:
        """Return what a piece of the text brings; the fields that it does not bring are not set."""
        reasoning, content, parts = "", text, list[CallPart]()
        if self._reasoning is not None:
            reasoning, content = self._reasoning.feed(text)
            if ended:
                rest = self._reasoning.finish()
                reasoning, content = reasoning + rest[0], content + rest[1]
        if self._tools is not None:
            content, parts = self._tools.feed(content)
            if ended:
                last, more = self._tools.finish()
                content, parts = content + last, parts + more
        message = AnswerMessage()
        if reasoning:
            message.reasoning_content = message.reasoning = reasoning
        if content:
            message.content = content
        if parts:
            self.has_calls = True
            message.tool_calls = [_call(part) for part in parts]
        return message


def _call(part: CallPart) -> ToolCall:
    if part.name is None:
        return ToolCall(index=part.index, function=CallFunction(arguments=part.arguments))
    function = CallFunction(name=part.name, arguments=part.arguments)
    return ToolCall(index=part.index, id=new_id("call"), type="function", function=function)


def _delta(index: int, message: AnswerMessage) -> ChatDelta:
    return ChatDelta(index=index, delta=message, logprobs=None, finish_reason=None)


def _wanted_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs=true", "invalid_value", param="top_logprobs")
        if not 0 <= body.top_logprobs <= _MAX_LOGPROBS:
            raise ApiError(400, f"top_logprobs: 0 to {_MAX_LOGPROBS}", "invalid_value", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
