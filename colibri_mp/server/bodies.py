"""From the bytes of a request to a checked struct; every refusal is an `HttpError` that names the field."""

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from colibri_mp.server.errors import HttpError

T = TypeVar("T")
_PATH = re.compile(r" - at `(key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


async def read_body(request: Request, kind: type[T]) -> T:
    """The body of `request` as a `kind`.

    Raises:
        HttpError: 415 for another content type, 400 with the path of what does not fit.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, f"content-type must be application/json, not {content_type or 'missing'}")
    return decode(await request.body(), kind)


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`; raises `HttpError` 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply", code="invalid_json") from None


def _misfit(text: str) -> HttpError:
    """msgspec says "Expected `int`, got `str` - at `$.stop[0]`"; an unknown field counts as its own path."""
    found = _PATH.search(text)
    path = found["path"] if found else ""
    what = text[: found.start()] if found else text
    if unknown := _UNKNOWN.search(what):
        path = f"{path}.{unknown[1]}".lstrip(".")
        return HttpError(400, f"{path}: this field is not supported", param=path, code="unknown_field")
    where = path or "the body"
    return HttpError(400, f"{where}: {what[:1].lower()}{what[1:]}", param=path or None, code="invalid_value")
