"""A server as a user starts it: a process with a port of its own."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

COMMAND = [sys.executable, "-m", "colibri_mp", "serve", "--port", "0"]
SMALL = ["--ctx", "2048", "--threads", "1", "--workers", "1"]
STOP_S = 30


@dataclass
class LiveServer:
    """A running server; `url` has no path."""

    process: "subprocess.Popen[str]"
    url: str

    @property
    def pid(self) -> int:
        """Of the HTTP process."""
        return self.process.pid

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client for it."""
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def status(self) -> dict[str, Any]:
        """What /v1/status says."""
        with self.client() as client:
            return client.get("/v1/status").json()

    def await_serving(self) -> None:
        """Wait for the line that says that the model is served."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "is served at" in line:
                return
        raise AssertionError("the server ended before it served")

    def stop(self) -> str:
        """End it as a service manager does; returns what it had to say."""
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=STOP_S)
        assert self.process.returncode == 0, err
        assert "Traceback" not in err, err
        return err


@contextlib.contextmanager
def listening(*flags: str) -> Iterator[LiveServer]:
    """A server that listens already; its model may still be loading."""
    process = subprocess.Popen([*COMMAND, *SMALL, *flags], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield LiveServer(process, _url(process))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=STOP_S)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[LiveServer]:
    """A server whose model is loaded; it is stopped, and must end well."""
    with listening(*flags) as server:
        server.await_serving()
        yield server
        server.stop()


def chat(text: str = "Define: river", **fields: Any) -> dict[str, Any]:
    """The body of a small chat request."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}


def events(lines: Iterator[str]) -> list[Any]:
    """The data of a stream of events."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in found if item != "[DONE]"]


def _url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("listening on "):
            return line.removeprefix("listening on ").partition(";")[0]
    raise AssertionError(f"the server ended with {process.wait()} before it listened")
