"""A client that streams answers and notes when their parts come; it is to cost less than any server that it measures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from hardpoint.bench.answers import Answer
from hardpoint.interfaces.errors import ConfigError

_MOST_DETAIL = 300
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
        self._url = f"{self._base}/{'chat/' if chat else ''}completions"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout),
                trust_env=True,
            )
        except ValueError as error:
            raise ConfigError("the API key cannot be sent in a header", found=str(error)) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def model(self) -> str:
        """Return the name of the first model that the server lists; raises ConfigError where it cannot be had."""
        hint = "Is the server there? Otherwise give --model"
        try:
            async with self._session.get(f"{self._base}/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise ConfigError(
                        f"{self._base}/models answers {response.status}", found=_short(body), hint="Check --api-key"
                    )
            return msgspec.json.decode(body, type=_ModelList).data[0].id
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, IndexError) as error:
            problem = f"the models of {self._base} cannot be listed"
            raise ConfigError(problem, found=f"{type(error).__name__}: {error}", hint=hint) from error

    async def ask(self, body: bytes) -> Answer:
        """Send one request, whose answer is a stream, and read it to its end; failures are in the answer."""
        answer = Answer(time.perf_counter())
        try:
            try:
                await self._post(body, answer)
            except aiohttp.ServerDisconnectedError:
                # A kept connection that the server was closing just then: the request was not answered, and a new one may carry it.
                await self._post(body, answer)
        except TimeoutError as error:
            answer.error, answer.detail = "timeout", str(error)
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.detail = "no_connection", str(error)
        except aiohttp.ClientError as error:
            answer.error, answer.detail = "broken_off", f"{type(error).__name__}: {error}"
        except msgspec.MsgspecError as error:
            answer.error, answer.detail = "malformed_event", str(error)
        answer.ended = time.perf_counter()
        return answer

    async def _post(self, body: bytes, answer: Answer) -> None:
        async with self._session.post(self._url, data=body) as response:
            if response.status == 200:
                await self._read(response, answer)
            else:
                answer.error, answer.detail = f"http_{response.status}", _short(await response.read())

    @staticmethod
    async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
        events, is_done, counted = EventReader(), False, None
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            for data in events.feed(piece):
                if data == b"[DONE]":
                    is_done = True
                    continue
                event = _event(data)
                if event.error is not None:
                    answer.error, answer.detail = "error_event", _short(data)
                counted = event.usage or counted
                if any(choice.brings_text for choice in event.choices):
                    answer.times.append(now)
        if counted is None:
            answer.output_tokens = len(answer.times)
        else:
            answer.prompt_tokens, answer.output_tokens = counted.prompt_tokens, counted.completion_tokens
        if not is_done and answer.error is None:
            answer.error, answer.detail = "broken_off", "the stream ended without [DONE]"


def _short(body: bytes) -> str:
    return body[:_MOST_DETAIL].decode(errors="replace")
