"""A model on many machines: replicas of its server as an application of Ray Serve, which places, restarts and counts them.

A replica is the application for users (`app.py`) over one `ServedModel`. Before the replicas stands a front on the cluster's head, behind
Ray's proxy there: it checks keys and bodies, names the prompt's beginnings for the router (`ray_router.py`), and gives a request to another
replica when one is lost before its answer began. Ray is imported late, so that what is missing is told as one clear error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint import __version__
from hardpoint.executor.ray_placement import Demand, rooms_of
from hardpoint.executor.ray_session import RaySession, RaySettings, import_ray
from hardpoint.interfaces.errors import ClusterError, ConfigError
from hardpoint.server import errors, page
from hardpoint.server.app import OPEN_PATHS, public_app
from hardpoint.server.errors import ApiError
from hardpoint.server.fleet import Fleet
from hardpoint.server.http import Gate
from hardpoint.server.metrics import Metrics
from hardpoint.server.prefixes import beginnings
from hardpoint.server.run import ServerSettings
from hardpoint.server.served_model import ServedModel, ServingOptions
from hardpoint.validation import NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Validated

_log = logging.getLogger("hardpoint.server")

APPLICATION, REPLICAS, FRONT = "hardpoint", "replicas", "front"
_TRIES = 6
_FIRST_DELAY = 0.1
"""Seconds before a request is given to another replica, doubled each time: it takes Ray seconds to know that a machine is gone."""
_END_SECONDS = 10.0
"""That a replica has for its end when its requests have ended, or their time is over."""
_FRONT_REQUESTS = 100_000
"""That the front takes at a time; how many a model takes is the replicas' to say."""
_SCOPE = ("type", "asgi", "http_version", "method", "path", "raw_path", "query_string", "headers", "scheme")
"""Of a request's scope, what a replica needs and another process can be sent."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Validated):
    """How a model is replicated.

    Attributes:
        replicas: most replicas.
        min_replicas: fewest; None for always as many as `replicas`. With 0 the last one ends, too, and a request starts one.
        requests_per_replica: in progress, to which Ray Serve fits the number of replicas.
        end_after: seconds with fewer requests after which a replica is ended.
        imbalance: requests in progress that a replica with the prompt's beginning may have more than the least busy one.
        resource, amount: that Ray sets aside for each replica.
    """

    _called = "an option of replicas"

    replicas: PositiveInt
    min_replicas: NonNegativeInt | None = None
    requests_per_replica: PositiveInt = 32
    end_after: Seconds = 600.0
    imbalance: NonNegativeInt = 8
    resource: str = "CPU"
    amount: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        self._check_types()
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ConfigError(
                f"at least {self.min_replicas} replicas are asked for, and at most {self.replicas}",
                hint="Lower --min-replicas, or raise --replicas",
            )

    @property
    def actor_options(self) -> dict[str, Any]:
        """What a replica takes of its machine, as Ray's options."""
        if self.resource == "CPU":
            return {"num_cpus": self.amount}
        if self.resource == "GPU":
            return {"num_cpus": 0, "num_gpus": self.amount}
        return {"num_cpus": 0, "resources": {self.resource: self.amount}}

    @property
    def at_first(self) -> int:
        """Replicas that are started first."""
        return self.replicas if self.min_replicas is None else max(self.min_replicas, 1)

    @property
    def scaling(self) -> dict[str, Any]:
        """How many replicas there are, as Ray Serve's options."""
        if self.min_replicas in (None, self.replicas):
            return {"num_replicas": self.replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "initial_replicas": self.at_first,
                "max_replicas": self.replicas,
                "target_ongoing_requests": self.requests_per_replica,
                "upscale_delay_s": min(self.end_after, 5.0),
                "downscale_delay_s": self.end_after,
                "look_back_period_s": 15.0,
            }
        }


class EngineLost(Exception):
    """A replica has no engine at the moment."""


class Replica:
    """One replica: a served model, and the application for users over it."""

    def __init__(self, name: str, model: str, settings: Mapping[str, Any], options: ServingOptions) -> None:
        from ray import serve

        metrics = Metrics()
        self._id = serve.get_replica_context().replica_id.unique_id.encode()
        self._model = ServedModel(name, model, settings, options, metrics.of(name))
        # The front has limited the size of bodies already.
        self._app = public_app(Fleet([self._model]), metrics, max_body=1 << 40)
        self._starting: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Load the model, once; raises what `LLM` raises."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._model.start())
        await self._starting

    async def check_health(self) -> None:
        """Raise for a model without an engine; Ray Serve replaces a replica for which that lasts."""
        await self.started()
        if not self._model.is_open:
            raise EngineLost(f"the model '{self._model.name}' is {await self._model.state()}")

    async def close(self) -> None:
        """End the engine."""
        await self._model.close()

    __del__ = close  # Ray Serve awaits it before it ends a replica

    async def answer(self, names: Sequence[str], scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the messages of the answer to a request, as many at a time as there are.

        Args:
            names: of the prompt's beginnings, which the router reads.

        Raises:
            EngineLost: the engine died before the answer began.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                # A client that leaves ends this generator, so no disconnect is reported here.
                await asyncio.Event().wait()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-replica", self._id)]
            messages.put_nowait(message)

        await self.started()
        answering = asyncio.ensure_future(self._app(dict(scope), receive, send))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                is_over = batch[-1] is None
                told = [message for message in batch if message is not None]
                if told and told[0].get("status") == 503 and not self._model.is_open:
                    raise EngineLost(f"the model '{self._model.name}' is {await self._model.state()}")
                if told:
                    yield told
            await answering
        finally:
            answering.cancel()


class Forward:
    """Gives each request to a replica, and to another one where that is lost before it began to answer.

    Args:
        replicas: Ray Serve's handle.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        names = beginnings(body)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        delay, is_stream, begun = _FIRST_DELAY, False, False
        for left in reversed(range(_TRIES)):
            answers = self._replicas.answer.remote(names, plain, body)
            try:
                async for messages in answers:
                    for message in messages:
                        begun = True
                        is_stream = is_stream or _is_event_stream(message)
                        await send(message)
                return
            except Exception as error:
                refusal = _refusal(error)
                if refusal is None:
                    raise
                if begun and is_stream:
                    # The stream has begun: the error is an event of it, as it is where an engine dies under the server itself.
                    event = b"data: " + refusal.response().body + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                    return
                if begun:
                    raise
                if not (left and _is_loss(error)):
                    raise refusal from error
                _log.warning(
                    "a replica was lost before it answered; the request goes to another one (%d tries left)", left
                )
            except BaseException:
                # The client left: stop its request on the replica.
                answers.cancel()
                raise
            # Without names of prompt beginnings no replica is preferred, least of all the one that was lost.
            names = ()
            await asyncio.sleep(delay)
            delay *= 2


def front_app(forward: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Return the application that stands before the replicas.

    It answers itself what load balancers ask, so that these start no replica.
    """
    app = FastAPI(openapi_url=None)
    errors.install(app)

    @app.get("/health")
    @app.get("/ready")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> None:
        raise ApiError(
            404, "replicas' metrics are not gathered; Ray has those of requests and replicas", "unknown_path"
        )

    app.include_router(page.router("users"))
    app.router.routes.append(Route("/{path:path}", forward))
    return Gate(app, settings.api_keys, OPEN_PATHS, settings.max_body_bytes)


def _refusal(error: Exception) -> ApiError | None:
    """Return the answer to a request that no replica has answered; None for an error that is not Ray's to explain."""
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    if _is_loss(error):
        return ApiError(503, "the replica that had the request was lost", "replica_lost", retry_after=5)
    if isinstance(error, BackPressureError):
        return ApiError(429, "all replicas are busy, and as many requests wait as may", "queue_full", retry_after=1)
    if isinstance(error, DeploymentUnavailableError):
        return ApiError(503, "there are no replicas: they could not be started", "not_ready", retry_after=5)
    return None


def _is_loss(error: Exception) -> bool:
    from ray.exceptions import NodeDiedError, RayActorError, WorkerCrashedError

    return isinstance(error, (RayActorError, NodeDiedError, WorkerCrashedError, EngineLost))


def _is_event_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )


def application(
    name: str,
    model: str,
    engine: Mapping[str, Any],
    serving: ServingOptions,
    settings: ServerSettings,
    options: ReplicaOptions,
) -> Any:
    """Return the application, as Ray Serve deploys it.

    Args:
        name: under which requests ask for the model.
        engine: settings, see `LLM`.
    """
    from ray import serve

    def front() -> ASGIApp:
        return front_app(Forward(serve.get_deployment_handle(REPLICAS, app_name=APPLICATION)), settings)

    replicas = serve.deployment(Replica).options(
        name=REPLICAS,
        ray_actor_options=options.actor_options,
        max_ongoing_requests=serving.max_requests,
        max_queued_requests=serving.max_requests,
        # An error of loading is reported at once, without further tries.
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=serving.drain_seconds + _END_SECONDS,
        request_router_config={
            "request_router_class": "hardpoint.server.ray_router.PrefixRouter",
            "request_router_kwargs": {"imbalance": options.imbalance},
        },
        **options.scaling,
    )
    fronted = serve.deployment(serve.ingress(front)()).options(
        name=FRONT,
        # On the head node, where the proxy is: a cluster ends with its head anyway, and no other machine's end loses a request.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=_FRONT_REQUESTS,
        graceful_shutdown_timeout_s=serving.drain_seconds + _END_SECONDS,
    )
    return fronted.bind(replicas.bind(name, model, dict(engine), serving))


class Replicas:
    """An application that runs, until `end`.

    Args:
        address: of the cluster; see `RaySettings`.
        others: see `application`.

    Raises:
        ConfigError: Ray is not installed.
        ClusterError: the cluster cannot be joined, runs Ray Serve already, or the replicas do not start.
    """

    def __init__(
        self,
        name: str,
        model: str,
        engine: Mapping[str, Any],
        serving: ServingOptions,
        settings: ServerSettings,
        options: ReplicaOptions,
        address: str | None = None,
    ) -> None:
        module = import_ray()
        try:
            from ray import serve
        except ImportError as error:
            raise ConfigError(
                "replicas were asked for, and Ray Serve cannot be imported",
                found=str(error),
                hint="Install it with `pip install 'hardpoint[replicas]'`, on every machine of the cluster",
            ) from error
        self._serve, self._session = serve, RaySession.join(module, RaySettings(address=address))
        self._longest_end = serving.drain_seconds + _END_SECONDS
        try:
            if serve.status().proxies:
                raise ClusterError(
                    "Ray Serve runs on this cluster already, with ports and applications of its own",
                    hint="End it with `serve shutdown`, or use another cluster",
                )
        except BaseException:
            self._session.leave()
            raise
        http: dict[str, Any] = {"host": settings.host, "port": settings.port}
        if settings.tls_certificate is not None:
            http |= {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
        try:
            _warn_of_little_room(module, options)
            serve.start(proxy_location="HeadOnly", http_options=http)
            app = application(name, model, engine, serving, settings, options)
            serve.run(app, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            found = _failure(serve.status()) or str(error)
            self._leave()
            raise ClusterError(f"the replicas of '{name}' do not start", found=found) from error
        except BaseException:
            self._leave()
            raise

    def end(self) -> None:
        """Refuse what is new, serve what is in progress for a while, and end the replicas."""
        try:
            # `shutdown` ends the proxy first, and with it all requests in progress.
            self._serve.delete(APPLICATION, _blocking=False)
            deadline = time.monotonic() + self._longest_end
            while self._serve.status().applications and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._serve.shutdown()
        self._session.leave()


def _failure(status: Any) -> str:
    """Return the last line that Ray Serve knows of why replicas did not start: the error's own."""
    application = status.applications.get(APPLICATION)
    message = "" if application is None else application.deployments[REPLICAS].message
    return next((line.strip() for line in reversed(message.splitlines()) if line.strip()), "")


def _warn_of_little_room(ray: Any, options: ReplicaOptions) -> None:
    """Say when replicas will wait for machines: which Ray may be about to add, so that it is no error."""
    demand = Demand(options.resource, options.amount, options.at_first, 1)
    rooms = rooms_of(ray.nodes(), options.resource)
    if not demand.fits(rooms.values()):
        has = ", ".join(f"{room:g} on {name}" for name, room in rooms.items() if room) or "none on any machine"
        _log.warning(
            "%d replicas with %g %s each wait for machines: the cluster has %s",
            options.at_first,
            options.amount,
            options.resource,
            has,
        )
