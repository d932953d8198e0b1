"""Load on a server: many HTTP clients at the queue limit, each of whose requests must end in an answer or a clean refusal.

    python scripts/bench_server.py [--clients 64] [--seconds 60] [--queue 16] [SERVE FLAGS, such as --model DIR --ram 2GB]

Clients (a process of their own) ask for chats and completions, streamed and whole, some leave early; this process asks /health ten
times a second and /v1/status every two. The last line is one JSON object; the exit code is 1 if a request was cut off or answered
with another error than 429 and 503, if memory left the plan, or if the 99th percentile of /health is 100 ms or more.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import httpx

HEALTH_S, STATUS_S = 0.1, 2.0
LIMIT_S = 0.1
SUBJECTS = ("river", "horse", "courage", "to sing", "winter", "a king", "bread", "to remember")


def main() -> int:
    """Start the server, load it, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--queue", type=int, default=16)
    args, flags = parser.parse_known_args()
    command = [sys.executable, "-m", "colibri_mp", "serve", "--port", "0", "--queue", str(args.queue), *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = await_serving(server)
        report = load(url, args.clients, args.seconds)
        report["idle_after"] = await_idle(url)
    finally:
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
    report |= {"clients": args.clients, "queue": args.queue, "server_exit_code": server.returncode, "server_said": said}
    report["is_good"] = judge(report)
    print(json.dumps(report))
    return 0 if report["is_good"] else 1


def await_serving(server: "subprocess.Popen[str]") -> str:
    """The server's address, when its model is loaded."""
    assert server.stderr is not None
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if " is served at " in line:
            return line.split(" is served at ")[1].strip().removesuffix("/v1")
    raise SystemExit("the server ended before it served")


def load(url: str, num_clients: int, seconds: float) -> dict[str, Any]:
    """Load the server for a while; what came of it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    clients = context.Process(target=run_clients, args=(url, num_clients, seconds, sender))
    clients.start()
    sender.close()
    watched = watch(url, clients)
    found: dict[str, Any] = receiver.recv()
    clients.join()
    return {**found, **watched}


def watch(url: str, clients: Any) -> dict[str, Any]:
    """How long /health takes, and the most memory, while the clients run."""
    latencies: list[float] = []
    unhealthy: Counter[str] = Counter()
    peak = {"used_bytes": 0, "client_bytes": 0}
    next_status = 0.0
    with httpx.Client(base_url=url, timeout=30) as client:
        while clients.is_alive():
            started = time.perf_counter()
            answer = client.get("/health")
            latencies.append(time.perf_counter() - started)
            if answer.status_code != 200:
                unhealthy[answer.json()["status"]] += 1
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + STATUS_S
                memory = client.get("/v1/status").json()["memory"]
                peak["used_bytes"] = max(peak["used_bytes"], memory["used_bytes"])
                peak["client_bytes"] = max(peak["client_bytes"], memory["by_process"].get("client", 0))
            time.sleep(HEALTH_S)
    percentiles = statistics.quantiles(latencies, n=1000)
    health = {"p50_s": percentiles[499], "p99_s": percentiles[989], "max_s": max(latencies), "asked": len(latencies)}
    return {
        "health": {**health, "unhealthy": dict(unhealthy)},
        "memory": {**peak, "planned_bytes": memory["planned_bytes"], "budget_bytes": memory["budget_bytes"]},
    }


def await_idle(url: str) -> dict[str, Any]:
    """What the cluster still has to do when the clients have gone: nothing, after a moment."""
    with httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(100):
            requests: dict[str, Any] = client.get("/v1/status").json()["requests"]
            if not requests["active"]:
                break
            time.sleep(0.1)
    return requests


def judge(report: dict[str, Any]) -> bool:
    """Whether every bar is kept."""
    bad = [kind for kind in report["outcomes"] if kind not in ("answer", "left", "429", "503")]
    memory, requests = report["memory"], report["idle_after"]
    return (
        not bad
        and memory["used_bytes"] <= memory["planned_bytes"]
        and report["health"]["p99_s"] < LIMIT_S
        and requests["active"] == 0
        and report["server_exit_code"] == 0
    )


# -- the clients, in their own process -------------------------------------------------------------------------------------


def run_clients(url: str, num_clients: int, seconds: float, sender: Any) -> None:
    """Entry point of the clients' process."""
    os.nice(1)
    sender.send(asyncio.run(all_clients(url, num_clients, seconds)))


async def all_clients(url: str, num_clients: int, seconds: float) -> dict[str, Any]:
    """Many clients at once until the time is over."""
    outcomes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    started = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(
            *(one_client(client, random.Random(idx), started + seconds, outcomes, tokens) for idx in range(num_clients))
        )
    took = time.monotonic() - started
    return {
        "seconds": took,
        "outcomes": dict(outcomes),
        "requests": sum(outcomes.values()),
        "completion_tokens": tokens["new"],
        "tokens_per_s": tokens["new"] / took,
    }


async def one_client(
    client: httpx.AsyncClient, draw: random.Random, until: float, outcomes: Counter[str], tokens: Counter[str]
) -> None:
    """Ask again and again; after a refusal, pause for a moment."""
    while time.monotonic() < until:
        path, body = question(draw)
        leaves_after = draw.random() if draw.random() < 0.05 else None
        try:
            async with asyncio.timeout(leaves_after):
                outcome = await (streamed if body["stream"] else whole)(client, path, body, tokens)
        except TimeoutError:
            outcome = "left"
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        outcomes[outcome] += 1
        if outcome in ("429", "503"):
            await asyncio.sleep(draw.uniform(0.2, 1.0))


def question(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of some kind and size."""
    fields = {"max_tokens": draw.randrange(1, 64), "stream": draw.random() < 0.5, "seed": draw.randrange(1000)}
    subject = draw.choice(SUBJECTS) * draw.choice((1, 1, 1, 20))
    if draw.random() < 0.5:
        return "/v1/completions", {"prompt": f"Once upon a time there was {subject}", **fields}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": f"Define: {subject}"}], **fields}


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any], tokens: Counter[str]) -> str:
    """An answer in one piece."""
    response = await client.post(path, json=body)
    if response.status_code != 200:
        return refusal(response.status_code, dict(response.headers), response.json())
    tokens["new"] += response.json()["usage"]["completion_tokens"]
    return "answer" if response.json()["choices"][0]["finish_reason"] in ("stop", "length") else "no reason"


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any], tokens: Counter[str]) -> str:
    """An answer as it is made; one without its end has been cut off."""
    body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            return refusal(response.status_code, dict(response.headers), json.loads(await response.aread()))
        last = ""
        async for line in response.aiter_lines():
            if line.startswith("data: {") and '"usage":{' in line:
                tokens["new"] += json.loads(line[6:])["usage"]["completion_tokens"]
            last = line or last
    return "answer" if last == "data: [DONE]" else "cut off" if '"error"' not in last else "error event"


def refusal(status: int, headers: dict[str, str], body: dict[str, Any]) -> str:
    """A refusal is clean if it has a message, and says when to come again."""
    is_clean = bool(body["error"]["message"]) and (status not in (429, 503) or "retry-after" in headers)
    return str(status) if is_clean else f"unclean {status}"


if __name__ == "__main__":
    sys.exit(main())
