"""The only user of ZeroMQ: a `Listener` (ROUTER) that many peers connect to, and a `Link` (DEALER) to one listener.

Sockets are ipc files in the private run directory. Sending never blocks; receiving has a time limit or goes through
`wait`, which also watches plain file descriptors (process sentinels, wake-up pipes), so that no wait outlives what it
depends on. A `Listener` and a `Link` belong to the thread that made them.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import zmq

from colibri_mp.errors import ConfigError, ProtocolError
from colibri_mp.messages import STEP_MAGIC, Frame, Message, from_frames, to_frames

_COPY_UP_TO_BYTES = 65536  # below, copying a frame is cheaper than zmq's reference counting
_MAX_PATH_BYTES = 103  # sun_path holds 104 bytes on macOS and 108 on Linux, the last is 0


def address(path: Path) -> str:
    """The ipc address of a socket file.

    Raises:
        ConfigError: the path is longer than the system allows for a socket.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {len(os.fsencode(path))} bytes, the system allows {_MAX_PATH_BYTES}; "
            "set COLIBRI_RUN_DIR to a shorter folder or use a shorter --name"
        )
    return f"ipc://{path}"


class Listener:
    """A bound ROUTER socket. Peers are named by their identity bytes."""

    def __init__(self, path: Path, linger_s: float = 0.0) -> None:
        self._path = path
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an absent peer is an error, not a lost message
        self.socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address(path))
        self._first_frame = _FirstFrame(self.socket)
        self._departures: Departures | None = None

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue a message; False if the peer is not connected (any more)."""
        frames = to_frames(message)
        try:
            self.socket.send(peer, zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        _send(self.socket, frames)
        return True

    def receive(
        self, timeout_s: float = 0.0, on_arrival: Callable[[], None] | None = None
    ) -> tuple[bytes, Message] | ProtocolError | None:
        """The next message with its sender, None if none comes in time; a `ProtocolError` value for one not understood.

        `on_arrival` is called when there is one, before it is read.
        """
        peer = self._first_frame.receive(timeout_s)
        if peer is None:
            return None
        if on_arrival is not None:
            on_arrival()
        try:
            return peer, from_frames(_receive(self.socket))
        except ProtocolError as error:
            return error

    def watch_departures(self) -> "Departures":
        """Have the ends of connections noted from now on."""
        self._departures = Departures(self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        return self._departures

    def close(self) -> None:
        """Close; what is queued is still sent for `linger_s`. The socket file is removed."""
        if self._departures is not None:
            self.socket.disable_monitor()
            self._departures.socket.close(0)
        self.socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)


class Departures:
    """Readable when a connection of a `Listener` has ended, however its peer did. Who that was only a `send` can tell."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket

    def take(self) -> bool:
        """Whether connections have ended since the last call."""
        has_any = False
        while self.socket.poll(0):
            _receive(self.socket)
            has_any = True
        return has_any


class Link:
    """A DEALER socket connected to a `Listener`."""

    def __init__(self, path: Path, identity: bytes = b"", linger_s: float = 1.0) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
        self.socket.connect(address(path))
        self._first_frame = _FirstFrame(self.socket)

    def send(self, message: Message) -> None:
        """Queue a message; it waits for the connection if need be."""
        _send(self.socket, to_frames(message))

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s`.

        Raises:
            ProtocolError: the message is not understood.
        """
        frames = self.receive_frames(timeout_s)
        return None if frames is None else from_frames(frames)

    def receive_frames(self, timeout_s: float, on_arrival: Callable[[], None] | None = None) -> list[bytes] | None:
        """The frames of the next message, or None after `timeout_s`; `on_arrival` is called when there is one."""
        first = self._first_frame.receive(timeout_s)
        if first is None:
            return None
        if on_arrival is not None:
            on_arrival()
        if first.startswith(STEP_MAGIC):  # always a single frame, and asking the socket takes long where a token waits
            return [first]
        return _receive_after(self.socket, first)

    def send_frame(self, frame: Frame) -> None:
        """Queue a message of a single frame, which may be used again at once."""
        self.socket.send(frame)

    def close(self) -> None:
        """Close; what is queued is still sent for `linger_s`."""
        self.socket.close()
        self._context.term()


Waitable: TypeAlias = Listener | Link | Departures | int


def wait(sources: Sequence[Waitable], timeout_s: float | None) -> list[Waitable]:
    """The sources that are readable, after at most `timeout_s`; an int is a file descriptor."""
    poller = zmq.Poller()
    by_key: dict[object, Waitable] = {}
    for source in sources:
        key = source if isinstance(source, int) else source.socket
        by_key[key] = source
        poller.register(key, zmq.POLLIN)
    ready = poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
    return [by_key[key] for key, _ in ready]


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    """Queue the frames of a message. A step is one frame, and has no time for `send_multipart`."""
    *first, last = frames
    for frame in first:
        socket.send(frame, zmq.SNDMORE, len(frame) <= _COPY_UP_TO_BYTES)
    socket.send(last, 0, len(last) <= _COPY_UP_TO_BYTES)


class _FirstFrame:
    """Receives the first frame of a message. One call that waits is half as long as a poll and a call that does not."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._timeout_ms = -1  # as the socket has it now: for ever

    def receive(self, timeout_s: float) -> bytes | None:
        """None: nothing has come within `timeout_s`."""
        timeout_ms = math.ceil(timeout_s * 1000)
        if timeout_ms and timeout_ms != self._timeout_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        try:
            return self._socket.recv(0 if timeout_ms else zmq.NOBLOCK)
        except zmq.Again:
            return None


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The frames of the next message, or what is left of it; `zmq.Again` if there is none."""
    return _receive_after(socket, socket.recv(zmq.NOBLOCK))


def _receive_after(socket: "zmq.Socket[bytes]", first: bytes) -> list[bytes]:
    """The frames of a message that begins with `first`."""
    frames = [first]
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames
