"""Finds where a JSON object that comes in pieces ends, without parsing it."""

_OUTSIDE = frozenset('{}[],: \t\r\n"+-.0123456789abcdefghijklmnopqrstuvwxyzE')
"""What stands outside of strings in JSON (more letters than the literals need: this is no validation)."""


class JsonScanner:
    """Follows braces, brackets and strings of a growing text.

    `end`: where the outermost value is complete, after its last bracket; `broken`: where a character cannot be JSON. One of them is
    set at most, and then nothing more is looked at. Values without a bracket never end.
    """

    def __init__(self, depth: int = 0) -> None:
        self.end: int | None = None
        self.broken: int | None = None
        self._depth = depth
        self._position = 0
        self._is_string = False
        self._is_escaped = False

    def scan(self, text: str) -> None:
        """Go on to the end of `text`, which begins with what was scanned before."""
        while self.end is None and self.broken is None and self._position < len(text):
            self._take(text[self._position])

    def drop_scanned(self) -> None:
        """What was scanned has been cut off: the next text begins after it."""
        self._position = 0

    def _take(self, letter: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = letter == "\\"
            self._is_string = letter != '"'
        elif letter not in _OUTSIDE:
            self.broken = self._position
            return
        else:
            self._is_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
        self._position += 1
        if self._depth == 0 and letter in "}]" and not self._is_string:
            self.end = self._position
