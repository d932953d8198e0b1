"""Text to ids and back, streaming, begin and end tokens, sampling defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import copy_of, edit_json, fixture
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import BACKENDS, TEXTS, byte_fallback, byte_level, write_tokenizer

from colibri_mp.checkpoint import Checkpoint
from colibri_mp.errors import CheckpointError
from colibri_mp.tokenizer import Tokenizer, eos_token_ids, sampling_defaults

TOKENIZERS = {name: Tokenizer(make(), {}, {}) for name, make in BACKENDS.items()}


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that has one."""
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def test_round_trip() -> None:
    """Ids of a text decode to the text, in every script."""
    for tokenizer in TOKENIZERS.values():
        for text in TEXTS[:4]:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_tokenizer(tmp_path: Path) -> None:
    """A checkpoint without tokenizer.json has none, which is no error."""
    assert Tokenizer.load(fixture("olmoe")) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)


def test_padding_and_truncation_are_off(tmp_path: Path) -> None:
    """What a training run has left in tokenizer.json must not cut prompts."""
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load(write_tokenizer(tmp_path, backend))
    assert tokenizer.encode("hello world") == TOKENIZERS["byte level"].encode("hello world")


def test_begin_token(tmp_path: Path) -> None:
    """It comes from the post-processor, or from add_bos_token where that does not add it; never twice."""
    processed = load(write_tokenizer(tmp_path / "a", byte_fallback(), add_bos_token=True, bos_token="<s>"))
    assert processed.encode("hello")[:2] == [1, 4]
    assert processed.encode("hello", add_special_tokens=False)[0] == 4
    bos = {"content": "<|endoftext|>", "lstrip": False}
    plain = load(write_tokenizer(tmp_path / "b", byte_level(), add_bos_token=True, bos_token=bos))
    assert plain.encode("hello") == [0, *plain.encode("hello", add_special_tokens=False)]
    unasked = load(write_tokenizer(tmp_path / "c", byte_level(), bos_token=bos))
    assert unasked.encode("hello") == unasked.encode("hello", add_special_tokens=False)


def test_special_tokens_are_not_text() -> None:
    """They are left out of decoded text unless asked for."""
    tokenizer = TOKENIZERS["byte level"]
    ids = [1, *tokenizer.encode("hello"), 2]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=20), data=st.data())
def test_streamed_text_is_the_text(name: str, text: str, data: st.DataObject) -> None:
    """Pieces add up to the text, and no piece holds half a character, whatever the script."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    position = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:position], 2, *ids[position:]]  # an end token within
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + stream.finish() == whole.rstrip("\ufffd")
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_streaming_any_ids(name: str, ids: list[int]) -> None:
    """Invalid bytes and ids outside the vocabulary do not stop the stream, and valid text before them is kept."""
    tokenizer = TOKENIZERS[name]
    stream = tokenizer.stream()
    text = "".join(map(stream.push, ids)) + stream.finish()
    whole = tokenizer.decode(ids)
    if name == "byte level" or "\ufffd" not in whole:  # one invalid byte turns all byte pieces around it invalid
        assert text == whole.rstrip("\ufffd")
    assert text.startswith(whole.split("\ufffd")[0])


def test_unfinished_character_at_the_end() -> None:
    """Generation may stop within a character: it is dropped, what was complete is kept."""
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.encode("hello 🦜", add_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids[:-1])) == "hello "
    assert (stream.finish(), stream.finish()) == ("", "")


def test_stream_after_a_prompt_keeps_the_space() -> None:
    """Pieces with a space mark lose it at the start of a text, but not after a prompt."""
    tokenizer = TOKENIZERS["byte fallback"]
    prompt, world = tokenizer.encode("hello"), tokenizer.token_id("▁world")
    assert world is not None
    assert tokenizer.stream().push(world) == "world"
    assert tokenizer.stream(after=prompt).push(world) == " world"


def checkpoint_with(tmp_path: Path, generation: dict[str, Any] | None = None, **config: Any) -> Checkpoint:
    """A checkpoint with a tokenizer, and these things said in its generation_config.json and config.json."""
    folder = copy_of("qwen3_moe_q4", tmp_path)
    edit_json(folder / "config.json", lambda stated: stated.update(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8}),
        ({"eos_token_id": 7}, {}, {7}),
        ({"temperature": 1}, {"eos_token_id": [9]}, {9}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {}, {2}),
    ],
)
def test_end_tokens(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    """generation_config.json, else config.json, else the tokenizer's eos_token."""
    assert eos_token_ids(checkpoint_with(tmp_path, generation, **config)) == expected


def test_end_tokens_of_nothing_and_of_nonsense(tmp_path: Path) -> None:
    """No tokenizer and nothing stated: no end token. A text for an id is an error."""
    assert eos_token_ids(Checkpoint.open(fixture("olmoe"))) == frozenset()
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id = 'x' must be a token id"):
        eos_token_ids(checkpoint_with(tmp_path, {"eos_token_id": "x"}))


def test_sampling_defaults(tmp_path: Path) -> None:
    """What generation_config.json gives numbers for, and whether it samples at all."""
    stated = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "max_length": 9}
    found = sampling_defaults(checkpoint_with(tmp_path / "a", stated))
    assert found == {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(Checkpoint.open(fixture("olmoe"))) == {"do_sample": False}
    with pytest.raises(CheckpointError, match=r"top_p = '0.9' must be a number"):
        sampling_defaults(checkpoint_with(tmp_path / "b", {"top_p": "0.9"}))
