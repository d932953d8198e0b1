"""The control endpoint: a thread that talks to clients, so that `status` is answered in the middle of a step.

    clients ──ROUTER──▶ control thread ── inbox ──▶ engine thread
            ◀────────── control thread ◀─ outbox ── engine thread

It translates and decides nothing: requests go to the inbox, answers come from the outbox. A client that has gone while
an answer is due is reported to the inbox as `ClientGone`.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from colibri_mp.errors import ProtocolError
from colibri_mp.mailbox import Mailbox
from colibri_mp.messages import (
    Cancel,
    Generate,
    GetStatus,
    Message,
    RestoreSession,
    SaveSession,
    Score,
    Shutdown,
    Status,
)
from colibri_mp.transport import Listener, wait

_log = logging.getLogger(__name__)
_TICK_S = 1.0


@dataclass(frozen=True)
class ClientGone:
    """A client that cannot be reached any more."""

    client: bytes


Command: TypeAlias = tuple[bytes, Generate | Score | Cancel | SaveSession | RestoreSession | Shutdown] | ClientGone


class ControlEndpoint:
    """Owns the control socket. `status` makes the answer to `GetStatus`, `tick` runs about once a second."""

    def __init__(self, path: Path, status: Callable[[bool], dict[str, Any]], tick: Callable[[], None]) -> None:
        self.inbox: Mailbox[Command] = Mailbox()
        self._outbox: Mailbox[tuple[bytes, Message] | None] = Mailbox()
        self._status = status
        self._tick = tick
        self._listener = Listener(path, linger_s=1.0)
        self._thread = threading.Thread(target=self._run, name="control")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def emit(self, client: bytes, message: Message) -> None:
        """Send an answer to a client; callable from any thread, never blocks."""
        self._outbox.put((client, message))

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
            ready = wait([self._listener, self._outbox.fd], _TICK_S)
            for item in self._outbox.drain():
                if item is None:
                    return
                self._deliver(*item)
            if self._listener in ready:
                self._receive()
            self._tick()

    def _deliver(self, client: bytes, message: Message) -> None:
        if not self._listener.send(client, message):
            self.inbox.put(ClientGone(client))

    def _receive(self) -> None:
        while (received := self._listener.receive()) is not None:
            if isinstance(received, ProtocolError):
                _log.warning("dropped a message: %s", received)
                continue
            client, message = received
            match message:
                case GetStatus(request_id=request_id, reads_memory=reads_memory):
                    self._deliver(client, Status(request_id, self._status(reads_memory)))
                case Generate() | Score() | Cancel() | SaveSession() | RestoreSession() | Shutdown():
                    self.inbox.put((client, message))
                case other:
                    _log.warning("dropped a %s: not a client's message", type(other).__name__)
