"""`hardpoint serve`: models over HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hardpoint.cli import interrupts
from hardpoint.cli.options import MODEL_HELP, ServedEngineOptions, takes
from hardpoint.cli.session import show_formats
from hardpoint.interfaces.errors import ConfigError, KVCacheTooSmall

if TYPE_CHECKING:
    from hardpoint.server.metrics import Metrics
    from hardpoint.server.run import ServerSettings
    from hardpoint.server.served_model import ServedModel, ServingOptions
    from hardpoint.server.tracing import Tracing

_SERVER, _CONTROL, _REPLICAS = "Server", "Control", "Replicas"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where a server listens, and how it serves its models."""

    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=_SERVER)] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=_SERVER)] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that requests must bear; repeatable.",
            envvar="HARDPOINT_API_KEY",
            show_envvar=True,
            rich_help_panel=_SERVER,
        ),
    ] = None
    when_asleep: Annotated[
        str | None,
        typer.Option(
            help="A request for a model that sleeps: reject, queue or wake.",
            show_default="wake where the server itself puts models to sleep, or else reject",
            rich_help_panel=_SERVER,
        ),
    ] = None
    max_requests: Annotated[
        int, typer.Option(help="Most requests in progress for each model.", rich_help_panel=_SERVER)
    ] = 4096
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What all models together may take of the device, such as 8GiB; those that do not fit sleep until they are asked for.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    min_awake: Annotated[
        float, typer.Option(help="Seconds that a model stays awake at least.", rich_help_panel=_SERVER)
    ] = 1.0
    idle_sleep: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a request after which a model gives its memory back; the next request wakes it.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request may take.", rich_help_panel=_SERVER)
    ] = None
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds that requests in progress have at the end.", rich_help_panel=_SERVER)
    ] = 60.0
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="How models write tool calls: hermes (also Qwen), llama3_json, or auto by the chat template.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Tell a model's reasoning from its answer: qwen3, deepseek_r1, or auto by the chat template.",
            show_default="no",
            rich_help_panel=_SERVER,
        ),
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="A LoRA adapter as NAME=FOLDER, which requests name as their model; once for each, of the only model.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    enable_lora: Annotated[
        bool,
        typer.Option(help="Take adapters that operators load; given with --lora-modules.", rich_help_panel=_SERVER),
    ] = False
    max_loras: Annotated[
        int | None,
        typer.Option(
            help="Most adapters in one step.", show_default="as many as --lora-modules", rich_help_panel=_SERVER
        ),
    ] = None
    max_lora_rank: Annotated[int, typer.Option(help="Greatest rank of an adapter.", rich_help_panel=_SERVER)] = 16
    max_cpu_loras: Annotated[
        int | None,
        typer.Option(
            help="Most adapters kept on the host.", show_default="as many as --max-loras", rich_help_panel=_SERVER
        ),
    ] = None
    tls_certificate: Annotated[Path | None, typer.Option(help="File in PEM.", rich_help_panel=_SERVER)] = None
    tls_key: Annotated[Path | None, typer.Option(help="File in PEM.", rich_help_panel=_SERVER)] = None
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Address of a collector of OpenTelemetry traces (OTLP over HTTP); needs the extra otel.",
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            show_envvar=True,
            rich_help_panel=_SERVER,
        ),
    ] = None

    def settings(self, control: ControlOptions) -> ServerSettings:
        """Return where the server listens, and who may ask it."""
        from hardpoint.server.run import ServerSettings

        return ServerSettings(
            host=self.host,
            port=self.port,
            control_host=control.control_host,
            control_port=control.control_port,
            control_socket=None if control.control_socket is None else str(control.control_socket),
            api_keys=tuple(self.api_key or ()),
            control_token=os.environ.get("HARDPOINT_CONTROL_TOKEN"),
            tls_certificate=None if self.tls_certificate is None else str(self.tls_certificate),
            tls_key=None if self.tls_key is None else str(self.tls_key),
        )

    def serving(self) -> ServingOptions:
        """Return how each model is served; raises ConfigError."""
        from hardpoint.server.served_model import ServingOptions

        names = {one.name for one in fields(ServingOptions)}
        return ServingOptions.parse({name: value for name, value in asdict(self).items() if name in names})

    def adapters(self) -> dict[str, str]:
        """Return the folders of adapters by their names; raises ConfigError."""
        found: dict[str, str] = {}
        for one in self.lora_modules or []:
            name, _, path = one.partition("=")
            if not name or not path or name in found:
                raise ConfigError("an adapter is NAME=FOLDER, each with a name of its own", found=one)
            found[name] = path
        return found


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Where operators reach a server."""

    control_port: Annotated[
        int | None,
        typer.Option(
            help="Port for operators; the token is read from HARDPOINT_CONTROL_TOKEN.", rich_help_panel=_CONTROL
        ),
    ] = None
    control_host: Annotated[str, typer.Option(help="Its address.", rich_help_panel=_CONTROL)] = "127.0.0.1"
    control_socket: Annotated[
        Path | None, typer.Option(help="A socket for operators instead.", rich_help_panel=_CONTROL)
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Replicas of a model on a Ray cluster."""

    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most replicas of the model, on a Ray cluster (--executor ray).", rich_help_panel=_REPLICAS
        ),
    ] = None
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Fewest; with 0 the last one ends when it is idle, and a request starts one.",
            show_default="as many as --replicas",
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    requests_per_replica: Annotated[
        int, typer.Option(min=1, help="In progress, to which their number is fitted.", rich_help_panel=_REPLICAS)
    ] = 32
    end_after: Annotated[
        float, typer.Option(help="Seconds with fewer requests after which one ends.", rich_help_panel=_REPLICAS)
    ] = 600.0
    imbalance: Annotated[
        int,
        typer.Option(
            min=0,
            help="Requests that the replica which knows a prompt's beginning may have more than the least busy one.",
            rich_help_panel=_REPLICAS,
        ),
    ] = 8
    ray_address: Annotated[
        str | None,
        typer.Option(help="The cluster; else RAY_ADDRESS, else one on this machine.", rich_help_panel=_REPLICAS),
    ] = None
    ray_resource: Annotated[
        str | None,
        typer.Option(help="What Ray calls the devices.", show_default="the backend's", rich_help_panel=_REPLICAS),
    ] = None


@takes(server=ServerOptions, control=ControlOptions, cluster=ClusterOptions, engine=ServedEngineOptions)
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            help=f"{MODEL_HELP} NAME=MODEL gives it another name.",
            metavar="MODEL...",
        ),
    ],
    *,
    server: ServerOptions,
    control: ControlOptions,
    cluster: ClusterOptions,
    engine: ServedEngineOptions,
) -> None:
    """Serve models over HTTP, as OpenAI's interface has it, until SIGTERM or Ctrl-C."""
    try:
        from hardpoint.server.budget import DeviceBudget, too_small
        from hardpoint.server.metrics import Metrics
        from hardpoint.server.run import HardpointServer
        from hardpoint.server.run import serve as run
    except ImportError as error:
        raise ConfigError(
            "the server's packages are not installed", found=str(error), hint="Install the extra: hardpoint[serve]"
        ) from error
    settings, options, adapters = server.settings(control), server.serving(), server.adapters()
    if len(models) > 1 and adapters:
        raise ConfigError(
            "adapters are of one model", found=", ".join(models), hint="Load them by the control interface instead"
        )
    if cluster.replicas is not None:
        refused = {
            "--lora-modules or --enable-lora": adapters or server.enable_lora or None,
            "--device-memory": server.device_memory,
            "--control-port": control.control_port,
            "--control-socket": control.control_socket,
            "--otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT": server.otlp_endpoint or None,
        }
        _check_one_model(models, [name for name, given in refused.items() if given is not None])
        _serve_replicas(models[0], engine, options, settings, cluster)
        return
    limit = None if server.device_memory is None else size_of(server.device_memory)
    by_limit = {} if limit is None else within(limit, engine)
    chosen = engine.settings() | by_limit
    if adapters or server.enable_lora:
        chosen |= {
            "enable_lora": True,
            "max_loras": server.max_loras or len(adapters) or 1,
            "max_lora_rank": server.max_lora_rank,
            "max_cpu_loras": server.max_cpu_loras,
        }
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tracing = None if not server.otlp_endpoint else _tracing(server.otlp_endpoint)
    metrics = Metrics(tracing)

    async def whole() -> None:
        budget = None if limit is None else DeviceBudget(limit, server.min_awake)
        served = [_served(one, chosen, options, metrics, adapters) for one in models]
        running = HardpointServer(settings, served, metrics, budget)
        ready = asyncio.Event()
        telling = asyncio.create_task(_tell(running, ready))
        try:
            await run(running, ready)
        except KVCacheTooSmall as error:
            if limit is None or not by_limit:
                raise
            # The error names a share of the device, which the operator has not given: say it of --device-memory.
            raise too_small(error, limit, by_limit["memory_utilization"]) from error
        finally:
            telling.cancel()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    interrupts.raise_from_here()
    gc.disable()  # until all is loaded
    try:
        _run(whole())
    finally:
        gc.enable()


def _check_one_model(models: list[str], refused: list[str]) -> None:
    if len(models) > 1:
        raise ConfigError("replicas are of one model", found=", ".join(models), hint="Run the command once for each")
    if refused:
        raise ConfigError(
            "replicas were asked for", found=", ".join(refused), hint="Leave these out: a replica has none"
        )


def _ray_resource(engine: ServedEngineOptions) -> str:
    """Return what Ray calls the devices of the backend that this machine has."""
    from hardpoint.plugins import resolve_backend

    descriptor = resolve_backend(engine.backend, require_accelerator=engine.require_accelerator).descriptor
    return (descriptor.cluster_resource or "GPU") if descriptor.accelerator else "CPU"


def _serve_replicas(
    given: str,
    engine: ServedEngineOptions,
    serving: ServingOptions,
    settings: ServerSettings,
    cluster: ClusterOptions,
) -> None:
    """Run replicas until SIGTERM or Ctrl-C."""
    from hardpoint.server.ray_app import ReplicaOptions, Replicas

    if engine.executor != "ray":
        raise ConfigError(
            "replicas run on a Ray cluster", found=f"--executor {engine.executor}", hint="Give --executor ray"
        )
    # Ray places replicas; the ranks of one replica are processes on its machine.
    chosen = engine.settings() | {"executor": "auto"}
    name, model = _named(given)
    wanted = asdict(cluster)
    address, resource = wanted.pop("ray_address"), wanted.pop("ray_resource") or _ray_resource(engine)
    amount = engine.tensor_parallel_size * engine.pipeline_parallel_size
    options = ReplicaOptions.parse(wanted | {"resource": resource, "amount": amount})
    interrupts.raise_from_here()
    running = Replicas(name, model, chosen, serving, settings, options, address)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    scheme = "http" if settings.tls_key is None else "https"
    url = f"{scheme}://{settings.host}:{settings.port}"
    console.print(f"Serving {name} at {url}, with at most {options.replicas} replicas (OpenAI's interface at {url}/v1)")
    try:
        ended.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        running.end()


def _run(main: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _tell(server: Any, ready: asyncio.Event) -> None:
    await ready.wait()
    # Loaded objects stay. To collect among them again and again would take a sixth of the time of answering.
    gc.freeze()
    gc.enable()
    # Answers leave few cycles, and the default threshold would collect every few tokens: a twentieth of the time of answering.
    gc.set_threshold(50_000)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for model in server.fleet:
        info = model.llm.info
        console.print(
            f"{model.name}: {info.architecture} on {info.backend}, {show_formats(info)}context {info.max_model_len}, "
            f"loaded in {info.load_seconds:.1f} s"
        )
    console.print(f"Serving at {server.url} (OpenAI's interface at {server.url}/v1)")
    if server.control_url is not None:
        console.print(f"Control at {server.control_url}")


def _tracing(endpoint: str) -> Tracing:
    """Return what sends traces to a collector; raises ConfigError."""
    if not re.match(r"https?://[^/\s]", endpoint):
        raise ConfigError(
            "the collector of traces has no address of HTTP",
            found=f"'{endpoint}'",
            hint="Give --otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT as http://HOST:4318",
        )
    try:
        from hardpoint.server.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            "the packages for traces are not installed",
            found=str(error),
            hint="Install the extra: hardpoint[otel], or unset OTEL_EXPORTER_OTLP_ENDPOINT",
        ) from error
    return Tracing(endpoint)


def _served(
    given: str, settings: dict[str, Any], options: ServingOptions, metrics: Metrics, adapters: dict[str, str]
) -> ServedModel:
    from hardpoint.server.served_model import ServedModel

    name, model = _named(given)
    return ServedModel(name, model, settings, options, metrics.of(name), adapters)


def _named(given: str) -> tuple[str, str]:
    """Return a model's name and place."""
    from hardpoint.models.hub import HubModel

    name, found, model = given.partition("=")
    if not found:
        hub = None if Path(given).exists() else HubModel.parse(given)
        name, model = (Path(given).name or given) if hub is None else hub.repo, given
    if not name or not model:
        raise ConfigError(f"'{given}' names no model", hint="Give MODEL or NAME=MODEL")
    return name, model


def size_of(text: str) -> int:
    """Return the bytes of a size such as 8GiB, 500MB or 1073741824; raises typer's error for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"'{text}' is not a size, such as 8GiB", param_hint="--device-memory")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))


def within(limit: int, engine: ServedEngineOptions) -> dict[str, Any]:
    """Return the settings by which one engine takes at most `limit` bytes; none where the user has sized its cache. Raises BackendError."""
    from hardpoint.plugins import resolve_backend

    if engine.num_blocks is not None or engine.memory_utilization is not None:
        return {}
    device = resolve_backend(engine.backend, require_accelerator=engine.require_accelerator).device
    return {"memory_utilization": min(limit / device.total_memory, 1.0)} if device.total_memory else {}
