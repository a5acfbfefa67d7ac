"""What goes wrong, as HTTP says it: a status, and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from hardpoint.interfaces.errors import (
    AdapterInUse,
    AdapterNotFound,
    CapabilityRefused,
    CorruptWeights,
    DeviceOutOfMemory,
    DrainTimeout,
    EngineAsleep,
    EngineDead,
    HardpointError,
    HostBudgetExceeded,
    InboxFull,
    InvalidAdapter,
    InvalidRequest,
    MemoryAsleep,
    MemoryBusy,
    ModelError,
    PromptTooLong,
    RequestTimeout,
    SleepRefused,
    UnknownTag,
    WeightsMissing,
)

_RETRY_SECONDS = 5
_UNREADABLE = "There was an error parsing the body"
"""What FastAPI says where reading the JSON of a body raises something else than its own error."""

# In this order: the first class that the error is an instance of gives its status.
_STATUS: tuple[tuple[type[HardpointError], int, str], ...] = (
    (PromptTooLong, 400, "context_length_exceeded"),
    (AdapterNotFound, 404, "adapter_not_found"),
    (AdapterInUse, 409, "adapter_in_use"),
    (InvalidAdapter, 400, "invalid_adapter"),
    (InvalidRequest, 400, "invalid_value"),
    (CapabilityRefused, 400, "unsupported"),
    (SleepRefused, 400, "sleep_refused"),
    (UnknownTag, 400, "unknown_tag"),
    (CorruptWeights, 400, "invalid_weights"),
    (ModelError, 400, "invalid_model"),
    (RequestTimeout, 408, "request_timeout"),
    (MemoryBusy, 409, "busy"),
    (MemoryAsleep, 409, "memory_asleep"),
    (InboxFull, 429, "queue_full"),
    (EngineAsleep, 503, "model_asleep"),
    (WeightsMissing, 503, "weights_missing"),
    (DrainTimeout, 503, "requests_in_progress"),
    (EngineDead, 503, "engine_dead"),
    (DeviceOutOfMemory, 507, "device_out_of_memory"),
    (HostBudgetExceeded, 507, "host_budget_exceeded"),
)


class ErrorObject(BaseModel):
    """What went wrong: `message` for people, `code` for programs, `param` the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """An answer other than success."""

    error: ErrorObject


_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as it is."},
    503: {"model": ErrorAnswer, "description": "The model cannot serve now.", "headers": _RETRY},
    507: {"model": ErrorAnswer, "description": "There is not enough memory."},
}
"""What every route may answer beside its own, for the OpenAPI document."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP's.
        message: for people; it never quotes a prompt.
        code: for programs.
        param: the field of the request that is wrong.
        retry_after: seconds after which another try may succeed.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        # The message may quote a lone surrogate, which no answer can carry.
        message = message.encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    @classmethod
    def of(cls, error: HardpointError) -> ApiError:
        """Return the answer to a request that ended with an engine's error."""
        status, code = next(((s, c) for kind, s, c in _STATUS if isinstance(error, kind)), (500, "engine_error"))
        return cls(status, str(error), code, retry_after=_RETRY_SECONDS if status in (429, 503) else None)

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, more: Mapping[str, str] = MappingProxyType({})) -> Response:
        """Return the whole answer, with more headers."""
        headers = dict(more)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def install(app: FastAPI) -> None:
    """Have an application answer all errors in this form."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HardpointError)
    async def failed(request: Request, error: HardpointError) -> Response:
        return ApiError.of(error).response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return internal_error().response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error, request.headers.get("content-type", "")).response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        if error.detail == _UNREADABLE:
            why = "the body is not JSON: not in UTF-8, nested too deeply, or with a number of thousands of digits"
            return ApiError(400, why, "invalid_json").response()
        code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code)
        return told.response(error.headers or {})


def internal_error() -> ApiError:
    """Return the answer where the server itself failed; the traceback is in the log, and nothing of it in the answer."""
    return ApiError(500, "the server failed; its log says why", "internal_error")


def _invalid(error: RequestValidationError, content_type: str) -> ApiError:
    """Return the answer to a body or query that is not what its declared type says: the first few things that are wrong."""
    found = error.errors()
    first = found[0]
    if first["loc"] == ("body",) and first["type"] == "model_attributes_type":
        if is_json(content_type):
            return ApiError(400, "the body is JSON, but not an object", "invalid_value")
        # The body is not read as JSON: a web page of any origin may send other types without a preflight, and would reach a local server.
        return ApiError(415, "the body must be sent with Content-Type: application/json", "unsupported_media_type")
    if first["loc"] == ("body",) and first["type"] == "missing":
        return ApiError(400, "there is no body: a JSON object is needed", "invalid_value")
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}", "invalid_json"
        )
    told = []
    for one in found[:3]:
        place = ".".join(str(part) for part in one["loc"] if part not in ("body", "query"))
        told.append(f"{place}: {one['msg']}" if place else str(one["msg"]))
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    param = next((str(part) for part in first["loc"] if part not in ("body", "query")), None)
    code = "unknown_field" if first["type"] == "extra_forbidden" else "invalid_value"
    return ApiError(400, "; ".join(told) + more, code, param)


def is_json(content_type: str) -> bool:
    """Whether a body of this type is read as JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
