"""Tools and answers of a given form, by unmodified clients: the built-in weights with a chat template that knows tools."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from chat_templates import QWEN3
from live_server import LiveServer, chat, serving

from colibri_mp.checkpoint.hub import resolve

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": PARAMETERS}}
OTHER: Any = {"type": "function", "function": {"name": "time"}}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
CALL_BY_ITSELF = (
    r'Well\.\n<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Rome|Oslo)", "days": [1-9]\}\}\n</tool_call>'
)
SCHEMA: Any = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}, "kind": {"enum": ["noun", "verb"]}},
    "required": ["word", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tool_server(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a model whose template has tools and reasoning."""
    folder = tmp_path_factory.mktemp("models") / "toolmodel"
    shutil.copytree(resolve("demo"), folder)
    (folder / "chat_template.jinja").write_text(QWEN3)
    with serving("--model", str(folder)) as running:
        yield running


@pytest.fixture
def client(tool_server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(tool_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """A small chat."""
    return client.chat.completions.create(
        model="toolmodel", messages=QUESTION, max_tokens=400, temperature=0, **options
    )


def is_weather(arguments: dict[str, Any]) -> bool:
    """Whether the arguments keep to the schema."""
    return (
        arguments.keys() == {"city", "days"} and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    """`tool_choice` required or named: the answer is a call whose arguments keep to the schema."""
    done = ask(client, tools=[TOOL], tool_choice=choice).choices[0]
    assert done.finish_reason == "tool_calls"
    assert done.message.content is None
    (call,) = done.message.tool_calls
    assert call.function.name == "weather"
    assert is_weather(json.loads(call.function.arguments))


def test_a_call_among_words_streamed(client: openai.OpenAI) -> None:
    """What a model writes by itself is taken apart: words as content, the call in pieces, with one id; the whole answer agrees."""
    options = {"tools": [TOOL, OTHER], "extra_body": {"guided_regex": CALL_BY_ITSELF}}
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Well."
    assert [call.function.name for call in calls if call.id] == ["weather"]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert is_weather(json.loads(arguments))
    assert chunks[-1].finish_reason == "tool_calls"
    whole = ask(client, **options).choices[0].message
    assert (whole.content, whole.tool_calls[0].function.arguments) == ("Well.", arguments)


def test_results_of_tools_are_part_of_the_prompt(client: openai.OpenAI) -> None:
    """A conversation with a call and its result goes on; arguments that are no JSON are refused by path."""
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'},
    }
    turns: Any = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "Sunny"})
    done = client.chat.completions.create(model="toolmodel", messages=turns, tools=[TOOL], max_tokens=4)
    assert done.usage is not None
    assert done.usage.prompt_tokens > ask(client, tools=[TOOL]).usage.prompt_tokens
    call["function"]["arguments"] = "Rome"
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        client.chat.completions.create(model="toolmodel", messages=turns, tools=[TOOL])


def test_calls_that_cannot_be_forced(client: openai.OpenAI) -> None:
    """Each contradiction is a 400 that names the field."""
    with pytest.raises(openai.BadRequestError, match="tool_choice: no tool dance is given"):
        ask(client, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "dance"}})
    with pytest.raises(openai.BadRequestError, match="tool_choice: no tool at all is given"):
        ask(client, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="tool_choice: the answer cannot have another form"):
        ask(client, tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert ask(client, tools=[TOOL], tool_choice="none").choices[0].message.tool_calls is None


def test_json_schema(client: openai.OpenAI) -> None:
    """The answer keeps to the schema, whole and streamed; free JSON is JSON."""
    wanted = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA, "strict": True}}
    text = ask(client, response_format=wanted).choices[0].message.content
    entry = json.loads(text)
    assert entry.keys() == {"word", "kind"}
    assert entry["kind"] in ("noun", "verb")
    streamed = ask(client, response_format=wanted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    free = ask(client, response_format={"type": "json_object"}, seed=1).choices[0]
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict)


def test_parsed_into_a_class(client: openai.OpenAI) -> None:
    """The client's own helper for classes works: it sends a strict schema and reads the answer back."""
    from pydantic import BaseModel

    class Entry(BaseModel):
        is_noun: bool
        kind: Literal["good", "bad"]

    done = client.chat.completions.parse(
        model="toolmodel", messages=QUESTION, max_tokens=400, temperature=0, response_format=Entry,
        seed=3,
    )  # fmt: skip
    choice = done.choices[0]
    assert isinstance(choice.message.parsed, Entry)


def test_regex_and_grammar(client: openai.OpenAI) -> None:
    """The extension fields constrain the answer; wrong ones are refused with what is wrong."""
    pattern = r"[0-9]{4}-[0-9]{2}"
    found = ask(client, extra_body={"guided_regex": pattern}).choices[0].message.content
    assert re.fullmatch(pattern, found)
    found = ask(client, extra_body={"guided_grammar": 'start: "yes" | "no"'}).choices[0].message.content
    assert found in ("yes", "no")
    for field, text in (("guided_regex", "("), ("guided_grammar", "start: nothing"), ("guided_regex", "x" * 70_000)):
        with pytest.raises(openai.BadRequestError):
            ask(client, extra_body={field: text})


def test_reasoning_is_kept_apart(client: openai.OpenAI) -> None:
    """What stands between the template's marks is reasoning_content, and no content."""
    body = {"guided_regex": r"<think>\nLet me [a-z]{3}\.\n</think>\n\nIt is sunny\."}
    message = ask(client, extra_body=body).choices[0].message
    assert message.content == "It is sunny."
    assert re.fullmatch(r"Let me [a-z]{3}\.", message.reasoning_content)
    pieces = [chunk.choices[0].delta for chunk in ask(client, extra_body=body, stream=True)]
    assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == message.reasoning_content
    assert "".join(piece.content or "" for piece in pieces) == message.content
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, extra_body=off).usage.prompt_tokens > ask(client).usage.prompt_tokens


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    """A forced call is a tool_use block, whole and streamed; its result goes on as a tool_result."""
    tools: Any = [{"name": "weather", "description": "Tells it", "input_schema": PARAMETERS}]
    ask: Any = {
        "model": "toolmodel",
        "max_tokens": 150,
        "messages": QUESTION,
        "tools": tools,
        "extra_body": {"temperature": 0},
    }
    done = claude.messages.create(**ask, tool_choice={"type": "tool", "name": "weather"})
    (block,) = done.content
    assert (done.stop_reason, block.type) == ("tool_use", "tool_use")
    assert is_weather(block.input)
    with claude.messages.stream(**ask, tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == block.input
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [block.to_dict()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny"}]},
    ]
    after = claude.messages.create(**{**ask, "messages": turns, "max_tokens": 4})
    before = claude.messages.count_tokens(model="toolmodel", messages=QUESTION, tools=tools)
    assert (
        claude.messages.count_tokens(model="toolmodel", messages=turns, tools=tools).input_tokens > before.input_tokens
    )
    assert after.usage.output_tokens <= 4


def test_anthropic_output_format(claude: anthropic.Anthropic) -> None:
    """`output_config.format` keeps the answer to a schema."""
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    done = claude.messages.create(
        model="toolmodel", max_tokens=400, messages=QUESTION, output_config=form, extra_body={"temperature": 0}
    )
    assert json.loads(done.content[0].text)["kind"] in ("noun", "verb")  # type: ignore[union-attr]


ENDLESS: list[Any] = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    {"allOf": [{"anyOf": [{"const": i} for i in range(50)]} for _ in range(50)]},
    {"type": "nonsense"},
    {"$ref": "https://example.com/schema.json"},
    {"x": "y" * 1_000_000},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=[str(idx) for idx in range(len(ENDLESS))])
def test_schemas_that_never_end(tool_server: LiveServer, schema: Any) -> None:
    """Huge, recursive and nonsensical schemas end in an answer or a named 400, soon; the server goes on."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with tool_server.client() as client:
        response = client.post("/v1/chat/completions", json=chat(response_format=form))
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["message"]
        assert response.elapsed.total_seconds() < 20
        assert client.get("/health").status_code == 200


def test_deep_schema(tool_server: LiveServer) -> None:
    """A schema nested thousands of times is refused."""
    body = json.dumps(chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}))
    deep = '{"items": ' * 5000 + "{}" + "}" * 5000
    body = body.replace('"schema": {}', f'"schema": {deep}')
    with tool_server.client() as client:
        response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert isinstance(response, httpx.Response)
        assert client.get("/health").status_code == 200
