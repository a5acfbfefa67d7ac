"""`POST /v1/completions`: prompts go on."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from hardpoint.server.errors import ApiError
from hardpoint.server.events import TextEvents, written
from hardpoint.server.fleet import Fleet
from hardpoint.server.generation import (
    Counted,
    beam_search_params,
    entered,
    numbered,
    request_limits,
    respond,
    sampling_params,
    stream_options,
    top_logprobs,
    with_logprobs,
)
from hardpoint.server.http import STREAMED, aclose
from hardpoint.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    new_id,
    now,
)
from hardpoint.server.served_model import ServedModel


class _Embeds(NamedTuple):
    """A prompt of embeddings, as a tensor that `torch.save` wrote, in base64."""

    text: str


def router(fleet: Fleet) -> APIRouter:
    """Return the route."""
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(request, _Answer(fleet.asked(body.model), body, request), body.stream)

    return routes


class _Answer:
    """The answer to one request."""

    def __init__(self, model: ServedModel, body: CompletionRequest, request: Request) -> None:
        self._model, self._body = model, body
        self._options = stream_options(body)
        self._limits = request_limits(request)
        self._check_embeds()
        # With max_tokens=0, which asks for the echoed prompt alone, one token is computed and left out of the answer.
        self._is_prompt_alone = bool(body.echo) and body.max_tokens == 0
        more = {} if body.max_tokens is None else {"max_tokens": body.max_tokens or int(self._is_prompt_alone)}
        if body.echo and body.logprobs is not None:
            more["prompt_logprobs"] = body.logprobs
        self._params = sampling_params(body, model.llm.get_default_sampling_params(), logprobs=body.logprobs, **more)
        self._beams = beam_search_params(body, self._params.max_tokens or 16)
        self._num_choices = self._params.n if self._beams is None else self._beams.beam_width
        self._id, self._created, self._counted = new_id("cmpl"), now(), Counted()
        self._shown: set[int] = set()
        self._places: dict[int, _Places] = {}
        self._ended: set[int] = set()
        self._texts = TextEvents(lambda number, text: self._completion([_text_choice(number, text)]))
        self._is_text_alone = (
            body.logprobs is None and not body.return_token_ids and not self._options.continuous_usage_stats
        )

    async def whole(self) -> Completion:
        """Return the answer as one."""
        choices: list[CompletionChoice] = []
        async with self._outputs() as outputs:
            async for index, output in outputs:
                output = self._noted(index, output)
                choices += [self._choice(*one, output) for one in self._new(index, output)]
        choices.sort(key=lambda choice: choice.index)
        return self._completion(choices, with_usage=True)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        async with self._outputs() as outputs:
            async for index, output in outputs:
                output = self._noted(index, output)
                # All that an output brings is sent at once.
                found = b""
                for number, completion in self._new(index, output):
                    found += self._event(number, completion, output)
                if found:
                    yield found
        if self._options.include_usage:
            yield written(self._completion([], with_usage=True))

    def _event(self, number: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """Return the event of what is new of a completion."""
        if self._is_text_alone and number in self._shown and not completion.finished():
            return self._texts.written(number, completion.text)
        choice = self._choice(number, completion, output)
        return written(self._completion([choice], with_usage=bool(self._options.continuous_usage_stats)))

    @asynccontextmanager
    async def _outputs(self) -> AsyncIterator[AsyncIterator[tuple[int, RequestOutput]]]:
        """Give the outputs of all prompts, each with its prompt's index."""
        prompts, params = self._prompts(), self._beams or self._params
        async with self._model.taken(len(prompts)), AsyncExitStack() as stack:
            tokenized = [await self._tokenized(prompt) for prompt in prompts]
            streams = [
                self._model.stream(prompt, params, priority=self._body.priority, **self._limits) for prompt in tokenized
            ]
            outputs = numbered(await entered(stack, streams))
            # `outputs` must be closed before the streams that it reads, also where nobody reads it to its end.
            stack.push_async_callback(aclose, outputs)
            yield outputs

    def _noted(self, index: int, output: RequestOutput) -> RequestOutput:
        """Count an output, and return what is shown of it."""
        if self._is_prompt_alone:
            output = replace(output, outputs=[_without_tokens(one) for one in output.outputs])
        self._counted.add(index, output)
        return output if self._beams is None else with_logprobs(output, self._body.logprobs)

    def _check_embeds(self) -> None:
        body = self._body
        if body.prompt_embeds is None:
            return
        if body.echo:
            raise ApiError(400, "echo: embeddings have no text", "invalid_value", param="echo")

    def _prompts(self) -> Sequence[str | list[int] | _Embeds]:
        """Return the prompts, of which those of embeddings come first."""
        given, embeds = self._body.prompt, self._body.prompt_embeds
        first = list(map(_Embeds, [embeds] if isinstance(embeds, str) else embeds or ()))
        if given is None or given == []:
            if not first:
                text = "prompt: it is missing" if given is None else "prompt: an empty list"
                raise ApiError(400, text, "invalid_value", param="prompt")
            return first
        if isinstance(given, str):
            return [*first, given]
        return [*first, given] if isinstance(given[0], int) else [*first, *given]

    async def _tokenized(self, prompt: str | list[int] | _Embeds) -> TokenizedPrompt:
        body = self._body
        if isinstance(prompt, _Embeds):
            made = await asyncio.to_thread(self._embedded, prompt, body.truncate_prompt_tokens)
            return made.salted(body.cache_salt)
        made = await self._model.tokenize(
            prompt, add_special_tokens=body.add_special_tokens, truncate=body.truncate_prompt_tokens
        )
        return made.salted(self._body.cache_salt)

    def _embedded(self, prompt: _Embeds, truncate: int | None) -> TokenizedPrompt:
        try:
            serialised = b64decode(prompt.text, validate=True)
        except ValueError as error:
            raise ApiError(
                400, f"prompt_embeds: not base64: {error}", "invalid_value", param="prompt_embeds"
            ) from error
        llm = self._model.llm
        return llm.process({"prompt_embeds": llm.load_embeds(serialised)}, truncate=truncate)

    def _new(self, index: int, output: RequestOutput) -> list[tuple[int, CompletionOutput]]:
        """Return the completions of an output in which something is new, each with its number among those of all prompts."""
        found = []
        for completion in output.outputs:
            number = index * self._num_choices + completion.index
            if number in self._ended or not (completion.token_ids or completion.finished()):
                continue
            if completion.finished():
                self._ended.add(number)
            found.append((number, completion))
        return found

    def _choice(self, number: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        text, is_first = completion.text, number not in self._shown
        if is_first and self._body.echo:
            text = self._prompt_text(output) + text
        self._shown.add(number)
        choice = _text_choice(number, text)
        choice.finish_reason = completion.finish_reason
        if completion.stop_reason is not None:
            choice.stop_reason = completion.stop_reason
        if completion.logprobs is not None:
            choice.logprobs = self._logprobs(number, completion.logprobs, output, is_first=is_first)
        if self._body.return_token_ids:
            choice.token_ids = list(completion.token_ids)
            if is_first:
                choice.prompt_token_ids = list(output.prompt_token_ids)
        return choice

    def _logprobs(
        self, number: int, positions: Sequence[PositionLogprobs], output: RequestOutput, *, is_first: bool
    ) -> CompletionLogprobs:
        """Return those of a completion's new tokens, behind those of the prompt where it is repeated."""
        shown = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        detokenizer, prompt = self._model.llm.detokenizer, output.prompt_token_ids
        if is_first:
            text = self._prompt_text(output) if self._body.echo else ""
            if output.prompt_logprobs is not None:
                # Special tokens that the tokenizer put before a text are not in the text.
                skip = detokenizer.decode(prompt) != text
                places = _Places(detokenizer.incremental([], skip_special_tokens=skip), 0)
                # A request that was ended early may have log probabilities of fewer tokens.
                for token_id, position in zip(prompt, output.prompt_logprobs, strict=False):
                    _add(shown, token_id, position, places, detokenizer)
            step = detokenizer.incremental(prompt, skip_special_tokens=self._params.skip_special_tokens)
            self._places[number] = _Places(step, len(text))
        for position in positions:
            _add(shown, next(iter(position)), position, self._places[number], detokenizer)
        return shown

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._body.truncate_prompt_tokens is None:
            return output.prompt
        return self._model.llm.decode(output.prompt_token_ids, skip_special_tokens=True)

    def _completion(self, choices: list[CompletionChoice], *, with_usage: bool = False) -> Completion:
        made = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model.name, choices=choices
        )
        if with_usage:
            made.usage = self._counted.usage()
        return made


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    logprobs: list[PositionLogprobs] | None = None if completion.logprobs is None else []
    return replace(completion, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None)


def _text_choice(number: int, text: str) -> CompletionChoice:
    return CompletionChoice(index=number, text=text, logprobs=None, finish_reason=None)


class _Places:
    """Where the texts of tokens begin in the whole, in characters: a token that completes none of them has the next one's place.

    Args:
        step: returns the text that a token completes.
        start: place of the first one.
    """

    def __init__(self, step: Callable[[int], str], start: int) -> None:
        self._step, self._start = step, start

    def of(self, token_id: int) -> int:
        """Return the place of the next token."""
        start = self._start
        self._start += len(self._step(token_id))
        return start


def _add(
    shown: CompletionLogprobs,
    token_id: int,
    position: PositionLogprobs | None,
    places: _Places,
    detokenizer: Detokenizer,
) -> None:
    """Add one token, which has no log probability where there is no position."""
    shown.text_offset.append(places.of(token_id))
    if not position:
        shown.tokens.append(detokenizer.token_text(token_id))
        shown.token_logprobs.append(None)
        shown.top_logprobs.append(None)
        return
    chosen, *others = top_logprobs(position, detokenizer)
    shown.tokens.append(chosen.token)
    shown.token_logprobs.append(chosen.logprob)
    shown.top_logprobs.append({one.token: one.logprob for one in [chosen, *others]})
