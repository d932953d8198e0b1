"""Stop strings over streamed text: nothing after a stop is emitted, and nothing that may yet become the start of one.

A stop string may be spread over many pieces of text; what could still become one is held back until it is decided.
"""

from collections.abc import Sequence


class StopStrings:
    """Filter between the stream of text and the client. `found` is the first stop string, None before it comes."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece of text; returns what may be emitted now.

        The stop that is complete first counts (the longest, if several end together), so the result does not depend on
        how the text is cut into pieces. The stop itself is cut off, and all that follows is swallowed.
        """
        if self.found is not None:
            return ""
        text = self._held + text
        spans = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if spans:
            _, end, self.found = min(spans)
            self._held = ""
        else:
            end = len(text) - self._undecided(text)
            self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The text held back, to be emitted when generation ends without a stop."""
        rest, self._held = self._held, ""
        return rest

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
