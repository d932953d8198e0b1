"""From the keywords of the Python API to a `Generate` message that the coordinator will understand.

What cannot travel (a wrong type, an integer beyond 64 bits, half a surrogate pair) is refused here, where the caller can be
told: a coordinator drops a message that it cannot decode, having no request to answer.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from colibri_mp.errors import ConfigError, ProtocolError, RequestError
from colibri_mp.messages import Conversation, Generate, Prompt, Sampling, from_frames, to_frames

AnyPrompt: TypeAlias = Prompt | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or messages in OpenAI's form for the chat template; a `Conversation` says more of them."""

_SAMPLING = Sampling.__struct_fields__
_OWN = tuple(name for name in Generate.__struct_fields__ if name not in ("request_id", "prompt", "sampling"))


def generate_request(request_id: int, prompt: AnyPrompt, options: dict[str, Any]) -> Generate:
    """The message for `prompt`; `options` are fields of `Generate` and `Sampling`, `stop` may be a single text.

    Raises:
        ConfigError: an option that does not exist.
        RequestError: a prompt or a value that cannot be sent.
    """
    for name in options:
        if name not in (*_OWN, *_SAMPLING):
            raise ConfigError(f"unknown option {name!r}; known are {', '.join((*_OWN, *_SAMPLING))}")
    own = {name: value for name, value in options.items() if name in _OWN}
    if isinstance(own.get("stop"), str):
        own["stop"] = (own["stop"],)
    sampling = Sampling(**{name: value for name, value in options.items() if name in _SAMPLING})
    return _as_received(Generate(request_id, prompt_of(prompt), sampling=sampling, **{"max_tokens": None, **own}))


def _as_received(request: Generate) -> Generate:
    """The message as the coordinator will read it."""
    try:
        received = from_frames([bytes(frame) for frame in to_frames(request)])
    except (ProtocolError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent: {error}") from error
    assert isinstance(received, Generate)
    return received


def prompt_of(prompt: AnyPrompt) -> Prompt:
    """The prompt as it travels: a list of dicts is a conversation, any other sequence token ids."""
    if isinstance(prompt, str | Conversation):
        return prompt
    messages = [item for item in prompt if isinstance(item, dict)]
    if messages and len(messages) == len(prompt):
        return Conversation(messages)
    if messages or not all(isinstance(item, int | np.integer) for item in prompt):
        raise RequestError("a prompt is a text, a list of token ids, or a list of messages such as {'role', 'content'}")
    return [int(item) for item in prompt if not isinstance(item, dict)]
