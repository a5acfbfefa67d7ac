"""A server of OpenAI's interface whose answers come at known times, and whose connections break where a test wants it."""

from __future__ import annotations

import asyncio
import json
import threading
from http import HTTPStatus
from typing import Any

FIRST, GAP = 0.06, 0.03
"""Seconds until the first text, and between two parts of it."""


class Stream:
    """An answer of server-sent events in chunked transfer encoding."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def write(self, part: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await self._writer.drain()

    async def event(self, content: dict[str, Any]) -> None:
        await self.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    async def done(self) -> None:
        await self.write(b"data: [DONE]\n\n")


class Endpoint:
    """What it does is said by the model's name, which is one of the methods here; "steady" answers with one part for each token."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.has_request = threading.Event()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; whether the connection stays open."""
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
        method, path, _ = request.split()
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if (method, path) == ("GET", "/v1/models"):
            whole(writer, 200, {"object": "list", "data": [{"id": "steady"}, {"id": "other"}]})
            return True
        if method != "POST" or path not in ("/v1/completions", "/v1/chat/completions"):
            whole(writer, 404, {"error": {"message": f"no {method} {path}"}})
            return True
        body = json.loads(content)
        self.bodies.append(body | {"path": path})
        self.keys.append(headers.get("authorization"))
        self.has_request.set()
        model = body["model"]
        if model == "refusing":
            whole(writer, 429, {"error": {"message": "too busy"}})
            return True
        if model == "closed" or (model == "closing" and len(self.bodies) % 2):
            return False
        stream = Stream(writer)
        await getattr(self, "steady" if model == "closing" else model)(body, stream)
        if model != "cut":
            await stream.write(b"")
        return model != "cut"

    async def steady(self, body: dict[str, Any], stream: Stream) -> None:
        await self.parts(body, stream)
        await stream.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        await stream.done()

    async def calling(self, body: dict[str, Any], stream: Stream) -> None:
        await stream.event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]})
        await stream.done()

    async def uncounted(self, body: dict[str, Any], stream: Stream) -> None:
        await self.parts(body, stream)
        await stream.done()

    async def parts(self, body: dict[str, Any], stream: Stream) -> None:
        chat = "messages" in body
        if chat:
            await stream.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(body["max_tokens"]):
            await asyncio.sleep(GAP if number else FIRST)
            await stream.event({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})

    async def cut(self, body: dict[str, Any], stream: Stream) -> None:
        await stream.event({"choices": [{"text": "x"}]})

    async def unended(self, body: dict[str, Any], stream: Stream) -> None:
        await stream.event({"choices": [{"text": "x"}]})

    async def failing(self, body: dict[str, Any], stream: Stream) -> None:
        await stream.event({"error": {"message": "a step failed"}})
        await stream.done()

    async def babbling(self, body: dict[str, Any], stream: Stream) -> None:
        await stream.write(b"data: {choices\n\n")

    async def silent(self, body: dict[str, Any], stream: Stream) -> None:
        await asyncio.sleep(60)


def whole(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
