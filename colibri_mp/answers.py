"""What comes over a client's link, sorted by request: a queue for each, and one for all that are taken in order of arrival.

Messages of a request that nobody waits for any more are dropped. Every wait looks every half second whether the
coordinator lives.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from colibri_mp.errors import ProtocolError, from_wire
from colibri_mp.messages import Failed, Finished, Message, Piece, Progress, PromptLogprobs, Status
from colibri_mp.transport import Link, wait

_CHECK_S = 0.5  # how often a waiting client looks whether the coordinator lives

Answer = TypeVar("Answer", bound=Message)
Event = Progress | PromptLogprobs | Piece | Finished
"""What comes of a `Generate`; the last one is `Finished`."""


class Answers:
    """Sorts the messages of `link`; `check` raises if the coordinator has ended."""

    def __init__(self, link: Link, check: Callable[[], None]) -> None:
        self._link = link
        self._check = check
        self._queues: dict[int, deque[Message]] = {}
        self._shared: deque[Message] = deque()
        self._sharing: set[int] = set()
        self._last_sign = time.monotonic()  # of the coordinator's life

    def expect(self, request_id: int, shared: bool = False) -> None:
        """Keep what comes for a request from now on; `shared`: for `next_shared`."""
        if shared:
            self._sharing.add(request_id)
        self._queues[request_id] = self._shared if shared else deque()

    def forget(self, request_id: int) -> None:
        """Drop what has come and what will come for a request."""
        self._queues.pop(request_id, None)

    def next(self, request_id: int, kind: type[Answer]) -> Answer:
        """The next message of a request, which must be of `kind`; `Failed` raises its error and ends the request."""
        message = self._next(request_id)
        if not isinstance(message, kind):
            raise ProtocolError(f"{type(message).__name__} in answer to a request for {kind.__name__}")
        return message

    def next_event(self, request_id: int) -> Event:
        """The next message of a `Generate`; `Failed` raises its error and ends the request."""
        return _event(self._next(request_id))

    def _next(self, request_id: int) -> Message:
        queue = self._queues[request_id]
        while not queue:
            self._receive(_CHECK_S)
        message = queue.popleft()
        if isinstance(message, Failed):
            self.forget(request_id)
            raise from_wire(message.kind, message.message)
        return message

    def next_shared(self, timeout_s: float | None, wake_fd: int | None) -> tuple[int, Event | Failed | Status] | None:
        """The next message of all shared requests. None: see `Cluster.next_event`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._shared:
            if deadline is None and wake_fd is None and not self._sharing:
                return None
            left_s = _CHECK_S if deadline is None else deadline - time.monotonic()
            is_woken = self._receive(min(_CHECK_S, max(0.0, left_s)), wake_fd)
            if not self._shared and (is_woken or left_s <= 0):
                return None
        message = self._shared.popleft()
        event = message if isinstance(message, Failed | Status) else _event(message)
        if isinstance(event, Finished | Failed | Status):
            self.forget(event.request_id)
            self._sharing.discard(event.request_id)
        return event.request_id, event

    def _receive(self, timeout_s: float, wake_fd: int | None = None) -> bool:
        """File what has come within `timeout_s`; returns whether `wake_fd` is readable."""
        ready = wait([self._link] if wake_fd is None else [self._link, wake_fd], timeout_s)
        self._watch(self._link in ready)
        message = self._link.receive(0.0) if self._link in ready else None
        if message is not None:
            self._file(message)
        return wake_fd in ready

    def _watch(self, is_sign: bool) -> None:
        now = time.monotonic()
        if not is_sign and now - self._last_sign < _CHECK_S:
            return
        if not is_sign:
            self._check()
        self._last_sign = now

    def _file(self, message: Message) -> None:
        request_id = getattr(message, "request_id", None)
        if request_id is None:
            raise ProtocolError(f"{type(message).__name__} sent to a client")
        if (queue := self._queues.get(request_id)) is not None:
            queue.append(message)


def _event(message: Message) -> Event:
    if not isinstance(message, Event):
        raise ProtocolError(f"{type(message).__name__} in answer to a generate request")
    return message
