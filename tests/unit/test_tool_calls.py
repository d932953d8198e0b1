"""Answers as models write them, cut anywhere, to content, reasoning and tool calls."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.tool_calls import (
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    joined,
    new_call_id,
)

QWEN = (
    "{% if tools %}...<tool_call>\n{...}\n</tool_call>{% endif %}...{%- if '</think>' in content %}..."
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
THINKING = QWEN.partition("{%- if enable")[0].replace("assistant\\n", "assistant\\n<think>\\n")
CODER = "{% if tools %}...<tool_call>\n<function=example>\n<parameter=a>\n...{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}...[TOOL_CALLS]..."
FOREIGN = "{% if tools %}{{ tools }}{% endif %}"


def parse(template: str | None, *pieces: str, has_tools: bool = True, prompt: str | None = None) -> list[Event]:
    """The joined events of an answer that comes in these pieces; calls are named c0, c1, ..."""
    numbers = itertools.count()
    parser = OutputParser.for_template(template, has_tools, prompt, new_id=lambda: f"c{next(numbers)}")
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Event]:
    """The events of one call."""
    return [ToolCallStart(index, f"c{index}", name), ToolCallArguments(index, arguments)]


HERMES_CASES: list[tuple[str, list[Event]]] = [
    ("Just text.\n", [ContentDelta("Just text.\n")]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', call(0, "f", '{"a": 1}')),
    ('Wait.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', [ContentDelta("Wait."), *call(0, "f", "{}")]),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": [1, {"c": null}]}}\n</tool_call> done',
        [*call(0, "f", '{"a": "}</tool_call>\\"{"}'), *call(1, "g", '{"b": [1, {"c": null}]}'), ContentDelta("done")],
    ),
    ('<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>', call(0, "f", '{"a": "é"}')),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
    ('<tool_call>{"type": "function", "function": {"name": "f", "parameters": {}}}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"name": "f", "arguments": {}, "id": "7"}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}</tool_call>',
     call(0, "f", "{}") + call(1, "g", "{}")),
    # what a model should not write
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>.', [*call(0, "f", '{"a": 1}'), ContentDelta(".")]),
    ('<tool_call>{"name": "f", "arguments": {"a": tru', call(0, "f", '{"a": tru')),
    ('<tool_call>{"name": "f", "arguments": {"a": <b', [*call(0, "f", '{"a": '), ContentDelta("<b")]),
    ('<tool_call>{"name": "f", "argu', [ContentDelta('<tool_call>{"name": "f", "argu')]),
    (" x <tool_call> no call </tool_call> y", [ContentDelta(" x <tool_call> no call </tool_call> y")]),
    ('a <tool_call>{"nom": 1}</tool_call>', [ContentDelta('a <tool_call>{"nom": 1}</tool_call>')]),
    ('<tool_call>{"name": "f" oops}</tool_call> b', [ContentDelta('<tool_call>{"name": "f" oops}</tool_call> b')]),
    ('<tool_call>{"name": "a\\q", "arguments": {}}!', [ContentDelta('<tool_call>{"name": "a\\q", "arguments": {}}!')]),
    ("an end <tool_c", [ContentDelta("an end <tool_c")]),
    ("<tool_call>", [ContentDelta("<tool_call>")]),
]  # fmt: skip

MISTRAL_CASES: list[tuple[str, list[Event]]] = [
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', call(0, "f", '{"a": 1}')),
    (
        'Look: [TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}, {"arguments": {"b": 2}, "name": "g"}]',
        [ContentDelta("Look:"), *call(0, "f", "{}"), *call(1, "g", '{"b": 2}')],
    ),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")]),
    ('[TOOL_CALLS]get.it-now{"a": "[TOOL_CALLS]"}', call(0, "get.it-now", '{"a": "[TOOL_CALLS]"}')),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}} more', [*call(0, "f", "{}"), ContentDelta("more")]),
    # what a model should not write
    ("[TOOL_CALLS] Sure, I can.", [ContentDelta("[TOOL_CALLS] Sure, I can.")]),
    ("[TOOL_CALLS] [1, 2]", [ContentDelta("[TOOL_CALLS] [1, 2]")]),
    ("[TOOL_CALLS]f", [ContentDelta("[TOOL_CALLS]f")]),
    ("[TOOL_CALLS]", [ContentDelta("[TOOL_CALLS]")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, 7] x', [*call(0, "f", "{}"), ContentDelta("7] x")]),
]

CODER_CASES: list[tuple[str, list[Event]]] = [
    (
        "I look.\n<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [ContentDelta("I look."), *call(0, "f", '{"city": "Paris", "n": 3}'), *call(1, "g", "{}")],
    ),
    ("<function=f><parameter=a>[1, 2]</parameter></function> ok", [*call(0, "f", '{"a": [1, 2]}'), ContentDelta("ok")]),
    ("<tool_call>\n<function=f>\n<parameter=code>\n  if a < b:\n    <b>\n\n</parameter></function></tool_call>",
     call(0, "f", '{"code": "  if a < b:\\n    <b>\\n"}')),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', call(0, "f", "{}")),
    # what a model should not write
    ("<tool_call><function=f><parameter=a>1</parameter>oops", [*call(0, "f", '{"a": 1}'), ContentDelta("oops")]),
    ("<tool_call><function=f><parameter=a>cut", [*call(0, "f", "{"), ContentDelta("<parameter=a>cut")]),
    ("<function=f", [ContentDelta("<function=f")]),
    ("a <function=\n>", [ContentDelta("a <function=\n>")]),
    ("<tool_call> <func", [ContentDelta("<tool_call> <func")]),
]  # fmt: skip

THINK_CASES: list[tuple[str, list[Event]]] = [
    ("<think>\nHm, <tool_call>.\n</think>\n\nYes.", [ReasoningDelta("Hm, <tool_call>."), ContentDelta("Yes.")]),
    ('\n<think></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', call(0, "f", "{}")),
    ("<think>\nnever ends \n", [ReasoningDelta("never ends \n")]),
    ("Use <think> here.</think>", [ContentDelta("Use <think> here.</think>")]),
    ("<thin ice", [ContentDelta("<thin ice")]),
    ("<think", [ContentDelta("<think")]),
]


@pytest.mark.parametrize(("text", "events"), HERMES_CASES + THINK_CASES)
def test_hermes(text: str, events: list[Event]) -> None:
    """The dialect of Qwen3, with and without defects, and its reasoning."""
    assert parse(QWEN, text) == events


@pytest.mark.parametrize(("text", "events"), MISTRAL_CASES)
def test_mistral(text: str, events: list[Event]) -> None:
    """Both dialects of Mistral, with and without defects."""
    assert parse(MISTRAL, text) == events


@pytest.mark.parametrize(("text", "events"), CODER_CASES)
def test_coder(text: str, events: list[Event]) -> None:
    """The dialect of Qwen3-Coder, with and without defects."""
    assert parse(CODER, text) == events


def test_types_of_arguments_between_tags() -> None:
    """A tool's schema decides what is a string; without it, what is JSON is taken as that."""
    properties = {"zip": {"type": "string"}, "flag": {"type": "boolean"}, "list": {"type": "array"}, "any": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}, {"type": "x"}]
    text = "<function=f>" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("zip", "8001"), ("flag", "True"), ("list", "[1]"), ("any", "None"), ("other", "null"))
    )
    events = joined(OutputParser.for_template(CODER, has_tools=True, tools=tools).push(text + "</function>"))
    assert isinstance(events[1], ToolCallArguments)
    assert json.loads(events[1].text) == {"zip": "8001", "flag": True, "list": [1], "any": "None", "other": None}


@pytest.mark.parametrize(
    ("template", "cases"),
    [(QWEN, HERMES_CASES + THINK_CASES), (MISTRAL, MISTRAL_CASES), (CODER, CODER_CASES), (CODER, HERMES_CASES)],
)
def test_pieces_do_not_matter(template: str, cases: list[tuple[str, list[Event]]]) -> None:
    """Letter by letter, and cut once at each place, an answer gives the same events."""
    for text, events in cases:
        assert parse(template, *text) == events
        for cut in range(len(text)):
            assert parse(template, text[:cut], text[cut:]) == events, (text[:cut], text[cut:])


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f", "arguments": ',
     '{"a": "b"}', "<function=", "f>", "<parameter=", "</parameter>", "</function>",
     "{", "}", "[", "]", '"', "\\", ",", " ", "\n", "f", "text", "<", "é"]
)  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=14), st.sampled_from([QWEN, THINKING, MISTRAL, CODER, FOREIGN]), st.data())
def test_any_text_cut_anywhere(fragments: list[str], template: str, data: st.DataObject) -> None:
    """Whatever is written, the pieces do not matter, and nothing but white space and the frame of calls is lost."""
    text = "".join(fragments)
    whole = parse(template, text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(template, *pieces) == whole
    said = "".join(event.text for event in whole if isinstance(event, ContentDelta | ReasoningDelta))
    if not any(isinstance(event, ToolCallStart) for event in whole):
        lost = [text.split(), said.split()]
        for part in ("<think>", "</think>"):
            lost = [" ".join(words).replace(part, " ").split() for words in lost]
        assert "".join(lost[0]) == "".join(lost[1])


def test_arguments_are_streamed() -> None:
    """The name is told as soon as it is known, and each piece of the arguments as it comes."""
    parser = OutputParser.for_template(QWEN, has_tools=True)
    assert parser.push('<tool_call>{"name": "f", "arguments"') == []
    (start, first) = parser.push(': {"city": "Par')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name) == (0, "f")
    assert first == ToolCallArguments(0, '{"city": "Par')
    assert parser.push('is"') == [ToolCallArguments(0, 'is"')]
    assert parser.push("}}") == [ToolCallArguments(0, "}")]
    assert parser.push("</tool_call>") == parser.finish() == []


def test_text_is_streamed() -> None:
    """Nothing is held back but what may become a marker, and white space that may stand before one."""
    parser = OutputParser.for_template(QWEN, has_tools=True)
    assert parser.push("Hello ") == [ContentDelta("Hello")]
    assert parser.push("you <tool") == [ContentDelta(" you")]
    assert parser.push("box>") == [ContentDelta(" <toolbox>")]


def test_without_tools_there_are_no_calls() -> None:
    """A marker in an answer to a request without tools is text; reasoning is kept apart all the same."""
    text = '<think>\nA\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = parse(QWEN, text, has_tools=False)
    assert events == [ReasoningDelta("A"), ContentDelta(text.partition("\n\n")[2])]
    assert parse(None, "a </think> [TOOL_CALLS]", has_tools=False) == [ContentDelta("a </think> [TOOL_CALLS]")]


def test_reasoning_that_begins_in_the_prompt() -> None:
    """A template that opens the reasoning itself, as its text or the rendered prompt says."""
    wanted = [ReasoningDelta("Hm."), ContentDelta("Yes.")]
    assert parse(THINKING, "Hm.\n</think>\n\nYes.") == wanted
    assert parse(QWEN, "Hm.\n</think>\n\nYes.", prompt="<|im_start|>assistant\n<think>\n") == wanted
    assert parse(QWEN, "It begins.", prompt="What does <think> do?<|im_end|>\n<|im_start|>assistant\n") == [
        ContentDelta("It begins.")
    ]
    assert parse(THINKING, "Yes.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n") == [ContentDelta("Yes.")]


def test_a_template_of_neither_dialect_takes_both() -> None:
    """A template that takes tools and shows no marker is read in both dialects."""
    for text, events in (HERMES_CASES[1], MISTRAL_CASES[0]):
        assert parse(FOREIGN, text) == events


def test_ids_are_random() -> None:
    """Ids have OpenAI's form and differ."""
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(found) == 29 and found.startswith("call_") and found[5:].isalnum() for found in ids)


def test_a_long_call_takes_little_time() -> None:
    """A call of 200,000 letters, one at a time, is no quadratic effort (the test's deadline would show it)."""
    text = json.dumps({"arguments": {"a": "b" * 200_000}, "name": "f"})
    events = parse(QWEN, "<tool_call>", *text, "</tool_call>")
    assert len(events) == 2
