"""Clients that mean no good: each gets a named 4xx at once, and the server goes on."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, chat, listening

JSON = {"content-type": "application/json"}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """An HTTP client; after the test the server must still answer."""
    with server.client() as made:
        yield made
        assert made.post("/v1/chat/completions", json=chat()).status_code == 200
        assert made.get("/health").status_code == 200


def refused(response: httpx.Response, status: int, *wanted: str) -> None:
    """An error object with this status that holds `wanted`."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"]
    for text in wanted:
        assert text in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_bodies_that_are_no_json(client: httpx.Client, path: str) -> None:
    """Malformed, truncated, empty, deeply nested and not UTF-8: all are 400, and an array is no object."""
    for body in (b"", b"{", b'{"a" 1}', b"\xff\xfe{}", b'{"model": "\xff"}', b'{"metadata": ' + b"[" * 200_000):
        refused(
            client.post(path, content=body, headers=JSON), 400, "not valid JSON" if body[:12] != b'{"metadata":' else ""
        )
    refused(client.post(path, content=b"[]", headers=JSON), 400, "the body: expected `object`, got `array`")
    refused(client.post(path, content=b"{}", headers=JSON), 400, "missing required field")
    refused(client.post(path, content=b"{}"), 415, "application/json")


WRONG: list[Any] = [True, -1, 1e300, "x", [], {}, [[1]], {"a": 1}, "\u0000", 10**30]


def _fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    from colibri_mp.server.anthropic_schema import MessagesRequest
    from colibri_mp.server.openai_schema import ChatRequest, CompletionRequest

    message = {"model": "demo", "max_tokens": 1, "messages": chat()["messages"]}
    for path, kind, base in (
        ("/v1/chat/completions", ChatRequest, chat(max_tokens=1)),
        ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 1}),
        ("/v1/messages", MessagesRequest, message),
    ):
        for name in kind.__struct_fields__:
            yield path, name, base


def test_wrong_types_in_every_field(client: httpx.Client) -> None:
    """No value of any type in any field breaks the server; what is refused names the field."""
    num_refused = 0
    for path, name, base in _fields():
        for value in WRONG:
            response = client.post(path, json={**base, name: value}, headers=JSON)
            assert response.status_code in (200, 400, 404), (name, value, response.text)
            if response.status_code == 400:
                num_refused += 1
                assert response.json()["error"]["message"], (name, value)
    assert num_refused > 300


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"stop": ["x"] * 10_000}, "stop: "),
        ({"stop": ""}, "stop: "),
        ({"stop": ["x" * 100_000]}, "stop[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"n": 1000}, "n: "),
        ({"top_p": 0}, "top_p"),
        ({"temperature": "warm"}, "temperature"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "999999999"),
        ({"stop_token_ids": [2**31 - 1]}, "stop_ids"),
        ({"top_logprobs": 3}, "top_logprobs: only with logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
        ({"frobnicate": 1}, "frobnicate: this field is not supported"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs: messages"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "no use for 'enable_thinking'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no use for 'tools'"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ],
)
def test_values_that_are_not_supported(client: httpx.Client, fields: dict[str, Any], wanted: str) -> None:
    """Each is a 400 that names the field; nothing is ignored."""
    refused(client.post("/v1/chat/completions", json=chat(**fields)), 400, wanted)


def test_large_bodies(client: httpx.Client, server: LiveServer) -> None:
    """50 MB are refused while they come, announced or not; the connection can be used again."""
    body = b'{"prompt": "' + b"x" * 50_000_000
    refused(client.post("/v1/completions", content=body, headers=JSON), 413, "--max-body")
    parts = (body[start : start + 1_000_000] for start in range(0, len(body), 1_000_000))
    refused(client.post("/v1/completions", content=parts, headers=JSON), 413, "--max-body")


def test_prompts_larger_than_the_context(client: httpx.Client) -> None:
    """A prompt of millions of characters is refused with both lengths."""
    text = "word " * 1_000_000
    refused(client.post("/v1/chat/completions", json=chat(text)), 400, "context holds 2048")
    refused(client.post("/v1/completions", json={"prompt": text}), 400, "context holds 2048")
    refused(client.post("/v1/completions", json={"prompt": "word " * 3000}), 400, "context holds 2048")


def raw(server: LiveServer, request: bytes, timeout_s: float = 20) -> bytes:
    """What comes back for bytes sent as they are, until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


HEAD = b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"Host: localhost\r\n\r\n", 200),
        (HEAD + b"Host: LOCALHOST:99\r\n\r\n", 200),
        (HEAD + b"Host: evil.example\r\n\r\n", 403),
        (HEAD + b"Host: localhost.evil.example\r\n\r\n", 403),
        (HEAD + b"Host: localhost@evil.example\r\n\r\n", 403),
        (HEAD + b"Host: evil.example#localhost\r\n\r\n", 403),
        (HEAD + b"Host: 10.0.0.1\r\n\r\n", 403),
        (HEAD + b"Host: evil.example\r\nX-Forwarded-Host: localhost\r\n\r\n", 403),
        (HEAD + b"Host: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (HEAD + b"\r\n", 400),
        (b"GET http://localhost/v1/models HTTP/1.1\r\nconnection: close\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", 403),
        (HEAD + b"Host: localhost\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Host : localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_smuggled_heads(server: LiveServer, request_bytes: bytes, status: int) -> None:
    """Whatever the request line and other headers say, one Host that is allowed is needed; what is ambiguous is no HTTP."""
    answer = raw(server, request_bytes)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    if status == 403:
        assert b"--allow-host" in answer


def test_endless_head(server: LiveServer, client: httpx.Client) -> None:
    """A head of a megabyte is not stored: the connection is closed."""
    with contextlib.suppress(ConnectionError):
        assert raw(server, HEAD + b"Host: localhost\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n").startswith(
            b"HTTP/1.1 400 "
        )


def test_slow_senders_are_cut_off(strict_server: LiveServer) -> None:
    """A head, or a body, that does not come in time ends the connection; others are served meanwhile."""
    host, port = strict_server.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=20) for _ in range(30)]
    started = time.monotonic()
    for idx, connection in enumerate(slow):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        body = b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        connection.sendall(head + body if idx % 2 else head)
    with strict_server.client() as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    for idx, connection in enumerate(slow):
        answer = connection.recv(65536) if idx % 2 else b""
        assert not idx % 2 or answer.startswith(b"HTTP/1.1 408 ")
        while connection.recv(65536):
            pass
        connection.close()
    assert time.monotonic() - started < 15


def test_key(tmp_path: Any) -> None:
    """With a key nothing but /health is open; the key may come from a file, and in either header."""
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    with listening("--api-key", f"@{file}", "--allow-host", "box.example") as server:
        with server.client() as client:
            assert client.get("/health").status_code in (200, 503)
            refused(client.get("/v1/models"), 401, "API key")
            refused(client.post("/v1/messages", json={}), 401, "API key")
            refused(client.get("/v1/models", headers={"authorization": "Bearer s3cre"}), 401)
            refused(client.get("/v1/models", headers={"authorization": "Basic s3cret"}), 401)
            for headers in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret", "host": "box.example"}):
                assert client.get("/v1/models", headers=headers).status_code in (200, 503)
        server.stop()


def test_json_is_utf8(client: httpx.Client) -> None:
    """Text of any script goes in and out unharmed; half a surrogate pair is refused."""
    body = json.dumps({"prompt": "año ¿ 河", "echo": True, "max_tokens": 1}, ensure_ascii=True)
    assert (
        client.post("/v1/completions", content=body, headers=JSON).json()["choices"][0]["text"].startswith("año ¿ 河")
    )
    refused(client.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=JSON), 400, "JSON")
