"""A server of OpenAI's interface whose answers come at known times."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web

FIRST, GAP = 0.06, 0.03
"""Seconds until the first text, and between two parts of it."""


class Endpoint:
    """What it does is said by the model's name, which is one of the methods here; "steady" answers with one part for each token."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.has_request = threading.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"path": request.path})
        self.keys.append(request.headers.get("Authorization"))
        self.has_request.set()
        if body["model"] == "refusing":
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        if (body["model"] == "closing" and len(self.bodies) % 2) or body["model"] == "closed":
            assert request.transport is not None
            request.transport.close()
        if body["model"] == "closing":
            body["model"] = "steady"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await getattr(self, body["model"])(body, response)
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "steady"}, {"id": "other"}]})

    async def steady(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await self.parts(body, response)
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        await event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def calling(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await event(response, {"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]})
        await response.write(b"data: [DONE]\n\n")

    async def uncounted(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await self.parts(body, response)
        await response.write(b"data: [DONE]\n\n")

    async def parts(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        chat = "messages" in body
        if chat:
            await event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(body["max_tokens"]):
            await asyncio.sleep(GAP if number else FIRST)
            await event(response, {"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})

    async def cut(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await event(response, {"choices": [{"text": "x"}]})
        response._req.transport.close()  # type: ignore[union-attr]

    async def unended(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await event(response, {"choices": [{"text": "x"}]})

    async def failing(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await event(response, {"error": {"message": "a step failed"}})
        await response.write(b"data: [DONE]\n\n")

    async def babbling(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(b"data: {choices\n\n")

    async def silent(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        await asyncio.sleep(60)


async def event(response: web.StreamResponse, content: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")
