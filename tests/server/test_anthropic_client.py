"""The `anthropic` client, unmodified, against a live server."""

from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import MessageParam
from live_server import LiveServer

QUESTION: list[MessageParam] = [{"role": "user", "content": "Define: river"}]

GREEDY = {"temperature": 0}  # newer versions of the client have no word for it


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    """A client that does not try again by itself."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    """The words of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def test_message(client: anthropic.Anthropic) -> None:
    """A message has blocks, a reason and counts."""
    done = client.messages.create(model="demo", max_tokens=16, messages=QUESTION, extra_body=GREEDY)
    assert text_of(done).startswith("(noun)")
    assert (done.type, done.role, done.model, done.stop_reason) == ("message", "assistant", "demo", "max_tokens")
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) == 12
    assert done.usage.output_tokens == 16


def test_streamed_message_is_the_same(client: anthropic.Anthropic) -> None:
    """The client's helper puts the events together to what the whole answer says."""
    whole = client.messages.create(model="demo", max_tokens=16, messages=QUESTION, extra_body=GREEDY)
    with client.messages.stream(model="demo", max_tokens=16, messages=QUESTION, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 5
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 16


def test_events_of_a_stream(client: anthropic.Anthropic) -> None:
    """Events come in the order that the interface documents."""
    events = client.messages.create(model="demo", max_tokens=3, messages=QUESTION, extra_body=GREEDY, stream=True)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_system_blocks_and_stop_sequences(client: anthropic.Anthropic) -> None:
    """A system text counts, blocks are joined, and the stop sequence that ended the answer is named."""
    blocks: list[MessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "Define: "}, {"type": "text", "text": "river"}]}
    ]
    plain = client.messages.create(model="demo", max_tokens=16, messages=QUESTION, extra_body=GREEDY)
    joined = client.messages.create(model="demo", max_tokens=16, messages=blocks, extra_body=GREEDY)
    assert text_of(joined) == text_of(plain)
    stop = text_of(plain)[8:12]
    stopped = client.messages.create(
        model="demo", max_tokens=16, messages=QUESTION, extra_body=GREEDY, stop_sequences=["\n\n\n", stop]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text_of(plain)[: text_of(plain).index(stop)]
    told = client.messages.count_tokens(model="demo", messages=QUESTION, system="Be brief.")
    assert told.input_tokens > client.messages.count_tokens(model="demo", messages=QUESTION).input_tokens == 12


def test_models(client: anthropic.Anthropic) -> None:
    """The list of models is readable for this client too."""
    assert [model.id for model in client.models.list()] == ["demo"]


def test_errors_name_the_field(client: anthropic.Anthropic) -> None:
    """Refusals come in the form that the client's classes know."""
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", max_tokens=3, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        client.messages.create(model="demo", max_tokens=3, messages=QUESTION, extra_body={"temperature": 1.5})
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "temperature: expected `float` <= 1.0"},
    }
    begun: list[MessageParam] = [*QUESTION, {"role": "assistant", "content": "(noun)"}]
    with pytest.raises(anthropic.BadRequestError, match="continuing an answer"):
        client.messages.create(model="demo", max_tokens=3, messages=begun)
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        client.messages.create(model="demo", max_tokens=3, messages=QUESTION, extra_body={"mcp_servers": []})
