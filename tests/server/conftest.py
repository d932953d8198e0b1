"""One server for all tests of this folder that do nothing to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, serving


@pytest.fixture(scope="package")
def server(run_folder: Path) -> Iterator[LiveServer]:
    """The built-in model behind HTTP."""
    with serving() as running:
        yield running


@pytest.fixture(scope="package")
def strict_server(run_folder: Path) -> Iterator[LiveServer]:
    """One that has little patience, with slow clients and with its cluster, and a short queue."""
    with serving("--stall", "1", "--timeout", "0.5", "--queue", "2", "--ctx", "512") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def no_open_descriptors(server: LiveServer, strict_server: LiveServer, no_open_descriptors: None) -> None:
    """The servers start before the first look: they belong to no file."""
