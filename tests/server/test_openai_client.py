"""The `openai` client, unmodified, against a live server."""

from collections.abc import Iterator

import openai
import pytest
from live_server import LiveServer

from colibri_mp import Cluster
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "Define: river"}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """A client that does not try again by itself."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What the engine itself says, without a server."""
    with Cluster.launch("demo", num_workers=1, num_threads=1, ctx=512) as cluster:
        return {
            "chat": cluster.generate(QUESTION, max_tokens=16, temperature=0.0).text,
            "text": cluster.generate("Once upon a time", max_tokens=8, temperature=0.0).text,
            "seeded": cluster.generate(QUESTION, max_tokens=8, temperature=1.0, seed=11).text,
        }


def test_chat(client: openai.OpenAI, expected: dict[str, str]) -> None:
    """A chat gives the engine's own text, with counts and a reason."""
    done = client.chat.completions.create(model="demo", messages=QUESTION, max_completion_tokens=16, temperature=0)
    assert done.choices[0].message.content == expected["chat"]
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (12, 16, 28)


def test_streamed_chat_is_the_same_text(client: openai.OpenAI, expected: dict[str, str]) -> None:
    """The pieces of a stream add up to the whole answer; usage comes last, on request."""
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected["chat"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    assert len(chunks) > 10


def test_seed_and_choices(client: openai.OpenAI, expected: dict[str, str]) -> None:
    """The same seed gives the same text; further choices have seeds that count up, so they differ."""
    options = {"model": "demo", "messages": QUESTION, "max_tokens": 8, "temperature": 1, "seed": 11, "n": 3}
    first, again = (client.chat.completions.create(**options) for _ in range(2))  # type: ignore[call-overload]
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] == expected["seeded"]
    assert len(set(texts)) > 1
    assert first.usage.prompt_tokens == 12
    assert first.usage.completion_tokens == sum(8 for _ in texts)


def test_logprobs(client: openai.OpenAI) -> None:
    """Each token comes with its logprob and the likeliest ones; under temperature 0 it is the likeliest."""
    done = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert "".join(entry.token for entry in logprobs.content) == done.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes or ()).decode() == entry.token


def test_stop_texts(client: openai.OpenAI, expected: dict[str, str]) -> None:
    """The answer ends before a stop text, whole and streamed."""
    stop = expected["chat"][12:16]
    wanted = expected["chat"][: expected["chat"].index(stop)]
    done = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=16, temperature=0, stop=[stop])
    assert done.choices[0].message.content == wanted
    assert done.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=16, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted


def test_logit_bias_forbids_a_token(client: openai.OpenAI) -> None:
    """A token with a bias of -100 does not come."""
    options = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    plain = client.completions.create(**options)  # type: ignore[call-overload]
    chosen = Tokenizer.load(resolve("demo")).encode(plain.choices[0].text)[0]  # type: ignore[union-attr]
    biased = client.completions.create(**options, logit_bias={str(chosen): -100})  # type: ignore[call-overload]
    assert biased.choices[0].text != plain.choices[0].text


def test_completions_echo_batch_and_ids(client: openai.OpenAI, expected: dict[str, str]) -> None:
    """A batch of prompts, n of each, echoed, in order; token ids are the same prompt as their text."""
    done = client.completions.create(
        model="demo", prompt=["Once upon a time", "def f("], n=2, max_tokens=8, temperature=0, echo=True
    )
    texts = [choice.text for choice in done.choices]
    assert texts[0] == texts[1] == "Once upon a time" + expected["text"]
    assert texts[2] == texts[3]
    assert texts[2].startswith("def f(")
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    one = client.completions.create(model="demo", prompt="def f(", max_tokens=0, echo=True, logprobs=0)
    assert one.choices[0].text == "def f("


def test_completion_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    """echo with logprobs scores the prompt too: its first token has none, and the offsets walk through the text."""
    done = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=3, temperature=0, echo=True, logprobs=2
    ).choices[0]
    assert done.logprobs is not None
    tokens, values = done.logprobs.tokens or [], done.logprobs.token_logprobs or []
    assert "".join(tokens) == done.text
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    for token, offset in zip(tokens, done.logprobs.text_offset or [], strict=True):
        assert done.text[offset:].startswith(token)


def test_streamed_completion(client: openai.OpenAI, expected: dict[str, str]) -> None:
    """The pieces of a streamed completion add up."""
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected["text"]


def test_models(client: openai.OpenAI) -> None:
    """The model is listed, and can be asked for; another one is not there."""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "colibri-mp"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    """What is not supported is a 400 that names it, in the form that the client's classes know."""
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' is not served here"):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="suffix") as caught:
        client.completions.create(model="demo", prompt="x", suffix="y")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="demo", input="x")
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type.*image_url"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [picture]}])  # type: ignore[list-item,misc]
    with pytest.raises(openai.BadRequestError, match="the context holds 2048"):
        client.completions.create(model="demo", prompt=[5] * 2049)
