"""Stop strings over streamed text."""

from hypothesis import given
from hypothesis import strategies as st

from colibri_mp.tokenizer import StopStrings

TEXTS = st.text(alphabet="ab\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=3)


def expected_text(text: str, stops: list[str]) -> tuple[str, bool]:
    """What may be emitted of `text`: all before the stop that is complete first."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(TEXTS, STOPS, st.data())
def test_same_result_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """Pieces of any size add up to the text before the first stop, and no piece has to be taken back."""
    filter_, rest, emitted = StopStrings(stops), text, ""
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        emitted += filter_.push(rest[:size])
        rest = rest[size:]
        assert expected_text(text, stops)[0].startswith(emitted)
    assert (emitted + filter_.finish(), filter_.found is not None) == expected_text(text, stops)


@given(TEXTS, STOPS)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    """What is held back is the start of some stop string."""
    filter_ = StopStrings(stops)
    held = text[len(filter_.push(text)) :]
    assert filter_.found is not None or held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_across_tokens() -> None:
    """A stop spread over three pieces; what follows is swallowed."""
    filter_ = StopStrings(("\nUser:",))
    assert [filter_.push(piece) for piece in ("Yes.", "\nUs", "er", ": no", " more")] == ["Yes.", "", "", "", ""]
    assert filter_.found is not None
    assert filter_.finish() == ""


def test_start_of_a_stop_that_comes_to_nothing() -> None:
    """Held text is emitted as soon as it can be no stop, or at the end."""
    filter_ = StopStrings(("###", ""))
    assert [filter_.push(piece) for piece in ("a#", "#b", "c##")] == ["a", "##b", "c"]
    assert filter_.found is None
    assert filter_.finish() == "##"
