"""Messages and their frames: inverse of each other, and every damaged form is a `ProtocolError`."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.errors import ProtocolError
from colibri_mp.messages import (
    MAGIC,
    VERSION,
    Conversation,
    Failed,
    Generate,
    Message,
    Resize,
    Resized,
    Route,
    Routed,
    Sampling,
    Scores,
    StepCounters,
    from_frames,
    to_frames,
)

CONVERSATION = Conversation(
    [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [{"id": "1", "arguments": {"a": 1.5}}]}],
    tools=[{"type": "function"}],
    template_options={"enable_thinking": False},
)


def received(message: Message) -> list[bytes]:
    """The frames as a peer gets them."""
    return [bytes(frame) for frame in to_frames(message)]


def a_route(num_tokens: int = 3) -> Route:
    """A small step."""
    x = np.arange(num_tokens * 8, dtype=np.float32).reshape(num_tokens, 8)
    ids = np.arange(num_tokens * 2, dtype=np.int32).reshape(num_tokens, 2)
    return Route(5, 2, x, ids, ids.astype(np.float32))


def test_arrays_travel_unchanged() -> None:
    """A route comes back with the same arrays, bit for bit, dtypes and shapes included."""
    sent = a_route()
    got = from_frames(received(sent))
    assert isinstance(got, Route)
    assert (got.step, got.layer) == (5, 2)
    for name in ("x", "ids", "weights"):
        before, after = getattr(sent, name), getattr(got, name)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before)


def test_arrays_of_the_general_form() -> None:
    """Logits travel as a frame of their own."""
    logits = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    got = from_frames(received(Scores(1, 0, logits)))
    assert isinstance(got, Scores)
    np.testing.assert_array_equal(got.logits, logits)


def test_array_without_rows() -> None:
    """An empty array is a message too."""
    got = from_frames(received(a_route(0)))
    assert isinstance(got, Route)
    assert got.x.shape == (0, 8)


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], CONVERSATION])
def test_prompt_kinds(prompt: str | list[int] | Conversation) -> None:
    """Text, ids and a conversation each arrive as what they were."""
    sent = Generate(1, prompt, 4, Sampling(temperature=0.5, seed=2**63), ("stop",))
    assert from_frames(received(sent)) == sent


def test_sizes_of_pools() -> None:
    """A size and its answer, above 4 GB too."""
    for sent in (Resize(5 << 32), Resized(3, 5 << 32)):
        assert from_frames(received(sent)) == sent


def test_first_frame_is_stable() -> None:
    """The bytes of a message are part of the protocol: magic, version, count, then msgpack."""
    assert received(Failed(7, "request", "no")) == [
        b"CLBR\x03\x00\x00\x00" + b"\x84\xa4type\xa6Failed\xaarequest_id\x07\xa4kind\xa7request\xa7message\xa2no"
    ]
    assert (MAGIC, VERSION) == (b"CLBR", 3)


def test_step_frame_is_stable() -> None:
    """The fixed layout of a step: 96 bytes of header, then x, ids, weights, or y."""
    route = Route(5, 2, np.ones((1, 2), np.float32), np.array([[3]], np.int32), np.ones((1, 1), np.float32))
    (frame,) = received(route)
    assert frame[:40] == b"CLBS\x03\x00\x01\x00" + bytes(
        [5, *[0] * 7, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]
    ) + bytes(8)
    assert frame[96:] == 2 * b"\0\0\x80?" + b"\3\0\0\0" + b"\0\0\x80?"
    counters = StepCounters(1, 2, 3, 4, 5, 0.5, 0.25, 0.125)
    answer = from_frames(received(Routed(5, 2, route.x, counters)))
    assert isinstance(answer, Routed)
    assert answer.counters == counters
    np.testing.assert_array_equal(answer.y, route.x)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda f: f[:50], "without its header"),
        (lambda f: f[:4] + b"\x09\x00" + f[6:], "protocol 9"),
        (lambda f: f[:6] + b"\x03\x00" + f[8:], "kind 3"),
        (lambda f: f[:-1], "3 tokens of 8 values, top-2"),
        (lambda f: f + b"\0\0\0\0", "3 tokens of 8 values, top-2"),
    ],
)
def test_damaged_steps_are_named(damage, what: str) -> None:  # type: ignore[no-untyped-def]
    """A step of another version, kind or size is refused."""
    (frame,) = received(a_route())
    with pytest.raises(ProtocolError, match=what):
        from_frames([damage(frame)])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda f: [], "without a header"),
        (lambda f: [f[0][:5]], "without a header"),
        (lambda f: [b"HTTP" + f[0][4:], *f[1:]], "not a colibri-mp peer"),
        (lambda f: [f[0][:4] + b"\x09\x00" + f[0][6:], *f[1:]], "protocol 9"),
        (lambda f: f[:1], "0 came"),
        (lambda f: [f[0][:-3], *f[1:]], "cannot be decoded"),
        (lambda f: [f[0], f[1][:-4], *f[2:]], "its shape is"),
        (lambda f: [f[0], f[1][:-1], *f[2:]], "cannot be decoded"),
    ],
)
def test_damage_is_named(damage, what: str) -> None:  # type: ignore[no-untyped-def]
    """Each kind of damage is a ProtocolError that says what is wrong."""
    with pytest.raises(ProtocolError, match=what):
        from_frames(damage(received(Scores(1, 0, np.ones((3, 8), np.float32)))))


def test_other_dtypes_are_refused() -> None:
    """Only float32 and int32 arrays are part of the protocol."""
    wide = np.zeros((1, 2))
    with pytest.raises(ProtocolError, match="float64"):
        to_frames(Route(1, 1, wide, wide, wide))


@given(st.binary(max_size=200), st.integers(0, 3))
def test_garbage_is_refused(body: bytes, num_arrays: int) -> None:
    """Random bodies never give anything but a ProtocolError or a message."""
    header = MAGIC + VERSION.to_bytes(2, "little") + num_arrays.to_bytes(2, "little")
    with contextlib.suppress(ProtocolError):
        from_frames([header + body, *[b"\0" * 8] * num_arrays])
