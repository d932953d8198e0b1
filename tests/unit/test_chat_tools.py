"""Tools in conversations: what templates make of them, and that answers in a template's own words are read back."""

from pathlib import Path
from typing import Any

import pytest
from chat_templates import MISTRAL, QWEN3
from tokenizer_cases import byte_level, write_tokenizer
from tokenizers import AddedToken

from colibri_mp.errors import RequestError
from colibri_mp.messages import Conversation
from colibri_mp.server.prompts import ChatPrompt
from colibri_mp.tokenizer import Tokenizer
from colibri_mp.tool_calls import ContentDelta, OutputParser, ReasoningDelta, ToolCallArguments, ToolCallStart, joined

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
ARGUMENTS = {"city": "Zürich", "days": [1, 2]}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
]
WRITTEN = '{"city": "Zürich", "days": [1, 2]}'


def tokenizer_of(folder: Path, template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer with a chat template, and more special tokens."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": template}
    tokenizer = Tokenizer.load(write_tokenizer(folder, backend, **config))
    assert tokenizer is not None
    return tokenizer


def test_conversation_with_tools_as_qwen_writes_it(tmp_path: Path) -> None:
    """Tools, calls and their results come where the template puts them."""
    text = tokenizer_of(tmp_path, QWEN3).apply_chat_template(CHAT, tools=TOOLS)
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in text
    assert text.count('<tool_call>\n{"name": "weather", "arguments": ' + WRITTEN + "}\n</tool_call>") == 2
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_options_of_a_template(tmp_path: Path) -> None:
    """An option reaches the template; one that it has no use for is refused by name, and so are tools."""
    tokenizer = tokenizer_of(tmp_path, QWEN3)
    assert tokenizer.apply_chat_template(CHAT[:1], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.apply_chat_template(CHAT[:1], enable_thinking=True).endswith("assistant\n")
    with pytest.raises(RequestError, match="no use for 'thinking_budget'"):
        tokenizer.apply_chat_template(CHAT[:1], thinking_budget=3)
    with pytest.raises(RequestError, match="no use for 'tools'"):
        tokenizer_of(tmp_path, "{{ messages[0].content }}").apply_chat_template(CHAT[:1], tools=TOOLS)


def test_template_that_refuses_a_call(tmp_path: Path) -> None:
    """What a template raises is the request's error."""
    tokenizer = tokenizer_of(tmp_path, MISTRAL)
    bad = {**CALL, "id": "short"}
    with pytest.raises(RequestError, match="with length 9"):
        tokenizer.apply_chat_template([CHAT[0], {"role": "assistant", "tool_calls": [bad]}], tools=TOOLS)


@pytest.mark.parametrize(("template", "opening"), [(QWEN3, "<|im_start|>assistant\n"), (MISTRAL, "[/INST]")])
def test_calls_are_read_back(tmp_path: Path, template: str, opening: str) -> None:
    """What a template writes of an assistant's calls is parsed to the same calls."""
    tokenizer = tokenizer_of(tmp_path, template)
    whole = tokenizer.apply_chat_template(CHAT[:2], tools=TOOLS, add_generation_prompt=False)
    answer = whole.rpartition(opening)[2].removesuffix("\n").removesuffix("<|im_end|>")
    parser = OutputParser.for_template(tokenizer.chat_template(with_tools=True), has_tools=True, new_id=lambda: "c")
    assert joined([*parser.push(answer), *parser.finish()]) == [
        ToolCallStart(0, "c", "weather"),
        ToolCallArguments(0, WRITTEN),
        ToolCallStart(1, "c", "weather"),
        ToolCallArguments(1, WRITTEN),
    ]


def test_reasoning_is_read_back(tmp_path: Path) -> None:
    """Reasoning and answer of a template's own writing come apart again."""
    tokenizer = tokenizer_of(tmp_path, QWEN3)
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}
    whole = tokenizer.apply_chat_template([CHAT[0], turn], add_generation_prompt=False)
    parser = OutputParser.for_template(QWEN3, has_tools=False)
    events = parser.push(whole.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n"))
    assert joined([*events, *parser.finish()]) == [ReasoningDelta("Let me see."), ContentDelta("Yes.")]


def test_the_server_tells_the_parser_its_tools(tmp_path: Path) -> None:
    """A tool's schema reaches the parser of an answer: what it calls a string stays one."""
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><function=f></function></tool_call>"
    properties = {"zip": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    prompt = ChatPrompt(Conversation(CHAT[:1], tools=tools), tokenizer_of(tmp_path, template), "", [])
    events = joined(prompt.parser().push("<tool_call><function=f><parameter=zip>8001</parameter></function>"))
    assert events[1] == ToolCallArguments(0, '{"zip": "8001"}')


def test_markers_that_are_special_tokens_are_decoded(tmp_path: Path) -> None:
    """The markers of calls stay in the text, whole and streamed; other special tokens do not."""
    tokenizer = tokenizer_of(tmp_path, MISTRAL, special=("[TOOL_CALLS]", "[ARGS]", "[INST]"))
    ids = tokenizer.encode('[TOOL_CALLS]f[ARGS]{"a": 1}[INST]<|im_end|>', add_special_tokens=False)
    assert tokenizer.token_id("[TOOL_CALLS]") == ids[0]
    assert tokenizer.decode(ids) == '[TOOL_CALLS]f[ARGS]{"a": 1}'
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.finish() == '[TOOL_CALLS]f[ARGS]{"a": 1}'
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("[INST]<|im_end|>")
