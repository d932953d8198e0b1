"""From the text of an answer, as it comes, to content, reasoning and tool calls.

Checkpoints write tool calls in the dialect of their chat template, whose text says which by the markers in it:

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>                 Qwen3 and many others
              <tool_call><function=f><parameter=a>...</parameter></function></tool_call>  Qwen3-Coder
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                     Mixtral, Mistral
              [TOOL_CALLS]f[ARGS]{...}                                                  newer Mistral
    reasoning <think>...</think>, where the template knows it; it may begin in the prompt, without its first marker

A template that takes tools and has no marker of these may be answered in both dialects. The events depend on the text alone and
not on how it is cut into pieces. White space next to a marker is dropped. A marker with anything but a call behind it is content:
nothing that a model writes is lost. What follows the start of a call's arguments is passed on as it was written, valid or not.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from colibri_mp.function_xml import Types, parameter_types, value_json
from colibri_mp.json_scan import JsonScanner

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
MISTRAL = "[TOOL_CALLS]"
THINK, THINK_END = "<think>", "</think>"
MARKERS = frozenset({HERMES, HERMES_END, MISTRAL, "[ARGS]", "[CALL_ID]", THINK, THINK_END})
"""Texts that a decoder must keep even where they are special tokens of the checkpoint."""

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TAG_NAME = re.compile(r"([^<>\n]{1,256})>")
_TAG_NAME_START = re.compile(r"[^<>\n]{0,256}")
_NAMED = re.compile(r"\s{0,16}([\w.\-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}(?=\{)")
_NAMED_START = re.compile(r"\s{0,16}[\w.\-]{0,256}(?:\[[A-Z_]{0,8}\]?\w{0,64}){0,2}\s{0,16}")


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call of function `name` begins; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the arguments of call `index`: JSON text."""

    index: int
    text: str


Event: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def new_call_id() -> str:
    """A random id of OpenAI's form."""
    return "call_" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(24))


class OutputParser:
    """A machine with one method for each state, which takes what it can from the text and says whether to go on at once."""

    def __init__(
        self, markers: tuple[str, ...] = (), reasons: bool = False, starts_in_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id, types: Types | None = None,
    ) -> None:  # fmt: skip
        self._markers = markers
        self._new_id = new_id
        self._types = types or {}
        self._function = ""  # whose parameters come as tags
        self._num_parameters = 0
        self._state = self._in_reasoning if starts_in_reasoning else self._at_start if reasons else self._in_content
        self._text = ""  # not yet decided
        self._marked = ""  # the marker, and what was cut off around it, should it turn out to be content
        self._is_margin = starts_in_reasoning  # right after a marker
        self._is_end = False
        self._num_calls = 0
        self._scanner = JsonScanner()
        self._after_call = self._after_hermes
        self._events: list[Event] = []

    @classmethod
    def for_template(
        cls,
        template: str | None,
        has_tools: bool,
        prompt: str | None = None,
        new_id: Callable[[], str] = new_call_id,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Self:
        """A parser for the answers of a checkpoint with this chat template.

        Without tools there are no calls, whatever the model writes. `prompt`: the rendered prompt, which says for sure whether the
        answer begins in the middle of reasoning; without it the template's text decides. `tools`, in OpenAI's form, say which
        arguments are strings where a dialect does not.
        """
        template = template or ""
        known = tuple(marker for marker in (HERMES, FUNCTION, MISTRAL) if marker in template)
        markers = (known or (HERMES, MISTRAL)) if has_tools else ()
        reasons = THINK_END in template
        opens = _opens_reasoning(template) if prompt is None else prompt.rstrip().endswith(THINK)
        return cls(markers, reasons, reasons and opens, new_id, parameter_types(tools))

    def push(self, text: str) -> list[Event]:
        """Take more of the answer; returns what is certain by now."""
        self._text += text
        return self._run()

    def finish(self) -> list[Event]:
        """The answer has ended; returns what had been held back."""
        self._is_end = True
        return self._run()

    def _run(self) -> list[Event]:
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    # -- text ----------------------------------------------------------------------------------------------------------

    def _at_start(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(THINK):
            self._text, self._is_margin = rest[len(THINK) :], True
            self._state = self._in_reasoning
            return True
        if not self._is_end and THINK.startswith(rest):
            return False
        self._state = self._in_content
        return True

    def _in_reasoning(self) -> bool:
        if not self._say_until((THINK_END,), ReasoningDelta):
            return False
        self._state, self._is_margin = self._in_content, True
        return True

    def _in_content(self) -> bool:
        marker = self._say_until(self._markers, ContentDelta)
        if not marker:
            return False
        states = {HERMES: self._at_hermes, FUNCTION: self._at_function, MISTRAL: self._at_mistral}
        self._state = states[marker]
        return True

    def _say_until(self, markers: tuple[str, ...], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
        """Emit the text up to the first marker, and cut the marker off; returns the marker, empty if there is none yet."""
        if self._is_margin:
            self._text = self._text.lstrip()
        found = [(begin, marker) for marker in markers if (begin := self._text.find(marker)) >= 0]
        begin, marker = min(found, default=(len(self._text), ""))
        if not marker and not self._is_end:
            begin -= _undecided(self._text, markers)
        said = self._text[:begin]
        if marker or not self._is_end:
            said = said.rstrip()
        if said:
            self._events.append(kind(said))
            self._is_margin = False
        self._marked = self._text[len(said) : begin + len(marker)]
        self._text = self._text[begin + len(marker) if marker else len(said) :]
        return marker

    def _no_call(self) -> bool:
        """What looked like a call is content."""
        if self._marked:
            self._events.append(ContentDelta(self._marked))
            self._marked, self._is_margin = "", False
        self._state = self._in_content
        return True

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _at_hermes(self) -> bool:
        rest = self._text.lstrip()
        if FUNCTION in self._markers and rest.startswith(FUNCTION):
            self._marked += self._text[: len(self._text) - len(rest) + len(FUNCTION)]
            self._text = rest[len(FUNCTION) :]
            self._state = self._at_function
            return True
        if FUNCTION in self._markers and FUNCTION.startswith(rest) and not self._is_end:
            return False
        return self._at_object()

    def _at_object(self) -> bool:
        self._after_call = self._after_hermes
        self._state = self._at_call
        self._scanner = JsonScanner()
        return True

    def _at_mistral(self) -> bool:
        rest = self._text.lstrip()
        if not rest and not self._is_end:
            return False
        if rest[:1] in ("[", "{"):
            self._after_call = self._after_listed if rest[0] == "[" else self._after_single
            if rest[0] == "[":
                self._marked += self._text[: len(self._text) - len(rest) + 1]
                self._text = rest[1:]
            self._state, self._scanner = self._at_call, JsonScanner()
            return True
        if match := _NAMED.match(self._text):
            self._after_call = self._after_single
            return self._start_arguments(match.group(1), match.end(), is_member=False)
        if not self._is_end and _NAMED_START.fullmatch(self._text):
            return False
        return self._no_call()

    def _at_call(self) -> bool:
        """At the object of a call: its arguments can be passed on once the name before them is known."""
        match = _HEAD.match(self._text)
        if match and (name := _json(match.group(1))):
            return self._start_arguments(name, match.end(), is_member=True)
        begin = len(self._text) - len(self._text.lstrip())
        if begin < len(self._text) and self._text[begin] != "{":
            return self._no_call()
        self._scanner.scan(self._text)
        if self._scanner.end is None:
            return self._no_call() if self._is_end or self._scanner.broken is not None else False
        call = _call_of(self._text[: self._scanner.end])
        if call is None:
            return self._no_call()
        self._start(call[0])
        self._argue(call[1])
        self._text = self._text[self._scanner.end :]
        self._state = self._after_call
        return True

    def _at_function(self) -> bool:
        """At the name of a function whose parameters come as tags."""
        match = _TAG_NAME.match(self._text)
        if match is None:
            is_open = not self._is_end and _TAG_NAME_START.fullmatch(self._text)
            return False if is_open else self._no_call()
        self._function, self._num_parameters = match.group(1).strip(), 0
        self._start(self._function)
        self._argue("{")
        self._text = self._text[match.end() :]
        self._state = self._at_parameter
        return True

    def _at_parameter(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(PARAMETER):
            end = rest.find(PARAMETER_END)
            match = _TAG_NAME.match(rest, len(PARAMETER))
            if match and end >= match.end():
                name = match.group(1).strip()
                value = value_json(rest[match.end() : end], self._types.get((self._function, name)))
                self._argue(f"{', ' if self._num_parameters else ''}{json.dumps(name, ensure_ascii=False)}: {value}")
                self._num_parameters += 1
                self._text = rest[end + len(PARAMETER_END) :]
                return True
            if end < 0 and not self._is_end:
                return False
        elif (
            not self._is_end and (PARAMETER.startswith(rest) or FUNCTION_END.startswith(rest)) and rest != FUNCTION_END
        ):
            return False
        if not self._is_end or rest.startswith(FUNCTION_END):
            self._argue("}")
        self._text = rest.removeprefix(FUNCTION_END)
        self._state = self._after_hermes
        return True

    def _argue(self, text: str) -> None:
        self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def _start(self, name: str) -> None:
        self._events.append(ToolCallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        self._marked, self._is_margin = "", True

    def _start_arguments(self, name: str, begin: int, is_member: bool) -> bool:
        """The call's arguments begin at `begin`; `is_member`: inside of the call's object."""
        self._start(name)
        self._text = self._text[begin:]
        self._scanner = JsonScanner()
        self._state = self._in_member if is_member else self._in_arguments
        return True

    def _in_member(self) -> bool:
        return self._pass_on(self._after_member)

    def _in_arguments(self) -> bool:
        return self._pass_on(self._after_call)

    def _pass_on(self, then: Callable[[], bool]) -> bool:
        scanner = self._scanner
        scanner.scan(self._text)
        end = scanner.end if scanner.end is not None else scanner.broken
        said = self._text[:end]
        if said:
            self._argue(said)
        self._text = self._text[len(said) :]
        scanner.drop_scanned()
        if end is None:
            return False
        self._state, self._scanner = then, JsonScanner(depth=1)
        return True

    def _after_member(self) -> bool:
        """The rest of a call's object: its brace, perhaps more members."""
        scanner = self._scanner
        scanner.scan(self._text)
        if scanner.end is None and scanner.broken is None and not self._is_end:
            return False
        end = scanner.end if scanner.end is not None else scanner.broken
        skipped = self._text[:end]
        self._text = self._text[len(skipped) :]
        if scanner.end is None and skipped.strip(" \t\r\n}"):
            self._events.append(ContentDelta(skipped))
        self._state = self._after_call
        return True

    def _after_hermes(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith("{"):  # several calls between one pair of markers
            return self._at_object()
        if not self._is_end and HERMES_END.startswith(rest):
            return False
        self._text = rest.removeprefix(HERMES_END)
        self._state = self._in_content
        return True

    def _after_listed(self) -> bool:
        rest = self._text.lstrip()
        if not rest and not self._is_end:
            return False
        if rest.startswith(","):
            self._text, self._scanner = rest[1:], JsonScanner()
            self._state = self._at_call
            return True
        self._text = rest.removeprefix("]")
        self._state = self._in_content
        return True

    def _after_single(self) -> bool:
        self._state = self._in_content
        return True


def joined(events: list[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one text put together."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, ToolCallStart) or type(last) is not type(event):
            found.append(event)
        elif isinstance(last, ContentDelta | ReasoningDelta | ToolCallArguments):
            found[-1] = replace(last, text=last.text + event.text)
    return found


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call's object; None if it is none."""
    call = _json(text)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, dict):
        return call["name"], json.dumps(arguments, ensure_ascii=False)
    return (call["name"], arguments) if isinstance(arguments, str) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _opens_reasoning(template: str) -> bool:
    """Whether what a template writes before an answer begins its reasoning and does not end it."""
    opening = template.rpartition("add_generation_prompt")[2]
    return opening.rfind(THINK) > opening.rfind(THINK_END)


def _undecided(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that some marker begins with."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
