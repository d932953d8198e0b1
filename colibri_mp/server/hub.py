"""What the routes share: the bridge, the settings, and how a question becomes an answer over HTTP."""

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from colibri_mp.server.bridge import Bridge
from colibri_mp.server.errors import HttpError, json_response
from colibri_mp.server.gate import unless_gone
from colibri_mp.server.metrics import Metrics
from colibri_mp.server.settings import ServerConfig
from colibri_mp.server.sse import EventStream
from colibri_mp.server.turns import Question, Turn
from colibri_mp.server.view import Model


class AnswerForm(Protocol):
    """How an answer is written."""

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer's events."""


class Hub:
    """One server's parts."""

    def __init__(self, config: ServerConfig, bridge: Bridge, metrics: Metrics) -> None:
        self.config = config
        self.bridge = bridge
        self.metrics = metrics
        metrics.watch(lambda: bridge.view, lambda: bridge.num_turns)

    def health(self) -> tuple[str, str]:
        """The state in a word, and the reason."""
        return self.bridge.view.health(time.monotonic(), self.config.stall)

    def model(self, name: str | None = None) -> Model:
        """The model that is served, asked for by `name`.

        Raises:
            HttpError: 503 while there is none, 404 if it is another one.
        """
        view = self.bridge.view
        if view.state != "serving" or view.model is None:
            raise HttpError(503, f"{view.state}: {view.detail}", code=view.state)
        if name is not None and not view.model.is_called(name):
            raise HttpError(
                404, f"model {name!r} is not served here; this is {view.model.name!r} (--model-name NAME adds names)",
                param="model", code="model_not_found",
            )  # fmt: skip
        return view.model

    def turn(self, request: Request, prefix: str, questions: list[Question]) -> Turn:
        """A turn that `answer` will ask; the request's id with another prefix names its answer."""
        return Turn(request.state.request_id.replace("req_", prefix), questions, self.metrics)

    async def answer(self, request: Request, turn: Turn, form: AnswerForm, is_stream: bool) -> Response:
        """Ask the engine, and answer whole or as a stream; a client that goes away ends it."""
        with ExitStack() as stack:
            self.bridge.submit(turn)
            stack.callback(self.bridge.forget, turn)
            if not is_stream:
                return json_response(await unless_gone(request.receive, form.whole()))
            await unless_gone(request.receive, turn.accepted(self.config.ping))
            return EventStream(form.stream(), self.config.ping, stack.pop_all().close)
