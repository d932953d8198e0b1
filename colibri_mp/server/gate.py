"""The gate every request goes through before a route sees it: id, Host, key, size and time of the body, errors, counting.

Plain ASGI (no `BaseHTTPMiddleware`): a disconnect reaches the route as it is.

    Host     a name that is not allowed is refused, so that a web page cannot reach this server by a name of its own
             (DNS rebinding); whichever way the request line is written, the Host header alone counts
    key      Authorization: Bearer KEY, or x-api-key: KEY, compared in constant time; /health is open
    body     counted while it comes: 413 at once, not after it has been stored; 408 if it takes too long
"""

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colibri_mp.errors import ColibriError
from colibri_mp.server.errors import HttpError, from_colibri
from colibri_mp.server.settings import ServerConfig

_log = logging.getLogger(__name__)
_OPEN_PATHS = ("/health",)
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not bound to

CountRequest = Callable[[str, str], None]
"""Takes the path and the outcome of a request."""


class ClientGone(Exception):
    """The client has closed the connection: there is nobody to answer."""


class Gate:
    """See the module docstring. `hub` is for the routes, `count` is told the path and outcome of each request."""

    def __init__(self, app: ASGIApp, config: ServerConfig, key: str, hub: object, count: CountRequest) -> None:
        self._app = app
        self._hub = hub
        self._config = config
        self._key = key.encode()
        self._count = count
        own = () if config.host in _WILDCARDS else (config.host,)
        self._hosts = {name.lower().strip("[]") for name in (*_LOCAL_NAMES, *own, *config.allow_host)}
        self._takes_addresses = config.host in _WILDCARDS  # nobody can make a name of an address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # the router asks whether there is one: then it raises what it cannot route
        scope["state"]["hub"] = self._hub
        exchange = _Exchange(scope, receive, send, self._config)
        try:
            self._admit(scope["path"], Headers(scope=scope))
            exchange.check_length()
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            exchange.outcome = "cancelled"
        except Exception as error:
            await exchange.fail(_as_http(error))
        finally:
            self._count(scope["path"], scope["state"].get("outcome") or exchange.outcome)

    def _admit(self, path: str, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:  # two readers may see two requests
            raise HttpError(
                400, "content-length and transfer-encoding exclude each other", headers={"connection": "close"}
            )
        host = _host_name(headers.getlist("host"))
        if not self._is_allowed(host):
            raise HttpError(
                403, f"the Host header names {host!r}, which this server does not answer to; "
                f"start it with --allow-host {host or 'NAME'} if that is its name", code="host_not_allowed",
            )  # fmt: skip
        if self._key and path not in _OPEN_PATHS and not self._has_key(headers):
            raise HttpError(
                401, "this server needs its API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    def _is_allowed(self, host: str) -> bool:
        if "*" in self._hosts or host in self._hosts:
            return True
        return self._takes_addresses and _is_address(host)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return secrets.compare_digest(given.encode("latin-1", "replace"), self._key)


class _Exchange:
    """One request and its answer: the limits on what comes in, and what has gone out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServerConfig) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limit_bytes = config.max_body_bytes
        self._timeout_s = config.timeout
        self._deadline = asyncio.get_running_loop().time() + config.timeout
        self._num_bytes = 0
        self._has_body = False
        self._has_started = False
        self.outcome = "failed"
        self.request_id = f"req_{secrets.token_hex(12)}"
        scope["state"]["request_id"] = self.request_id

    def check_length(self) -> None:
        """Refuse a body that says itself that it is too large."""
        stated = Headers(scope=self._scope).get("content-length", "0")
        if stated.isdecimal() and int(stated) > self._limit_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next part of the body, within the limits; after the body, the disconnect."""
        if self._has_body:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                part = await self._receive()
        except TimeoutError:
            message = f"the request did not come within {self._timeout_s:g} s (--timeout)"
            raise HttpError(408, message, headers={"connection": "close"}) from None
        if part["type"] == "http.disconnect":
            raise ClientGone
        self._num_bytes += len(part.get("body", b""))
        if self._num_bytes > self._limit_bytes:
            raise self._too_large()
        self._has_body = not part.get("more_body", False)
        return part

    async def send(self, message: Message) -> None:
        """Pass a part of the answer on; one that the client does not take ends the request."""
        if message["type"] == "http.response.start":
            self._has_started = True
            self.outcome = outcome_of(message["status"])
            message["headers"] = [*message.get("headers", ()), *self._own_headers()]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    async def fail(self, error: HttpError) -> None:
        """Answer with an error, unless the answer has begun: then the connection ends without a proper end.

        What is left of the body is thrown away as it comes, so that the client can read the answer.
        """
        if self._has_started:
            self.outcome = "failed"
            raise error
        response = error.response(self._scope["path"])
        await response(self._scope, self._receive, self.send)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the request is larger than {self._limit_bytes} bytes (--max-body)")

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        value = self.request_id.encode()
        return [(b"x-request-id", value), (b"request-id", value), (b"x-content-type-options", b"nosniff")]


def outcome_of(status: int) -> str:
    """The word by which /metrics counts a status."""
    match status:
        case 429:
            return "overloaded"
        case 503:
            return "unavailable"
        case _ if status < 400:
            return "ok"
        case _ if status < 500:
            return "refused"
        case _:
            return "failed"


def _as_http(error: Exception) -> HttpError:
    match error:
        case HttpError():
            return error
        case ColibriError():
            return from_colibri(error)
        case HTTPException():  # of the router: no such path, no such method
            return HttpError(error.status_code, error.detail, headers=dict(error.headers or {}))
        case _:
            _log.exception("a defect of the server")
            return HttpError(500, f"a defect of the server: {type(error).__name__}; its log has the rest")


def _host_name(values: list[str]) -> str:
    """The name in the Host header without its port; "" if there is none, or more than one."""
    if len(values) != 1:
        return ""
    host = values[0].strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientGone: it did.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
