"""Clients that go away in the middle, and requests that are cancelled: nothing of them is left."""

import asyncio
import random
import time

import httpx
import psutil
import pytest
from live_server import LiveServer, chat, events

NUM_CLIENTS = 200
DEADLINE_S = 20


def await_idle(server: LiveServer) -> dict[str, int]:
    """Wait until the cluster has nothing to do; returns what /v1/status says of requests."""
    deadline = time.monotonic() + DEADLINE_S
    with server.client() as client:
        while (requests := client.get("/v1/status").json()["requests"])["active"]:
            assert time.monotonic() < deadline, requests
    found: dict[str, int] = requests
    return found


async def vanish(client: httpx.AsyncClient, draw: random.Random) -> None:
    """Ask for a long answer, whole or streamed, and leave after a moment."""
    body = chat(
        "Define: " + "river " * draw.randrange(1, 200), max_tokens=1000, ignore_eos=True, stream=draw.random() < 0.5
    )
    try:
        async with asyncio.timeout(draw.random() * 0.5):
            await client.post("/v1/chat/completions", json=body)
    except (TimeoutError, httpx.HTTPError):
        return


async def all_vanish(url: str) -> None:
    """Many clients, some tens at a time."""
    draw = random.Random(7)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:
        for _ in range(0, NUM_CLIENTS, 50):
            await asyncio.gather(*(vanish(client, draw) for _ in range(50)))


@pytest.mark.slow
def test_nothing_is_left_of_clients_that_vanish(server: LiveServer) -> None:
    """200 clients vanish: no request, KV block, descriptor or thread stays, and the next request is normal."""
    with server.client() as client:
        expected = client.post("/v1/chat/completions", json=chat()).json()["choices"]
    await_idle(server)
    process = psutil.Process(server.pid)
    before = process.num_fds(), process.num_threads()
    asyncio.run(all_vanish(server.url))
    after = await_idle(server)
    assert after["running_sequences"] == after["waiting_sequences"] == 0
    deadline = time.monotonic() + DEADLINE_S
    while process.num_fds() > before[0]:  # closed connections are noticed a moment later
        assert time.monotonic() < deadline, process.net_connections()
    assert process.num_threads() <= before[1] + 6  # the pool of the tokenizer's threads
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=chat()).json()["choices"] == expected
        assert 'outcome="cancelled"' in client.get("/metrics").text


def test_a_request_is_cancelled_by_its_id(server: LiveServer) -> None:
    """DELETE ends a stream with an error event, by the id in the header or the one in the body; then the id is unknown."""
    for by_header in (True, False):
        with server.client() as client, server.client() as other:
            body = chat(stream=True, max_tokens=1500, ignore_eos=True)
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                first = events(iter([next(lines)]))[0]
                name = stream.headers["x-request-id"] if by_header else first["id"]
                assert other.delete(f"/v1/requests/{name}").json()["cancelled"] is True
                assert events(lines)[-1]["error"]["code"] == "cancelled"
            deadline = time.monotonic() + DEADLINE_S
            while other.delete(f"/v1/requests/{name}").status_code != 404:  # forgotten just after the last event
                assert time.monotonic() < deadline
    await_idle(server)


def test_a_client_that_does_not_read_is_given_up(server: LiveServer) -> None:
    """What it was asking for ends when its connection does, though it never read a byte."""
    with (
        server.client() as client,
        client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}
        ),
    ):
        pass
    await_idle(server)


def test_long_silence_has_pings_and_progress(server: LiveServer) -> None:
    """Prefill progress comes as chunks when asked for, and adds up to the prompt."""
    ids = [5 + idx % 50 for idx in range(1500)]
    body = {"prompt": ids, "max_tokens": 1, "stream": True, "stream_options": {"include_progress": True}}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        found = events(stream.iter_lines())
    progress = [event["prefill_progress"] for event in found if "prefill_progress" in event]
    assert all(each["prompt_tokens"] == 1500 for each in progress)
    assert [each["computed_tokens"] for each in progress] == sorted(each["computed_tokens"] for each in progress)
    assert found[-1]["choices"][0]["finish_reason"] == "length"


def test_a_full_queue_refuses_cleanly(strict_server: LiveServer) -> None:
    """Where one request fills the KV memory and two may wait, the others get 429 and when to come again; those get answers."""
    body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True}

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=strict_server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    responses = asyncio.run(ask_all())
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) >= 6
    assert all(int(response.headers["retry-after"]) > 0 for response in refused)
    assert all(response.json()["error"]["type"] == "rate_limit_error" for response in refused)
    answered = [response for response in responses if response.status_code == 200]
    assert len(answered) == 12 - len(refused) >= 1
    assert all(response.json()["usage"]["completion_tokens"] == 480 for response in answered)
