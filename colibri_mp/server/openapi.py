"""The OpenAPI document of this server: what is sent comes from the same structs that check it, what is answered stands here."""

from functools import cache
from typing import Any

import msgspec

from colibri_mp import __version__
from colibri_mp.server.anthropic_schema import CountTokensRequest, MessagesRequest
from colibri_mp.server.openai_schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "a field, or a value of it, that is wrong or not supported: named",
    "401": "no API key, or a wrong one",
    "403": "the Host header names something that this server does not answer to",
    "404": "no such model",
    "408": "the body did not come in time",
    "409": "the request was cancelled",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "too many requests wait: come again after Retry-After",
    "500": "a defect of the server",
    "503": "loading, stalled or broken: come again after Retry-After",
}
_OF_GET = ("401", "403", "500", "503")


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    kinds = [ChatRequest, CompletionRequest, MessagesRequest, CountTokensRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "colibri-mp", "version": __version__, "description": "See docs/server.md."},
        "paths": _paths(),
        "components": {
            "schemas": {**schemas, **_answers()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _paths() -> dict[str, Any]:
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/chat/completions": {"post": _post("Answer a conversation", "ChatRequest", "ChatCompletion", streams=True)},
        "/v1/completions": {"post": _post("Continue texts", "CompletionRequest", "TextCompletion", streams=True)},
        "/v1/embeddings": {"post": _embeddings()},
        "/v1/models": {"get": _get("The model that is served, by all its names", "ModelList")},
        "/v1/models/{model_id}": {"get": {**_get("One model", "Model", "404"), "parameters": [model_id]}},
        "/v1/messages": {"post": _post("Answer a conversation", "MessagesRequest", "Message", True, "AnthropicError")},
        "/v1/messages/count_tokens": {
            "post": _post("Count a conversation's tokens", "CountTokensRequest", "TokenCount", False, "AnthropicError")
        },
        "/v1/status": {"get": _get("What `status --json` prints", "Status")},
        "/v1/requests/{request_id}": {
            "delete": {**_get("Cancel a request", "Cancelled", "404"), "parameters": [request_id]}
        },
        "/health": {"get": _health()},
        "/metrics": {"get": _metrics()},
        "/openapi.json": {"get": _get("This document", "Document")},
    }


def _post(summary: str, takes: str, gives: str, streams: bool, errors: str = "Error") -> dict[str, Any]:
    content = _json(gives) | ({"text/event-stream": {}} if streams else {})
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(takes)},
        "responses": {"200": {"description": "the answer", "content": content}, **_refusals(_REFUSALS, errors)},
    }


def _get(summary: str, gives: str, *more: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": _json(gives)},
            **_refusals((*_OF_GET, *more), "Error"),
        },
    }


def _embeddings() -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    summary = "Refused: no model that is supported makes embeddings"
    return {"summary": summary, "requestBody": body, "responses": _refusals(_REFUSALS, "Error")}


def _health() -> dict[str, Any]:
    responses = {
        status: {"description": text, "content": _json("Health")}
        for status, text in (("200", "the engine gets on"), ("503", "loading, stalled, broken or stopping"))
    }
    return {"summary": "Whether the engine gets on", "responses": responses | _refusals(("403",), "Error")}


def _metrics() -> dict[str, Any]:
    text = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"summary": "Figures for Prometheus", "responses": {"200": text, **_refusals(_OF_GET, "Error")}}


def _refusals(statuses: Any, errors: str) -> dict[str, Any]:
    return {status: {"description": _REFUSALS[status], "content": _json(errors)} for status in sorted(statuses)}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


# -- what is answered ------------------------------------------------------------------------------------------------------

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_MAYBE_TEXT = {"type": ["string", "null"]}
_OBJECT = {"type": "object"}
_MAYBE_OBJECT = {"type": ["object", "null"]}


def _answers() -> dict[str, Any]:
    usage = _object(
        prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    )  # fmt: skip
    head = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT, "usage": usage}
    reason = {"enum": ["stop", "length", "tool_calls"]}
    said = _object(role={"const": "assistant"}, content=_MAYBE_TEXT, refusal={"type": "null"})
    chat = _object(index=_COUNT, message=said, logprobs=_MAYBE_OBJECT, finish_reason=reason)
    text = _object(index=_COUNT, text=_TEXT, logprobs=_MAYBE_OBJECT, finish_reason=reason)
    return {
        "ChatCompletion": _object(**head, object={"const": "chat.completion"}, choices=_list(chat)),
        "TextCompletion": _object(**head, object={"const": "text_completion"}, choices=_list(text)),
        "Message": _message(),
        "TokenCount": _object(input_tokens=_COUNT),
        "Model": _model(),
        "ModelList": _object(object={"const": "list"}, data=_list(_model()), has_more={"const": False}),
        "Cancelled": _object(id=_TEXT, object={"const": "request"}, cancelled={"const": True}),
        "Status": _object(version=_TEXT, name=_TEXT, state=_TEXT, model=_OBJECT, requests=_OBJECT, memory=_OBJECT),
        "Health": _object(status={"enum": ["ok", "loading", "stalled", "broken", "stopping"]}, reason=_TEXT),
        "Document": _object(openapi=_TEXT, paths=_OBJECT),
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)),
        "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    }


def _message() -> dict[str, Any]:
    usage = _object(
        input_tokens=_COUNT, output_tokens=_COUNT, cache_read_input_tokens=_COUNT, cache_creation_input_tokens=_COUNT
    )
    return _object(
        id=_TEXT, type={"const": "message"}, role={"const": "assistant"}, model=_TEXT,
        content=_list(_object(type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_MAYBE_TEXT, usage=usage,
    )  # fmt: skip


def _model() -> dict[str, Any]:
    return _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, context_length=_COUNT)


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has all of these, and may have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}
