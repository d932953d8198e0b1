"""Text to token ids and back, chat templates, and the tokens that end a generation.

The tokenizer is the checkpoint's tokenizer.json, run by `tokenizers`; `transformers` gives the same ids and text. A
checkpoint without tokenizer.json can still be run on token ids. See also `stopping` and `chat_template`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_mp import chat_template
from colibri_mp.checkpoint import Checkpoint
from colibri_mp.checkpoint.json_file import read_json_object
from colibri_mp.errors import CheckpointError, RequestError
from colibri_mp.stopping import StopStrings
from colibri_mp.tool_calls import MARKERS
from colibri_mp.vocabulary import token_bytes

if TYPE_CHECKING:
    import tokenizers

__all__ = ["StopStrings", "StreamDecoder", "Tokenizer", "eos_token_ids", "sampling_defaults"]

_INCOMPLETE = "\ufffd"  # what `tokenizers` decodes the bytes of an unfinished character to
_CONTEXT_TOKENS = 8  # of those before a stream: enough for any decoder to see where it is in the text
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Tokenizer:
    """A checkpoint's tokenizer. Made by `load`."""

    def __init__(self, backend: "tokenizers.Tokenizer", config: Mapping[str, Any], templates: dict[str, str]) -> None:
        self._backend = backend
        self._special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))}
        self._forced_bos = self.token_id(self._special.get("bos_token", "")) if config.get("add_bos_token") else None
        self._templates = templates
        added = backend.get_added_tokens_decoder().items()
        self._hidden = frozenset(i for i, token in added if token.special and token.content not in MARKERS)

    @staticmethod
    def load(folder: Path) -> "Tokenizer | None":
        """The tokenizer in `folder`; None if there is no tokenizer.json. Raises `CheckpointError` if it is damaged."""
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(f"{path}: cannot be read as a tokenizer ({error}): fetch the file again") from error
        backend.no_truncation()
        backend.no_padding()
        config = _optional_json(folder / "special_tokens_map.json") | _optional_json(folder / "tokenizer_config.json")
        return Tokenizer(backend, config, chat_template.find_templates(folder, config))

    @property
    def vocab_size(self) -> int:
        """Ids from 0 on, added tokens included; a model may have more rows of logits."""
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return max(ids.values()) + 1

    @property
    def special_ids(self) -> list[int]:
        """The ids of special tokens, markers of tool calls and reasoning among them."""
        return [i for i, token in self._backend.get_added_tokens_decoder().items() if token.special]

    def token_bytes(self) -> dict[int, bytes] | None:
        """The bytes that each id stands for; None if the vocabulary is not byte-level."""
        return token_bytes(self._backend)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a chat is written."""
        return bool(self._templates)

    @property
    def eos_id(self) -> int | None:
        """The id of tokenizer_config.json's eos_token."""
        return self.token_id(self._special.get("eos_token", ""))

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact text, special ones included."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str:
        """How the vocabulary writes a token, which may not be its text; "" for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def longest_token(self) -> int:
        """Characters that the vocabulary writes its longest token with."""
        return max(len(self.token_text(token_id)) for token_id in range(self._backend.get_vocab_size()))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with what the tokenizer adds to a text of its own (such as a begin token) if asked."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._forced_bos is not None and ids[:1] != [self._forced_bos]:
            return [self._forced_bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Markers of tool calls and reasoning are kept even if they are special tokens."""
        kept = [token_id for token_id in ids if token_id not in self._hidden] if skip_special_tokens else list(ids)
        text: str = self._backend.decode(kept, skip_special_tokens=False)
        return text

    def chat_template(self, with_tools: bool = False) -> str | None:
        """The text of the chat template that is used; None if the checkpoint has none."""
        return self._templates.get("tool_use" if with_tools and "tool_use" in self._templates else "default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat in the checkpoint's own form; `variables` are further ones that its template knows.

        Raises `RequestError` if the checkpoint has no chat template, if the template has no use for the tools or for a variable, or
        if it refuses the messages.
        """
        template = self.chat_template(bool(tools))
        if template is None:
            raise RequestError("this checkpoint has no chat template: give a plain prompt (`run`) instead of a chat")
        given = [*variables, *(["tools"] if tools and "tool_use" not in self._templates else [])]
        for unused in (name for name in given if not re.search(rf"\b{re.escape(name)}\b", template)):
            raise RequestError(f"this checkpoint's chat template has no use for {unused!r}: leave it out")
        own = {
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return chat_template.render(template, {**self._special, **variables, **own})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a chat; the template writes all special tokens itself. Options are `apply_chat_template`'s."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def stream(self, after: Sequence[int] = ()) -> "StreamDecoder":
        """A decoder for ids that come one at a time; `after` are the ids before them, for spacing only."""
        return StreamDecoder(self, after)


class StreamDecoder:
    """Turns ids into text as they come, never emitting half a character.

    The pieces together are `decode` of all ids (of valid text), but for an unfinished character at the end, which is
    dropped.
    Decodes a window: the ids of the last piece, which give the context (a leading space, say), and those not emitted.
    (`tokenizers.decoders.DecodeStream` keeps the same window but cannot be flushed and raises on some invalid bytes.)
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(after[-_CONTEXT_TOKENS:])
        self._close_window()

    def push(self, token_id: int) -> str:
        """Take the next id; returns the text that is complete now, often empty in other scripts than Latin."""
        self._window.append(token_id)
        text = self._pending_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._window[: self._num_context]
        self._close_window()
        return text

    def finish(self) -> str:
        """The text still held back, without an unfinished character at its end."""
        text = self._pending_text().rstrip(_INCOMPLETE)
        self._close_window()
        return text

    def _pending_text(self) -> str:
        return self._tokenizer.decode(self._window)[self._num_context_chars :]

    def _close_window(self) -> None:
        """Make everything in the window context: it has been emitted."""
        self._num_context = len(self._window)
        self._num_context_chars = len(self._tokenizer.decode(self._window))


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """The ids that end a generation: generation_config.json's, else config.json's, else the tokenizer's eos_token."""
    for name, config in (("generation_config.json", checkpoint.generation_config), ("config.json", checkpoint.config)):
        if config.get("eos_token_id") is not None:
            return _id_set(name, config["eos_token_id"])
    tokenizer = tokenizer or Tokenizer.load(checkpoint.path)
    eos_id = tokenizer.eos_id if tokenizer else None
    return frozenset() if eos_id is None else frozenset([eos_id])


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float | bool]:
    """What generation_config.json says of sampling: `do_sample` and the settings that it gives numbers for.

    Raises `CheckpointError` for a value that is no number.
    """
    config, defaults = checkpoint.generation_config, dict[str, float | bool]()
    for name in _SAMPLING_FIELDS:
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"generation_config.json: {name} = {value!r} must be a number")
        if value is not None:
            defaults[name] = value
    defaults["do_sample"] = config.get("do_sample") is True
    return defaults


def _id_set(file_name: str, stated: object) -> frozenset[int]:
    ids = stated if isinstance(stated, list) else [stated]
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError(f"{file_name}: eos_token_id = {stated!r} must be a token id or a list of them")
    return frozenset(ids)


def _token_text(stated: object) -> str:
    """tokenizer_config.json writes a special token as text, or as an object with its `content`."""
    if isinstance(stated, Mapping):
        stated = stated.get("content")
    return stated if isinstance(stated, str) else ""


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
