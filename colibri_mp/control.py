"""The control endpoint: a thread that talks to clients, so that `status` is answered in the middle of a step.

    clients ──ROUTER──▶ control thread ── inbox ──▶ engine thread
            ◀────────── control thread ◀─ outbox ── engine thread

It translates and decides nothing: requests go to the inbox, answers come from the outbox. A client that has gone is
reported to the inbox as `ClientGone`. ZeroMQ tells that a connection has ended, but not whose: then every client known
is sent a `Ping`, which one that has gone cannot be.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from colibri_mp.constraints import Compiled
from colibri_mp.errors import ProtocolError
from colibri_mp.mailbox import Mailbox
from colibri_mp.messages import (
    Cancel,
    Generate,
    GetStatus,
    Message,
    Ping,
    RestoreSession,
    SaveSession,
    Score,
    Shutdown,
    Status,
)
from colibri_mp.transport import Listener, wait

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_PING_AFTER_S = (0.02, 0.5)  # after the end of a connection: for a moment its peer may still seem to be there


@dataclass(frozen=True)
class ClientGone:
    """A client that cannot be reached any more."""

    client: bytes


Command: TypeAlias = (
    tuple[bytes, Generate | Score | Cancel | SaveSession | RestoreSession | Shutdown] | ClientGone | Compiled
)


class ControlEndpoint:
    """Owns the control socket. `status` makes the answer to `GetStatus`, `tick` runs about once a second."""

    def __init__(self, path: Path, status: Callable[[bool], dict[str, Any]], tick: Callable[[], None]) -> None:
        self.inbox: Mailbox[Command] = Mailbox()
        self._outbox: Mailbox[tuple[bytes, Message] | None] = Mailbox()
        self._status = status
        self._tick = tick
        self._listener = Listener(path, linger_s=1.0)
        self._departures = self._listener.watch_departures()
        self._clients: set[bytes] = set()  # all that have been heard and are not known to have gone
        self._ping_times: list[float] = []
        self._thread = threading.Thread(target=self._run, name="control")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def emit(self, client: bytes, message: Message) -> None:
        """Queue an answer to a client, to be sent at the next `flush`; callable from any thread, never blocks."""
        self._outbox.lay((client, message))

    def flush(self) -> None:
        """Have what is queued sent. The engine calls it when it has to wait anyway: a thread that is woken in the middle of its work
        wants the interpreter, and a core.
        """
        if self._outbox.has_items:
            self._outbox.wake()

    def close(self) -> None:
        """Send what is queued and end the thread."""
        if self._thread.ident is not None:
            self._outbox.put(None)
            self._thread.join()
        self._listener.close()
        self.inbox.close()
        self._outbox.close()

    def _run(self) -> None:
        while True:
            ready = wait([self._listener, self._departures, self._outbox.fd], self._time_left())
            for item in self._outbox.drain():
                if item is None:
                    return
                self._deliver(*item)
            if self._departures.take():
                soon, later = (time.monotonic() + after_s for after_s in _PING_AFTER_S)
                self._ping_times = [min([soon, *self._ping_times]), later]
            if self._listener in ready:
                self._receive()
            self._ping()
            self._tick()

    def _time_left(self) -> float:
        """Until something is to be done though nothing comes."""
        return min(_TICK_S, max(0.0, self._ping_times[0] - time.monotonic())) if self._ping_times else _TICK_S

    def _ping(self) -> None:
        """If it is time, find the clients that have gone."""
        if self._ping_times and time.monotonic() >= self._ping_times[0]:
            del self._ping_times[0]
            for client in list(self._clients):
                self._deliver(client, Ping())

    def _deliver(self, client: bytes, message: Message) -> None:
        if not self._listener.send(client, message) and client in self._clients:
            self._clients.remove(client)
            self.inbox.put(ClientGone(client))

    def _receive(self) -> None:
        while (received := self._listener.receive()) is not None:
            if isinstance(received, ProtocolError):
                _log.warning("dropped a message: %s", received)
                continue
            client, message = received
            self._clients.add(client)
            match message:
                case GetStatus(request_id=request_id, reads_memory=reads_memory):
                    self._deliver(client, Status(request_id, self._status(reads_memory)))
                case Generate() | Score() | Cancel() | SaveSession() | RestoreSession() | Shutdown():
                    self.inbox.put((client, message))
                case other:
                    _log.warning("dropped a %s: not a client's message", type(other).__name__)
