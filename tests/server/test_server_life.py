"""A server's start, its end, and what happens when its cluster ends before it."""

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import COMMAND, SMALL, LiveServer, chat, events, listening, serving

LONG = {"ignore_eos": True, "max_tokens": 2000}


def test_it_says_loading_until_it_serves() -> None:
    """The port answers from the first moment: 503 with the reason and when to come again; then it serves, and ends quietly."""
    with listening() as server:
        with server.client() as client:
            response = client.get("/health")
            assert response.status_code == 503
            assert response.json()["status"] == "loading"
            refused = client.post("/v1/chat/completions", json=chat())
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "loading"
            server.await_serving()
            assert client.get("/health").status_code == 200
        assert server.stop() == ""


def test_stopping_while_loading() -> None:
    """SIGTERM in the middle of the start ends both processes at once (the leak check looks)."""
    with listening() as server:
        children = psutil.Process(server.pid).children()
        server.stop()
        assert not [child for child in children if child.is_running()]


def test_port_in_use() -> None:
    """A taken port is one clear line, before any model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port, *SMALL], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(f"colibri-cluster: cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "code", "wanted"),
    [
        (["--model", "/no/such/model"], 3, "/no/such/model"),
        (["--ram", "100MB"], 4, "too small"),
        (["--max-body", "large"], 2, "not a size"),
        (["--timeout", "0"], 2, "--timeout must be at least"),
        (["--api-key", "@/no/such/file"], 2, "/no/such/file"),
        (["--host", "203.0.113.7"], 2, "choose another with --port or --host"),
        (["--workers", "-1"], 2, "--workers must be at least 0"),
    ],
)
def test_starts_that_fail(flags: list[str], code: int, wanted: str) -> None:
    """What keeps it from serving is one message and an exit code of its own; nothing is left."""
    done = subprocess.run([*COMMAND, *SMALL, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_stopping_ends_answers_with_an_error() -> None:
    """Whoever waits for an answer hears why it ends, streamed or whole; Ctrl-C is as good as SIGTERM."""
    with serving() as server, server.client() as client:
        found: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: found.append(httpx.post(f"{server.url}/v1/chat/completions", json=chat(**LONG), timeout=60))
        )
        with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **LONG)) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            waiting.start()  # second: the memory for keys and values is enough for one of them, so it waits for the stream's end
            while server.status()["requests"]["active"] < 2:
                assert waiting.is_alive(), found
            os.kill(server.pid, signal.SIGINT)
            last = events(lines)[-1]
        waiting.join()
        assert "stopping" in last["error"]["message"]
        assert found[0].status_code == 503
        assert "stopping" in found[0].json()["error"]["message"]


def test_its_cluster_dies() -> None:
    """When the coordinator is killed, answers end with a named error and the server says that it is broken."""
    with listening() as server:
        server.await_serving()
        with server.client() as client:
            coordinator = psutil.Process(client.get("/v1/status").json()["pid"])
            with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **LONG)) as stream:
                lines = stream.iter_lines()
                next(lines)
                coordinator.kill()
                last = events(lines)[-1]
            assert "the coordinator" in last["error"]["message"]
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "broken")
            assert "SIGKILL" in health.json()["reason"]
            assert client.post("/v1/chat/completions", json=chat()).status_code == 503
            assert 'colibri_state{state="broken"} 1.0' in client.get("/metrics").text
        server.stop()


def test_stalled_cluster_is_noticed(strict_server: LiveServer) -> None:
    """A coordinator that does not get on is unhealthy; /health itself answers at once; afterwards all is well again."""
    with strict_server.client() as client:
        coordinator = psutil.Process(client.get("/v1/status").json()["pid"])
        coordinator.suspend()
        try:
            while (health := client.get("/health")).status_code == 200:
                assert health.elapsed.total_seconds() < 1
            assert health.json()["status"] == "stalled"
            assert client.get("/v1/status").status_code == 503
        finally:
            coordinator.resume()
        while client.get("/health").status_code != 200:
            pass
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_a_running_cluster_is_served_and_outlives_the_server(server: LiveServer) -> None:
    """`serve --name` joins a running cluster, and leaves it running."""
    name = server.status()["name"]
    command = [*COMMAND, "--name", name, "--model-name", "gpt-4o", "--cors-origin", "https://app.example"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = [next(process.stderr), next(process.stderr)]
    url = said[1].removeprefix("listening on ").partition(";")[0]
    other = LiveServer(process, url)
    other.await_serving()
    with other.client() as client:
        assert client.post("/v1/chat/completions", json=chat(model="gpt-4o")).json()["model"] == "demo"
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["demo", "gpt-4o"]
        shown = client.get("/v1/models", headers={"origin": "https://app.example"})
        assert shown.headers["access-control-allow-origin"] == "https://app.example"
        foreign = client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers
    other.stop()
    assert server.status()["state"] == "serving"


def test_key_from_the_environment(tmp_path: Path) -> None:
    """Without --api-key the variable counts."""
    env = {**os.environ, "COLIBRI_API_KEY": f"@{tmp_path / 'missing'}"}
    done = subprocess.run([*COMMAND, *SMALL], capture_output=True, text=True, timeout=30, env=env)
    assert done.returncode == 2
    assert "missing" in done.stderr
