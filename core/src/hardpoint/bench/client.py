"""A client that streams answers and notes when their parts come; it is to cost less than any server that it measures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from hardpoint.bench.answers import Answer
from hardpoint.bench.http import BrokenOff, HttpClient, NotConnected
from hardpoint.interfaces.errors import ConfigError

_MAX_DETAIL = 300
"""Characters of what a server says of an error."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def brings_text(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []  # msgspec copies it
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event).decode


class _ModelList(msgspec.Struct):
    class _Model(msgspec.Struct):
        id: str

    data: list[_Model]


class EventReader:
    """Takes a stream of server-sent events in pieces, wherever they are cut, and gives the data of each event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of the lines that are complete now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Client:
    """Requests to one server, as many at a time as are made.

    Args:
        base_url: as OpenAI's clients take it, such as http://127.0.0.1:8000/v1; without a path, /v1 is meant.
        chat: chat completions are asked for, not completions.
        key: sent as `Authorization: Bearer`, where there is one.
        timeout: seconds that a request may take; None for no limit.
    """

    def __init__(self, base_url: str, *, chat: bool, key: str | None, timeout: float | None) -> None:
        scheme, _, rest = base_url.rstrip("/").partition("://")
        if scheme not in ("http", "https") or not rest:
            raise ConfigError(
                "the server's address is not a URL", found=base_url, hint="Give one such as http://127.0.0.1:8000/v1"
            )
        self._base = f"{scheme}://{rest}" + ("" if "/" in rest else "/v1")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            self._path = urlsplit(self._base).path
            self._http = HttpClient(self._base, headers, timeout)
        except ValueError as error:
            raise ConfigError("the API key or the address cannot be sent", found=str(error)) from error
        self._endpoint = f"{self._path}/{'chat/' if chat else ''}completions"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    async def model(self) -> str:
        """Return the name of the first model that the server lists; raises ConfigError where it cannot be had."""
        hint = "Is the server there? Otherwise give --model"
        body = bytearray()
        try:
            status = await self._http.request("GET", f"{self._path}/models", b"", lambda _, piece: body.extend(piece))
            if status != 200:
                raise ConfigError(
                    f"{self._base}/models answers {status}", found=_short(bytes(body)), hint="Check --api-key"
                )
            return msgspec.json.decode(body, type=_ModelList).data[0].id
        except (NotConnected, BrokenOff, TimeoutError, msgspec.MsgspecError, IndexError) as error:
            problem = f"the models of {self._base} cannot be listed"
            raise ConfigError(problem, found=f"{type(error).__name__}: {error}", hint=hint) from error

    async def ask(self, body: bytes) -> Answer:
        """Send one request, whose answer is a stream, and read it to its end; failures are in the answer."""
        reading = _Reading(Answer(time.perf_counter()))
        answer = reading.answer
        try:
            status = await self._http.request("POST", self._endpoint, body, reading.take)
            reading.end(status)
        except TimeoutError as error:
            answer.error, answer.detail = "timeout", str(error)
        except NotConnected as error:
            answer.error, answer.detail = "no_connection", str(error)
        except BrokenOff as error:
            answer.error, answer.detail = "broken_off", str(error)
        except msgspec.MsgspecError as error:
            answer.error, answer.detail = "malformed_event", str(error)
        answer.ended = time.perf_counter()
        return answer


class _Reading:
    """What is noted of an answer as its pieces come."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._events = EventReader()
        self._refusal = b""
        self._is_done = False
        self._counted: _Usage | None = None

    def take(self, status: int, piece: bytes) -> None:
        """Take the next piece of the answer; raises MsgspecError."""
        if status != 200:
            self._refusal += piece
            return
        answer, now = self.answer, time.perf_counter()
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self._is_done = True
                continue
            event = _event(data)
            if event.error is not None:
                answer.error, answer.detail = "error_event", _short(data)
            self._counted = event.usage or self._counted
            if any(choice.brings_text for choice in event.choices):
                answer.times.append(now)

    def end(self, status: int) -> None:
        """Note what only the end shows."""
        answer, counted = self.answer, self._counted
        if status != 200:
            answer.error, answer.detail = f"http_{status}", _short(self._refusal)
            return
        if counted is None:
            answer.output_tokens, answer.is_counted = len(answer.times), False
        else:
            answer.prompt_tokens, answer.output_tokens = counted.prompt_tokens, counted.completion_tokens
        if not self._is_done and answer.error is None:
            answer.error, answer.detail = "broken_off", "the stream ended without [DONE]"


def _short(body: bytes) -> str:
    return body[:_MAX_DETAIL].decode(errors="replace")
