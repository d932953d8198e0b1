"""The OpenAPI document is true: what it says is refused is refused, and every answer is as it says."""

from collections.abc import Iterator
from zlib import crc32

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from live_server import LiveServer, chat
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from colibri_mp.server.openai_schema import LARGEST_INT
from colibri_mp.server.openapi import document
from colibri_mp.server.routes import ROUTES

SCHEMA = schemathesis.openapi.from_dict(document())
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One connection for thousands of requests."""
    with requests.Session() as kept:
        yield kept


def test_every_route_is_documented(server: LiveServer) -> None:
    """The document has the routes that there are, with their methods; it is served as it is."""
    documented = {(path, method.upper()) for path, item in document()["paths"].items() for method in item}
    routes = {(route.path.replace(":path", ""), method) for route in ROUTES for method in route.methods or ()}
    assert documented == {pair for pair in routes if pair[1] != "HEAD"}
    with server.client() as client:
        assert client.get("/openapi.json").json() == document()
        wrong = client.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"


@SCHEMA.parametrize()
@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_answers_are_as_documented(server: LiveServer, session: requests.Session, case: schemathesis.Case) -> None:
    """Bodies made from the document, right and wrong ones, get documented answers and never a 5xx; a third of four thousand."""
    if isinstance(case.body, dict) and crc32(repr(case.body).encode()) % 3:
        return
    if isinstance(case.body, dict) and "messages" in case.body and case.path != "/v1/messages":
        case.body.setdefault("max_tokens", 4)
    if isinstance(case.body, dict) and 4 < _number(case.body.get("max_tokens")) <= LARGEST_INT:
        case.body["max_tokens"] = 4
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30, session=session)


def test_a_whole_chat_is_as_documented(server: LiveServer) -> None:
    """An answer with everything in it keeps to the document too."""
    operation = SCHEMA["/v1/chat/completions"]["POST"]
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=chat(logprobs=True, n=2))
    operation.validate_response(response)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0
