"""What was said: JSONL, one line a turn, in the order of the file, whatever the order in which it happened.

A line holds nothing that depends on time or on other sessions: the same script makes the same bytes.
"""

import json
from collections.abc import Iterable
from typing import Any

from colibri_mp.script.play import Play, TurnResult


def transcript(plays: Iterable[Play]) -> bytes:
    """The lines of all turns that were played or skipped, UTF-8."""
    lines = [json.dumps(_line(play, result), ensure_ascii=False) for play in plays for result in play.results]
    return "".join(line + "\n" for line in lines).encode(errors="backslashreplace")


def _line(play: Play, result: TurnResult) -> dict[str, Any]:
    place = {"session": play.session.name, "repeat": play.repeat, "turn": result.turn}
    request = result.request
    if request is None:
        return {**place, "skipped": True}
    asked = {"prompt": request.asked} if isinstance(request.asked, str) else {"prompt_ids": request.asked}
    system = {"system": request.system} if request.system else {}
    error = {"error": result.error} if result.error else {}
    return {
        **place,
        **system,
        **asked,
        "seed": request.options["seed"],
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason or None,
        **error,
    }
