"""A queue between threads of one process whose reader can wait for it together with sockets and sentinels."""

import contextlib
import os
import queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any thread may `put`; one thread waits for `fd` to be readable and takes everything with `drain`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def put(self, item: Item) -> None:
        """Append an item and wake the reader."""
        self._items.put(item)
        self.wake()

    def lay(self, item: Item) -> None:
        """Append an item that the reader may find later: at the next `wake`."""
        self._items.put(item)

    def wake(self) -> None:
        """Make `fd` readable; safe in a signal handler."""
        with contextlib.suppress(OSError):  # the pipe is full of wake-ups already, or closed
            os.write(self._write_fd, b"\0")

    @property
    def has_items(self) -> bool:
        """Whether something waits to be taken; some 30 ns, for places where there is no time for `drain`."""
        return not self._items.empty()

    def drain(self) -> list[Item]:
        """Take all items, oldest first; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
        items = []
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self._items.get_nowait())
        return items

    def close(self) -> None:
        """Close the wake-up pipe."""
        write_fd, self._write_fd = self._write_fd, -1
        os.close(self.fd)
        os.close(write_fd)
