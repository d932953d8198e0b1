"""Answers that stream: server-sent events, with a comment now and then so that nobody on the way closes a silent connection."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from colibri_mp.server.errors import HttpError
from colibri_mp.server.gate import unless_gone

_PING = b": ping\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def data(body: Any) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named(name: str, body: Any) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\n" + data(body)


class EventStream(Response):
    """Sends what `events` yields until it ends or the client has gone, then calls `ended`; an `HttpError` becomes an event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ping_s: float, ended: Callable[[], None]) -> None:
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._ping_s = ping_s
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(scope, send))
        finally:
            await self._events.aclose()
            self._ended()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        try:
            async for part in _with_pings(self._events, self._ping_s):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except HttpError as error:
            scope["state"]["outcome"] = "cancelled" if error.code == "cancelled" else "failed"
            await send({"type": "http.response.body", "body": _error_event(error, scope["path"]), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_pings(events: AsyncIterator[bytes], ping_s: float) -> AsyncIterator[bytes]:
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({coming}, timeout=ping_s)
            if not done:
                yield _PING
                continue
            try:
                part = coming.result()
            except StopAsyncIteration:
                return
            coming = None
            yield part
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


def _error_event(error: HttpError, path: str) -> bytes:
    body = error.body(path)
    return named("error", body) if body.get("type") == "error" else data(body)
