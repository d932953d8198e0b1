"""Single tokens as logprobs show them: a text, and the bytes behind it where they are no whole characters."""

import re

from colibri_mp.tokenizer import Tokenizer
from colibri_mp.vocabulary import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACED = "\ufffd"


_ALPHABET = byte_alphabet()


class TokenTexts:
    """Texts of token ids; without a tokenizer they are called by number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        if self._tokenizer is None:
            return f"<{token_id}>".encode()
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACED not in text:
            return text.encode()
        name = self._tokenizer.token_text(token_id)
        if found := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(found[1], 16)])
        if name and all(char in _ALPHABET for char in name):
            return bytes(_ALPHABET[char] for char in name)
        return text.encode()

    def text(self, token_id: int) -> str:
        """A token's text; bytes that are no text are written as OpenAI does: "bytes:\\xe2\\x80"."""
        found = self.bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
