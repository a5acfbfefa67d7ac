"""The application that answers those who run models: sleep, wake, weights, and where each model stands.

It has a port and a token of its own, so that nobody who may ask for text may put a model to sleep. What takes time is an
`Operation`: a call waits for it, or with `wait=false` returns at once with its id. The paths of vLLM's development mode do the same
under the same token.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp

from hardpoint import __version__
from hardpoint.interfaces.errors import EngineDead
from hardpoint.server import errors, page
from hardpoint.server.app import metrics_page
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.http import Gate
from hardpoint.server.metrics import Metrics
from hardpoint.server.operations import Operation, Operations, as_json
from hardpoint.server.protocol import Unicode
from hardpoint.server.served_model import ServedModel
from hardpoint.weights.checkpoint import SafetensorsCheckpoint

_TagQuery: TypeAlias = Annotated[list[str] | None, Query()]

_SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has POSIX shared memory."""

_WEIGHTS_BODY = {
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
_STARTED: dict[int | str, dict[str, Any]] = {202: {"description": "The operation, which has begun (`wait=false`)."}}
_ALLOWED_CALLS = ("reload_weights", "reset_prefix_cache", "declare_weights_valid")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SleepBody(_Body):
    """How to sleep; see `LLM.sleep`."""

    level: Literal[0, 1, 2] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"
    tags: list[Unicode] | None = None
    tier: Literal["host", "disk", "source"] | None = None
    kv: Literal["discard", "preserve"] | None = None
    verify: bool = False
    drain_timeout: float | None = None


class WakeBody(_Body):
    """What to wake: these tags, or all."""

    tags: list[Unicode] | None = None


class PauseBody(_Body):
    """What becomes of requests in progress."""

    mode: Literal["abort", "wait", "keep"] = "keep"
    drain_timeout: float | None = None


class ReloadBody(_Body):
    """A folder or file on the server with weights of the same shapes; None for the model's own."""

    model: Unicode | None = None


class WeightsBody(_Body):
    """Where a safetensors file with new weights lies: a path on the server, or the name of a POSIX shared memory."""

    file: str | None = None
    shared_memory: str | None = None

    def path(self) -> Path:
        """Return the file's path; raises ApiError."""
        if (self.file is None) == (self.shared_memory is None):
            raise ApiError(400, "either file or shared_memory is needed", "invalid_value", param="file")
        if self.file is not None:
            return Path(self.file)
        name = (self.shared_memory or "").removeprefix("/")
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise ApiError(400, "shared_memory: a name without slashes is needed", "invalid_value", "shared_memory")
        return _SHARED_MEMORY / name


class CallBody(_Body):
    """vLLM's `/collective_rpc`: a method by name, of a closed list."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class AdapterBody(_Body):
    """vLLM's `/v1/load_lora_adapter`: a folder on the server, and the name by which requests ask for it."""

    lora_name: Unicode
    lora_path: Unicode


class UnloadedAdapterBody(_Body):
    """vLLM's `/v1/unload_lora_adapter`; its number says nothing here."""

    lora_name: Unicode
    lora_int_id: int | None = None


def control_app(fleet: Fleet, metrics: Metrics, token: str | None, max_upload: int) -> ASGIApp:
    """Return the application for operators.

    Args:
        token: that each request must bear; None where the way in is guarded otherwise (a socket's permissions).
        max_upload: bytes of weights that a request may bring.
    """
    app = FastAPI(title="Hardpoint control", version=__version__, responses=errors.RESPONSES)
    errors.install(app)
    control = _Control(fleet, max_upload)
    app.include_router(_models(control))
    app.include_router(_operations(control))
    app.include_router(_vllm(control))
    app.include_router(page.router("operators"))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return await metrics_page(fleet, metrics)

    return Gate(app, [] if token is None else [token], ["/health", *page.PATHS], streamed=["PUT"])


class _Control:
    """What the routes share."""

    def __init__(self, fleet: Fleet, max_upload: int) -> None:
        self.fleet, self.operations = fleet, Operations()
        self._max_upload = max_upload

    async def run(
        self,
        model: ServedModel,
        kind: str,
        work: Callable[[Callable[[int, int], None]], Coroutine[Any, Any, Any]],
        wait: bool,
        cancel: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Response:
        """Do something to a model; returns its operation, done or begun. A client that leaves does not end it."""

        async def counted(note: Callable[[int, int], None]) -> Any:
            try:
                return await work(note)
            except Exception as error:
                model.metrics.failed(kind, error)
                raise

        operation = self.operations.add(Operation(model.name, kind, counted, cancel))
        if not wait:
            return JSONResponse(operation.show(), 202, {"Location": f"/operations/{operation.id}"})
        await asyncio.wait([operation.task])
        return JSONResponse(operation.result())

    async def sleep(self, name: str | None, body: SleepBody, wait: bool) -> Response:
        """Put a model to sleep."""
        model = self.fleet.get(name)
        arguments = body.model_dump()

        async def work(note: Callable[[int, int], None]) -> Any:
            return await model.sleep(**arguments, progress=note)

        drains = body.mode == "wait"
        return await self.run(model, "sleep", work, wait, model.resume if drains else None)

    async def wake(self, name: str | None, tags: list[str] | None, wait: bool) -> Response:
        """Wake a model."""
        model = self.fleet.get(name)
        return await self.run(model, "wake", lambda note: model.wake_up(tags), wait)

    async def reload(self, name: str | None, path: str | None, wait: bool) -> Response:
        """Load a model's weights again."""
        model = self.fleet.get(name)
        return await self.run(model, "reload", lambda note: model.llm.reload_weights(path), wait)

    async def update(self, name: str | None, file: Path, wait: bool) -> Response:
        """Replace a model's weights by those of a safetensors file."""
        model = self.fleet.get(name)
        return await self.run(model, "update", lambda note: _update(model, file), wait)

    async def upload(self, name: str | None, request: Request) -> Response:
        """Replace a model's weights by those of a safetensors file, which is the request's body."""
        self.fleet.get(name)
        try:
            with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
                size = 0
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_upload:
                        raise ApiError(413, f"the weights are larger than {self._max_upload} bytes", "body_too_large")
                    await asyncio.to_thread(file.write, part)
                await asyncio.to_thread(file.flush)
                return await self.update(name, Path(file.name), True)
        except ClientDisconnect:
            raise ApiError(499, "the client left", "client_closed_request") from None
        except OSError as error:
            where = tempfile.gettempdir()
            raise ApiError(507, f"the weights cannot be written to {where}: {error.strerror}", "no_space") from error

    async def show(self, model: ServedModel) -> dict[str, Any]:
        """Return where a model stands."""
        shown: dict[str, Any] = {
            "name": model.name,
            "model": model.model,
            "state": await model.state(),
            "requests": model.in_progress,
            "restarts": model.restarts,
            "device_bytes": model.device_bytes,
            "reason": model.reason,
            "failure": None if model.failure is None else str(model.failure),
        }
        if model.is_open:
            try:
                shown |= {"sleep": as_json(await model.status()), "engine": as_json(model.llm.info)}
                shown["stats"] = as_json(await model.llm.stats())
            except EngineDead as error:
                shown["failure"] = str(error)
        return shown


async def _update(model: ServedModel, file: Path) -> int:
    checkpoint = await asyncio.to_thread(SafetensorsCheckpoint, [file])
    return await model.llm.update_weights((name, checkpoint.read(name)) for name in checkpoint.shapes())


def _models(control: _Control) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        budget = control.fleet.budget
        shown: dict[str, Any] = {"models": [await control.show(model) for model in control.fleet]}
        if budget is not None:
            shown |= {"device_memory": budget.limit, "decisions": [as_json(one) for one in budget.decisions]}
        return shown

    @routes.get("/models/{name}")
    async def one(name: str) -> dict[str, Any]:
        return await control.show(control.fleet.get(name))

    @routes.post("/models/{name}/sleep", responses=_STARTED)
    async def sleep(name: str, body: SleepBody | None = None, wait: bool = True) -> Response:
        return await control.sleep(name, body or SleepBody(), wait)

    @routes.post("/models/{name}/wake", responses=_STARTED)
    async def wake(name: str, body: WakeBody | None = None, wait: bool = True) -> Response:
        return await control.wake(name, None if body is None else body.tags, wait)

    @routes.post("/models/{name}/pause", responses=_STARTED)
    async def pause(name: str, body: PauseBody | None = None, wait: bool = True) -> Response:
        how = body or PauseBody()
        model = control.fleet.get(name)
        return await control.run(model, "pause", lambda note: model.pause(how.mode, how.drain_timeout), wait)

    @routes.post("/models/{name}/resume")
    async def resume(name: str) -> Response:
        model = control.fleet.get(name)
        return await control.run(model, "resume", lambda note: model.resume(), True)

    @routes.post("/models/{name}/reload", responses=_STARTED)
    async def reload(name: str, body: ReloadBody | None = None, wait: bool = True) -> Response:
        return await control.reload(name, None if body is None else body.model, wait)

    @routes.put("/models/{name}/weights", openapi_extra={"requestBody": _WEIGHTS_BODY})
    async def upload(name: str, request: Request) -> Response:
        return await control.upload(name, request)

    @routes.post("/models/{name}/weights", responses=_STARTED)
    async def update(name: str, body: WeightsBody, wait: bool = True) -> Response:
        return await control.update(name, body.path(), wait)

    @routes.delete("/models/{name}/prefix-cache")
    async def reset(name: str) -> Response:
        model = control.fleet.get(name)
        return await control.run(model, "reset_prefix_cache", lambda note: model.llm.reset_prefix_cache(), True)

    return routes


def _operations(control: _Control) -> APIRouter:
    routes = APIRouter()

    @routes.get("/operations")
    async def operations() -> dict[str, Any]:
        return {"operations": [one.show() for one in control.operations]}

    @routes.get("/operations/{name}")
    async def operation(name: str) -> dict[str, Any]:
        return control.operations.get(name).show()

    @routes.delete("/operations/{name}")
    async def cancel(name: str) -> dict[str, Any]:
        found = control.operations.get(name)
        await found.cancel()
        return found.show()

    return routes


def _vllm(control: _Control) -> APIRouter:
    """Return the paths of vLLM's development mode; `model` names one where several are served."""
    routes = APIRouter()

    @routes.post("/sleep")
    async def sleep(
        level: Literal["0", "1", "2"] = "1",
        mode: Literal["abort", "wait", "keep"] = "abort",
        tags: _TagQuery = None,
        model: str | None = None,
    ) -> Response:
        return await control.sleep(model, SleepBody(level=int(level), mode=mode, tags=tags), True)  # type: ignore[arg-type]

    @routes.post("/wake_up")
    async def wake_up(tags: _TagQuery = None, model: str | None = None) -> Response:
        return await control.wake(model, tags, True)

    @routes.get("/is_sleeping")
    async def is_sleeping(model: str | None = None) -> dict[str, bool]:
        return {"is_sleeping": await control.fleet.get(model).llm.is_sleeping()}

    @routes.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "keep", model: str | None = None) -> Response:
        found = control.fleet.get(model)
        return await control.run(found, "pause", lambda note: found.pause(mode), True)

    @routes.post("/resume")
    async def resume(model: str | None = None) -> Response:
        found = control.fleet.get(model)
        return await control.run(found, "resume", lambda note: found.resume(), True)

    @routes.post("/reset_prefix_cache")
    async def reset(model: str | None = None) -> Response:
        found = control.fleet.get(model)
        return await control.run(found, "reset_prefix_cache", lambda note: found.llm.reset_prefix_cache(), True)

    @routes.post("/start_profile")
    async def start_profile(model: str | None = None) -> Response:
        found = control.fleet.get(model)
        return await control.run(found, "start_profile", lambda note: found.llm.start_profile(), True)

    @routes.post("/stop_profile")
    async def stop_profile(model: str | None = None) -> Response:
        found = control.fleet.get(model)
        return await control.run(found, "stop_profile", lambda note: found.llm.stop_profile(), True)

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: AdapterBody, model: str | None = None) -> Response:
        found = control.fleet.get(model)
        control.fleet.check_new(body.lora_name, found)
        await found.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadedAdapterBody, model: str | None = None) -> Response:
        await control.fleet.get(model).unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.post("/collective_rpc")
    async def collective_rpc(body: CallBody, model: str | None = None) -> Response:
        if body.method not in _ALLOWED_CALLS:
            allowed = ", ".join(_ALLOWED_CALLS)
            raise ApiError(
                400, f"method: '{body.method[:100]}' is not one of {allowed}", "invalid_value", param="method"
            )
        if body.args or body.kwargs:
            raise ApiError(400, f"{body.method} takes no arguments here", "invalid_value", param="args")
        found = control.fleet.get(model)
        return await control.run(found, body.method, lambda note: getattr(found.llm, body.method)(), True)

    return routes
