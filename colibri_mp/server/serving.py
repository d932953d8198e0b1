"""The HTTP process: one event loop with uvicorn, one bridge thread, and the order in which they start and end.

bind the port (one clear error if it is taken) ▸ listen, and say 503 loading ▸ the cluster serves ▸ ... ▸ a signal:
answers under way end with an error, the own cluster ends, nothing is left
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp

from colibri_mp.errors import ColibriError, ConfigError
from colibri_mp.server.bridge import Bridge, OpenCluster
from colibri_mp.server.connection import PatientProtocol
from colibri_mp.server.gate import Gate
from colibri_mp.server.hub import Hub
from colibri_mp.server.metrics import Metrics
from colibri_mp.server.routes import ROUTES
from colibri_mp.server.settings import ServerConfig

_BACKLOG = 1024
_SWITCH_S = 0.0005  # how long the bridge's thread may keep the interpreter while the event loop waits for it
_KEEP_ALIVE_S = (
    30  # longer than clients keep an idle connection (5 s is common): who closes first may cut off a request
)
_LAST_WORDS_S = 5  # for answers under way, when the server ends
_SHOWN_HEADERS = ("x-request-id", "retry-after")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`.

    Raises:
        ConfigError: the port is taken, not allowed, or there is no such address here.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, proto)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(_BACKLOG)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host or 'all addresses'} port {port}: {error.strerror}; choose another with --port or --host"
        ) from error
    return found


def url_of(listener: socket.socket) -> str:
    """Where a socket on this machine is reached."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - shown, not bound to
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def serve(
    config: ServerConfig, listener: socket.socket, open_cluster: OpenCluster, ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; takes the socket. `ready` is told the model's name when it serves.

    Raises:
        ColibriError: the cluster could not be opened.
    """
    sys.setswitchinterval(_SWITCH_S)
    asyncio.run(_Server(config, listener, open_cluster, ready).run())


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `_Server` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self, config: ServerConfig, listener: socket.socket, open_cluster: OpenCluster, ready: Callable[[str], None]
    ) -> None:
        self._config = config
        self._listener = listener
        self._open_cluster = open_cluster
        self._ready = ready
        self._error: ColibriError | None = None

    async def run(self) -> None:
        bridge = Bridge(self._open_cluster, self._config.model_name, self._ended, self._ready)
        self._http = _Uvicorn(_uvicorn_config(self._config, bridge))
        self._bridge = bridge
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        bridge.start()
        try:
            await self._http.serve([self._listener])
        finally:
            bridge.stop()
            await bridge.join()
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        """A second signal does not wait for the clients."""
        self._http.force_exit = self._http.should_exit
        self._http.should_exit = True
        self._bridge.stop()

    def _ended(self, error: ColibriError) -> None:
        self._error = error
        self._stop()


def _uvicorn_config(config: ServerConfig, bridge: Bridge) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is no HTTP
    return uvicorn.Config(
        _app(config, bridge), http=_protocol(config.timeout), ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, limit_concurrency=config.max_connections + 1, backlog=_BACKLOG,
        timeout_graceful_shutdown=_LAST_WORDS_S, timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip


def _app(config: ServerConfig, bridge: Bridge) -> ASGIApp:
    metrics = Metrics()
    hub = Hub(config, bridge, metrics)
    app: ASGIApp = Gate(Router(ROUTES, redirect_slashes=False), config, config.read_key(), hub, metrics.request)
    if config.cors_origin:  # outside the gate: a preflight has no key, and errors need the headers too
        app = CORSMiddleware(
            app, allow_origins=config.cors_origin, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
        )  # fmt: skip
    return app


def _protocol(timeout_s: float) -> type[PatientProtocol]:
    return type("_Protocol", (PatientProtocol,), {"head_timeout_s": timeout_s})
