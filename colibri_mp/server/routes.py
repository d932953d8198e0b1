"""The endpoints: each reads its body, asks through the hub, and says how the answer is written."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from colibri_mp.server import anthropic_questions, openai_questions
from colibri_mp.server.anthropic_answers import MessageForm
from colibri_mp.server.anthropic_schema import CountTokensRequest, MessagesRequest
from colibri_mp.server.bodies import read_body
from colibri_mp.server.errors import HttpError, json_response
from colibri_mp.server.hub import Hub
from colibri_mp.server.openai_answers import ChatForm, CompletionForm
from colibri_mp.server.openai_schema import ChatRequest, CompletionRequest
from colibri_mp.server.openapi import document
from colibri_mp.server.prompts import chat_prompt, text_prompts
from colibri_mp.server.turns import Question
from colibri_mp.server.view import Model

_STATUS_TIMEOUT_S = 5.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def hub_of(request: Request) -> Hub:
    """The server's parts."""
    hub: Hub = request.state.hub
    return hub


# -- OpenAI ----------------------------------------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    hub = hub_of(request)
    body = await read_body(request, ChatRequest)
    model = hub.model(body.model)
    options = openai_questions.chat_options(body, hub.config.max_tokens)
    prompt = await chat_prompt(model, openai_questions.chat_conversation(body))
    options = prompt.constrained(options, openai_questions.forced_call(body))
    turn = hub.turn(request, "chatcmpl-", openai_questions.choices([Question(prompt.ids, options)], body))
    parsers = [prompt.parser() for _ in turn.questions]
    form = ChatForm(turn, model, body.stream_options, parsers, bool(body.logprobs))
    return await hub.answer(request, turn, form, bool(body.stream))


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    hub = hub_of(request)
    body = await read_body(request, CompletionRequest)
    model = hub.model(body.model)
    options = openai_questions.completion_options(body)
    prompts = await text_prompts(model, openai_questions.completion_prompts(body), bool(body.echo))
    turn = hub.turn(request, "cmpl-", openai_questions.choices([Question(p.ids, options) for p in prompts], body))
    echoed = prompts if body.echo else None
    form = CompletionForm(turn, model, body.n or 1, body.stream_options, echoed, body.logprobs is not None)
    return await hub.answer(request, turn, form, bool(body.stream))


async def embeddings(_request: Request) -> Response:
    """POST /v1/embeddings."""
    raise HttpError(
        400, "no model that is supported makes embeddings; use /v1/chat/completions or /v1/completions",
        param="model", code="unsupported",
    )  # fmt: skip


async def models(request: Request) -> Response:
    """GET /v1/models, in a form that both kinds of client read."""
    model = hub_of(request).model()
    listed = [_model(model, name) for name in model.names if name != "*"]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
    return json_response({"object": "list", "data": listed, "has_more": False, **ends})


async def one_model(request: Request) -> Response:
    """GET /v1/models/{model_id}."""
    name = request.path_params["model_id"]
    return json_response(_model(hub_of(request).model(name), name))


# -- Anthropic -------------------------------------------------------------------------------------------------------------


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    hub = hub_of(request)
    body = await read_body(request, MessagesRequest)
    model = hub.model(body.model)
    options = anthropic_questions.message_options(body)
    prompt = await chat_prompt(model, anthropic_questions.conversation_of(body))
    options = prompt.constrained(options, anthropic_questions.forced_call(body))
    turn = hub.turn(request, "msg_", [Question(prompt.ids, options)])
    form = MessageForm(turn, model, prompt.parser("toolu_"), len(prompt.ids))
    return await hub.answer(request, turn, form, bool(body.stream))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_body(request, CountTokensRequest)
    model = hub_of(request).model(body.model)
    prompt = await chat_prompt(model, anthropic_questions.conversation_of(body))
    return json_response({"input_tokens": len(prompt.ids)})


# -- of this server --------------------------------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """GET /health: 200 while the engine gets on, else 503 with the reason."""
    state, reason = hub_of(request).health()
    is_well = state == "ok"
    return json_response(
        {"status": state, "reason": reason}, 200 if is_well else 503, {} if is_well else {"retry-after": "10"}
    )


async def status(request: Request) -> Response:
    """GET /v1/status: what `status --json` prints."""
    hub = hub_of(request)
    hub.model()
    try:
        async with asyncio.timeout(_STATUS_TIMEOUT_S):
            return json_response(await hub.bridge.fresh_status())
    except TimeoutError:
        raise HttpError(503, f"the cluster has not answered within {_STATUS_TIMEOUT_S:g} s; see /health") from None


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return Response(hub_of(request).metrics.text(), headers={"content-type": _METRICS_TYPE})


async def cancel(request: Request) -> Response:
    """DELETE /v1/requests/{request_id}: by the x-request-id of the answer, or the id in its body."""
    given = request.path_params["request_id"]
    turn = hub_of(request).bridge.turn(given)
    if turn is None:
        raise HttpError(404, f"no request {given!r} is under way", param="request_id", code="request_not_found")
    turn.cancel()
    return json_response({"id": given, "object": "request", "cancelled": True})


async def openapi(_request: Request) -> Response:
    """GET /openapi.json."""
    return json_response(document())


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model_id:path}", one_model, methods=["GET"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/status", status, methods=["GET"]),
    Route("/v1/requests/{request_id}", cancel, methods=["DELETE"]),
    Route("/health", health, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
]


def _model(model: Model, name: str) -> dict[str, Any]:
    made = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": model.created,
        "created_at": made,
        "owned_by": "colibri-mp",
        "context_length": model.ctx_tokens,
    }
