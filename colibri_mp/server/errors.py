"""Errors as HTTP says them: a status, and a body in the shape that the client's library knows (OpenAI's, or Anthropic's)."""

from typing import Any

import msgspec
from starlette.responses import Response

from colibri_mp.errors import ColibriError

ANTHROPIC_PREFIX = "/v1/messages"
RETRY_AFTER_S = 2  # of a queue that is full; a loading or broken cluster takes longer
_RETRY_LATER_S = 10

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 413: "request_too_large", 500: "api_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 429: "overloaded", 503: "unavailable"}


class HttpError(Exception):
    """Ends a request. `param` names the field that is wrong, `code` is for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = headers or {}
        if status in (429, 503):
            self.headers.setdefault("retry-after", str(RETRY_AFTER_S if status == 429 else _RETRY_LATER_S))

    def body(self, path: str) -> dict[str, Any]:
        """The error object for a client of `path`."""
        types = _ANTHROPIC_TYPES if path.startswith(ANTHROPIC_PREFIX) else _OPENAI_TYPES
        kind = types.get(self.status, "invalid_request_error" if self.status < 500 else types[500])
        if path.startswith(ANTHROPIC_PREFIX):
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        """The whole answer."""
        return json_response(self.body(path), self.status, self.headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def unsupported(param: str, message: str) -> HttpError:
    """A field, or a value of it, that this server does not do: named, never ignored."""
    return HttpError(400, f"{param}: {message}", param=param, code="unsupported")


def from_colibri(error: ColibriError) -> HttpError:
    """What an error of the engine is in HTTP."""
    match error.kind:
        case "request" | "config":
            return HttpError(400, str(error), code="invalid_request")
        case "overloaded":
            return HttpError(429, str(error))
        case "read" | "worker_died" | "coordinator_died" | "error":  # the last: the cluster is stopping
            return HttpError(503, str(error))
        case _:
            return HttpError(500, str(error), code=error.kind)
