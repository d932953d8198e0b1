"""Sockets, waiting and mailboxes, within one process."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from colibri_mp.errors import ConfigError, ProtocolError
from colibri_mp.mailbox import Mailbox
from colibri_mp.messages import Failed, GetStatus, Route, Routed, Status, StepCounters, to_frames
from colibri_mp.transport import Link, Listener, address, wait


@pytest.fixture
def socket_path(run_folder: Path) -> Path:
    """A short path for a socket."""
    return run_folder / "socket-of-a-test"


def test_request_and_answer(socket_path: Path) -> None:
    """A message reaches the listener with its sender, the answer reaches that sender, and the socket file goes."""
    listener, link = Listener(socket_path), Link(socket_path, b"me")
    link.send(GetStatus(3))
    assert wait([listener], 5.0) == [listener]
    assert listener.receive() == (b"me", GetStatus(3))
    assert listener.receive() is None
    assert listener.send(b"me", Status(3, {"state": "serving"}))
    assert link.receive(5.0) == Status(3, {"state": "serving"})
    assert link.receive(0.0) is None
    link.close()
    listener.close()
    assert not socket_path.exists()


def test_waiting_for_a_message(socket_path: Path) -> None:
    """It ends when one comes, which is said before it is read, or after its time; other times may follow each other."""
    listener, link = Listener(socket_path), Link(socket_path, b"me")
    arrivals: list[str] = []
    assert listener.receive(0.01, lambda: arrivals.append("listener")) is None
    assert link.receive_frames(0.01, lambda: arrivals.append("link")) is None
    assert not arrivals
    link.send(GetStatus(3))
    assert listener.receive(5.0, lambda: arrivals.append("listener")) == (b"me", GetStatus(3))
    assert listener.receive() is None
    assert listener.send(b"me", Status(3, {}))
    assert link.receive_frames(5.0, lambda: arrivals.append("link")) == to_frames(Status(3, {}))
    assert arrivals == ["listener", "link"]
    link.close()
    listener.close()


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_arrays_arrive_whether_copied_or_not(socket_path: Path, num_tokens: int) -> None:
    """Small frames are copied, large ones handed over: both arrive unchanged."""
    listener, link = Listener(socket_path), Link(socket_path, b"me")
    x = np.random.default_rng(1).standard_normal((num_tokens, 200)).astype(np.float32)
    ids = np.zeros((num_tokens, 2), np.int32)
    link.send(Route(1, 2, x, ids, ids.astype(np.float32)))
    assert wait([listener], 5.0)
    received = listener.receive()
    assert isinstance(received, tuple)
    assert isinstance(received[1], Route)
    np.testing.assert_array_equal(received[1].x, x)
    assert listener.send(b"me", Routed(1, 2, x, StepCounters(hits=4)))
    answer = link.receive(5.0)
    assert isinstance(answer, Routed)
    assert answer.counters == StepCounters(hits=4)
    link.close()
    listener.close()


def test_absent_peer_is_reported(socket_path: Path) -> None:
    """Sending to nobody returns False and loses nothing silently."""
    listener = Listener(socket_path)
    assert not listener.send(b"nobody", Failed(1, "error", ""))
    listener.close()


def test_noise_is_a_value_and_not_an_exception(socket_path: Path) -> None:
    """A message that cannot be understood does not end the listener's loop."""
    listener, link = Listener(socket_path), Link(socket_path, b"me")
    link.socket.send_multipart([b"noise"])
    assert wait([listener], 5.0)
    assert isinstance(listener.receive(), ProtocolError)
    link.close()
    listener.close()


def test_waiting_watches_descriptors_too() -> None:
    """A pipe whose other end closes wakes the wait; without anything it ends in time."""
    read_fd, write_fd = os.pipe()
    assert wait([read_fd], 0.01) == []
    threading.Timer(0.05, os.close, [write_fd]).start()
    assert wait([read_fd], 5.0) == [read_fd]
    os.close(read_fd)


def test_too_long_socket_path(tmp_path: Path) -> None:
    """The refusal says the limit and the variable to set."""
    with pytest.raises(ConfigError, match=r"103.*COLIBRI_RUN_DIR"):
        address(tmp_path / ("x" * 120))


def test_mailbox_wakes_and_keeps_order() -> None:
    """Items of a thread come out in order, and the descriptor is readable until they are taken."""
    mailbox: Mailbox[int] = Mailbox()
    assert wait([mailbox.fd], 0.0) == []
    thread = threading.Thread(target=lambda: [mailbox.put(i) for i in range(1000)])
    thread.start()
    thread.join()
    assert wait([mailbox.fd], 1.0) == [mailbox.fd]
    assert mailbox.drain() == list(range(1000))
    assert wait([mailbox.fd], 0.0) == []
    assert mailbox.drain() == []
    mailbox.close()


def test_mailbox_can_wake_later() -> None:
    """What is laid into it does not wake the reader until somebody does."""
    mailbox: Mailbox[int] = Mailbox()
    mailbox.lay(1)
    assert wait([mailbox.fd], 0.0) == []
    assert mailbox.has_items
    mailbox.wake()
    assert wait([mailbox.fd], 5.0) == [mailbox.fd]
    assert mailbox.drain() == [1]
    mailbox.close()
