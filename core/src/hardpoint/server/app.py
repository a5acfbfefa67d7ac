"""The application that answers those who use models."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from hardpoint import __version__
from hardpoint.interfaces.errors import HardpointError
from hardpoint.server import chat, completions, errors, page, pooling, responses, similarity, texts
from hardpoint.server.direct import Direct
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.http import Gate
from hardpoint.server.metrics import Metrics
from hardpoint.server.protocol import ModelCard, ModelList
from hardpoint.server.served_model import ServedModel

OPEN_PATHS = ("/health", "/ready", "/version", *page.PATHS)
"""For which no key is asked: what a load balancer looks at, and the page's files."""


def public_app(fleet: Fleet, metrics: Metrics, *, keys: Collection[str] = (), max_body: int = 32 << 20) -> ASGIApp:
    """Return the application for users.

    Args:
        keys, max_body: see `Gate`.
    """
    about = "An OpenAI-compatible server of language models."
    app = FastAPI(title="Hardpoint", version=__version__, description=about, responses=errors.RESPONSES)
    errors.install(app)
    generating = [part.router(fleet) for part in (completions, chat, responses)]
    for router in (*generating, *(part.router(fleet) for part in (pooling, similarity, texts))):
        app.include_router(router)
    app.include_router(page.router("users"))

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> ModelList:
        served = [one for model in fleet for one in (model, *(fleet.asked(name) for name in model.adapters))]
        return ModelList(data=[await _card(one) for one in served])

    @app.get("/v1/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> ModelCard:
        return await _card(fleet.asked(name))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server runs, whatever its models do."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether every model has an engine, awake or asleep; 503 otherwise."""
        states = {model.name: await model.state() for model in fleet}
        for one in fleet:
            if not one.is_open:
                raise ApiError(503, f"the model '{one.name}' is {states[one.name]}", "not_ready", retry_after=5)
        return states

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return await metrics_page(fleet, metrics)

    return Gate(Direct(app, generating), keys, OPEN_PATHS, max_body)


async def metrics_page(fleet: Fleet, metrics: Metrics) -> Response:
    """Return the metrics as Prometheus reads them."""
    for model in fleet:
        try:
            metrics.set_engine(model.name, await model.llm.stats())
            await model.status()
        except (ApiError, HardpointError):
            metrics.set_engine(model.name, None)
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        created=model.created,
        root=model.model,
        max_model_len=model.llm.info.max_model_len if model.is_open else None,
        state=await model.state(),
        parent=model.parent,
    )
