"""Starts the servers, and ends them in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from hardpoint.interfaces.errors import ConfigError
from hardpoint.server.app import public_app
from hardpoint.server.budget import DeviceBudget
from hardpoint.server.connections import Connection
from hardpoint.server.control import control_app
from hardpoint.server.fleet import Fleet
from hardpoint.server.metrics import Metrics
from hardpoint.server.served_model import ServedModel
from hardpoint.validation import NonNegativeInt, PositiveInt, Validated

_log = logging.getLogger("hardpoint.server")

_CLOSING_SECONDS = 2.0
"""In which connections close once all requests were answered; one with TLS waits for its client to agree, which an idle one does not."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Validated):
    """Where a server listens, and who may enter.

    Attributes:
        host, port: of the interface for users; port 0 takes a free one.
        control_host, control_port: of the one for operators; port 0 takes a free one.
        control_socket: path of a socket instead, which only its owner may open.
        api_keys: one of which each request must bear; none lets everybody in who reaches the port.
        control_token: that each request of operators must bear.
        max_body_bytes, max_upload_bytes: of a request of users, and of weights that operators send.
        tls_certificate, tls_key: files; both ports speak TLS then.
    """

    _called = "a setting of the server"

    host: str = "127.0.0.1"
    port: NonNegativeInt = 8000
    control_host: str = "127.0.0.1"
    control_port: NonNegativeInt | None = None
    control_socket: str | None = None
    api_keys: Sequence[str] = ()
    control_token: str | None = None
    max_body_bytes: PositiveInt = 32 << 20
    max_upload_bytes: int = 8 << 30
    tls_certificate: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.control_port is not None and not self.control_token:
            raise ConfigError(
                "the control interface has a port, and no token",
                hint="Set HARDPOINT_CONTROL_TOKEN, or give it a socket, which only its owner may open",
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and a key", hint="Give --tls-certificate and --tls-key")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty", hint="Leave it out to let everybody in")


class HardpointServer:
    """The two interfaces of one fleet.

    Attributes:
        url: of the interface for users, once it listens.
        control_url: of the one for operators; None without a port.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ServedModel],
        metrics: Metrics,
        budget: DeviceBudget | None = None,
    ) -> None:
        self.settings, self.fleet = settings, Fleet(models, budget)
        self.url = ""
        self.control_url: str | None = None
        self._metrics = metrics
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Have the server refuse what is new, serve what it has, and end."""
        self._ending.set()

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Load the models, listen, and serve until `end`; raises ConfigError where a port cannot be had, and what loading raises.

        Args:
            ready: set once requests are taken.
        """
        settings = self.settings
        _check_tls(settings)
        listening = _listen(settings.host, settings.port)
        control: socket.socket | None = None
        try:
            control = self._control_socket()
            await self.fleet.start()
        except BaseException:
            listening.close()
            if control is not None:
                control.close()
                self.remove_control_socket()
            raise
        scheme = "http" if settings.tls_key is None else "https"
        self.url = f"{scheme}://{_address(listening)}"
        app = public_app(self.fleet, self._metrics, keys=settings.api_keys, max_body=settings.max_body_bytes)
        servers = [(self._server(app), listening)]
        if control is not None:
            token = None if settings.control_socket is not None else settings.control_token
            operators = control_app(self.fleet, self._metrics, token, settings.max_upload_bytes)
            servers.append((self._server(operators), control))
            if settings.control_socket is None:
                self.control_url = f"{scheme}://{_address(control)}"
        serving = [asyncio.create_task(server.serve([one])) for server, one in servers]
        if ready is not None:
            ready.set()
        try:
            await asyncio.wait(
                [asyncio.create_task(self._ending.wait()), *serving], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await self._end([server for server, _ in servers], serving)
        for one in serving:
            if one.done():
                one.result()

    async def _end(self, servers: Sequence[_QuietServer], serving: Sequence[asyncio.Task[None]]) -> None:
        # The servers still listen while requests in progress end: new ones are answered with 503.
        _log.info("ending: no new requests")
        await self.fleet.close()
        for server in servers:
            server.end()
        await asyncio.wait(serving, timeout=_CLOSING_SECONDS)
        self.remove_control_socket()

    def remove_control_socket(self) -> None:
        """Remove the socket for operators, if there is one."""
        if self.settings.control_socket is not None:
            Path(self.settings.control_socket).unlink(missing_ok=True)

    def _server(self, app: ASGIApp) -> _QuietServer:
        tracing = self._metrics.tracing
        config = uvicorn.Config(
            app if tracing is None else tracing.around(app),
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            # Nothing here depends on the client's address or scheme, so that a proxy's headers need not be trusted.
            proxy_headers=False,
            lifespan="off",
            ssl_certfile=self.settings.tls_certificate,
            ssl_keyfile=self.settings.tls_key,
            timeout_graceful_shutdown=None,
        )
        return _QuietServer(config)

    def _control_socket(self) -> socket.socket | None:
        settings = self.settings
        if settings.control_socket is not None:
            return _listen_at(Path(settings.control_socket))
        return None if settings.control_port is None else _listen(settings.control_host, settings.control_port)


class _QuietServer(uvicorn.Server):
    """Uvicorn without its handling of signals, which is this server's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def install_signal_handlers(self) -> None:
        """Take none."""

    def end(self) -> None:
        """Take no more connections, and close those that there are."""
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        """Write the answers' date anew each second until `end`; uvicorn's own looks ten times as often, which takes time from engines."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)

    def capture_signals(self):  # type: ignore[no-untyped-def]  # a context manager, whose type uvicorn does not give
        """Take none."""
        from contextlib import nullcontext

        return nullcontext()


async def serve(server: HardpointServer, ready: asyncio.Event | None = None) -> None:
    """Run a server until SIGTERM or SIGINT; a second one, or one that comes before the models are loaded, ends the process at once."""
    loop, ready = asyncio.get_running_loop(), ready or asyncio.Event()
    _allow_files()

    def end() -> None:
        if not ready.is_set():
            # Nothing is in progress, and a thread that loads a model cannot be interrupted. Its engine is a child and ends with us.
            _log.info("ending: the models were not loaded yet")
            server.remove_control_socket()
            os._exit(0)
        server.end()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await server.run(ready)


def _allow_files() -> None:
    """Raise the process's limit of open files as far as it may: each connection is one, and systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_tls(settings: ServerSettings) -> None:
    """Raise ConfigError where certificate and key cannot be used."""
    if settings.tls_certificate is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_certificate, settings.tls_key, password=""
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"TLS cannot use the certificate '{settings.tls_certificate}' with the key '{settings.tls_key}'",
            found=str(error),
            hint="Both are files in PEM, the key without a password and of this certificate",
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}",
            found=str(error),
            hint="Choose another --host or --port; 0 takes a free one",
        ) from error


def _listen_at(path: Path) -> socket.socket:
    """Return a socket that only its owner may open."""
    made = socket.socket(socket.AF_UNIX)
    try:
        _remove_abandoned(path)
        # A socket is created with the permissions that the umask leaves: the owner's alone from the first moment.
        mask = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(mask)
        made.listen(128)
    except OSError as error:
        made.close()
        hint = "Choose another path"
        raise ConfigError(f"cannot listen at '{path}'", found=str(error), hint=hint) from error
    return made


def _remove_abandoned(path: Path) -> None:
    """Remove the socket that a killed server left: one to which nobody listens."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
