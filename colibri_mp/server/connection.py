"""Connections that are slow on purpose: a client has a limited time for the head of a request.

uvicorn limits the pause between two requests (keep-alive), but not how long the head of one may take to come; a few hundred
clients that send a byte a minute would hold all connections. The body's time is limited in `gate`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 30.0


class PatientProtocol(H11Protocol):
    """HTTP/1.1 by h11, which refuses what is ambiguous, with a deadline for the head of each request."""

    head_timeout_s = HEAD_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first head may come."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """A head, or a part of it, or of a body."""
        super().data_received(data)
        if self._is_answering():
            self._disarm()
        else:
            self._arm()

    def on_response_complete(self) -> None:
        """The connection is idle until the next head begins; uvicorn limits that."""
        super().on_response_complete()
        self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._disarm()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.abort()
