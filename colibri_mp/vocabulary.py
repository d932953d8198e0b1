"""The bytes that each token of a byte-level vocabulary (Qwen, OLMoE, newer Mistral) stands for.

Such a vocabulary writes a token with a character for each byte (GPT-2's `bytes_to_unicode`).
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + idx): byte for idx, byte in enumerate(others)}


def token_bytes(backend: "tokenizers.Tokenizer") -> dict[int, bytes] | None:
    """The bytes of each id; added tokens are their text. None if the vocabulary is of another kind."""
    if backend.decoder is None or "ByteLevel" not in _kinds(json.loads(backend.decoder.__getstate__())):
        return None
    alphabet = byte_alphabet()
    found = {i: _bytes_of(text, alphabet) for text, i in backend.get_vocab(with_added_tokens=False).items()}
    return found | {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}


def _kinds(decoder: Mapping[str, Any]) -> set[str]:
    """The kind of a decoder and of those that it is made of."""
    return {str(decoder["type"])}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def _bytes_of(text: str, alphabet: Mapping[str, int]) -> bytes:
    """What `text` stands for; a text with other characters is itself."""
    try:
        return bytes(alphabet[letter] for letter in text)
    except KeyError:
        return text.encode()
