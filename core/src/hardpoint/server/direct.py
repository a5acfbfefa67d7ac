"""The shortest way to the routes that generate text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hardpoint.interfaces.errors import HardpointError
from hardpoint.server.errors import ApiError, internal_error, is_json
from hardpoint.server.http import BODY


class Direct:
    """Calls the endpoints of a few routes itself where a request is good, and leaves all else to the application.

    The application looks for a route, fills in parameters and wraps each call several times, which takes a quarter of the time of a short
    answer. It still describes these routes, and says what is wrong with a body that is not what its type declares.

    Args:
        routers: whose POST routes, of an endpoint `(body, request)` that returns a response, are called directly.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._endpoints = {
            route.path: (_body_type(route.endpoint), route)
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = self._good(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if given is None:
            await self._app(scope, receive, send)
            return
        route, body = given
        scope["route"] = route
        try:
            response = await route.endpoint(body, Request(scope, receive))
        except ApiError as error:
            response = error.response()
        except HardpointError as error:
            response = ApiError.of(error).response()
        except Exception:
            await internal_error().response()(scope, receive, send)
            raise
        await response(scope, receive, send)

    def _good(self, scope: Scope) -> tuple[APIRoute, BaseModel] | None:
        """Return the route and the body; None where the application is to answer."""
        found = self._endpoints.get(scope["path"])
        if found is None or not any(
            name == b"content-type" and is_json(value.decode("latin-1")) for name, value in scope["headers"]
        ):
            return None
        kind, route = found
        try:
            return route, kind.model_validate_json(scope[BODY])
        except ValidationError:
            return None


def _body_type(endpoint: Callable[..., Any]) -> type[BaseModel]:
    names = list(inspect.signature(endpoint).parameters)
    assert names == ["body", "request"], f"{endpoint.__qualname__} takes {names}"
    kind: type[BaseModel] = get_type_hints(endpoint)["body"]
    return kind
