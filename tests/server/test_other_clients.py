"""`curl` and `langchain-openai`, unmodified, against a live server."""

import json
import subprocess
from typing import Any

import httpx
from live_server import LiveServer, chat, events


def curl(*arguments: str) -> str:
    """What curl prints."""
    done = subprocess.run(["curl", "-sS", "-N", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def post(server: LiveServer, path: str, body: dict[str, Any]) -> str:
    """POST by curl."""
    return curl(f"{server.url}{path}", "-H", "content-type: application/json", "-d", json.dumps(body))


def test_curl(server: LiveServer) -> None:
    """Whole and streamed chats; without the content type curl is told what is missing."""
    whole = json.loads(post(server, "/v1/chat/completions", chat()))
    streamed = post(server, "/v1/chat/completions", chat(stream=True))
    assert streamed.endswith("data: [DONE]\n\n")
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events(iter(streamed.splitlines())))
    assert text == whole["choices"][0]["message"]["content"]
    assert "content-type must be application/json" in curl(f"{server.url}/v1/chat/completions", "-d", "{}")


def test_langchain(server: LiveServer) -> None:
    """A chain of LangChain's gets an answer, whole and streamed."""
    from langchain_openai import ChatOpenAI

    with httpx.Client() as client:
        model = ChatOpenAI(
            model="demo",
            base_url=f"{server.url}/v1",
            api_key="none",
            temperature=0,
            max_tokens=8,
            http_client=client,  # type: ignore[arg-type]
        )
        answer = model.invoke("Define: river")
        assert str(answer.content).startswith("(noun)")
        assert answer.response_metadata["finish_reason"] == "length"
        assert "".join(str(chunk.content) for chunk in model.stream("Define: river")) == answer.content


def test_health_status_and_metrics(server: LiveServer) -> None:
    """The pages for people and machines who watch: what they say agrees."""
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok", "reason": "serving"}
        before = _figures(client.get("/metrics").text)
        client.post("/v1/chat/completions", json=chat()).raise_for_status()
        after = _figures(client.get("/metrics").text)
        status = client.get("/v1/status").json()
    assert after["colibri_generated_tokens_total"] == before["colibri_generated_tokens_total"] + 8
    ok = 'colibri_http_requests_total{endpoint="/v1/chat/completions",outcome="ok"}'
    assert after[ok] == before.get(ok, 0) + 1
    assert status["state"] == "serving"
    assert status["memory"]["used_bytes"] <= status["memory"]["budget_bytes"]
    assert status["requests"]["active"] == 0


def _figures(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
