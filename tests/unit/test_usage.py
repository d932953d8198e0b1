"""Learned usage: counts, the file, what is read at start, and which pins are swapped."""

import math
import threading
from pathlib import Path

import numpy as np
import pytest

from colibri_mp.errors import ConfigError
from colibri_mp.messages import Wish
from colibri_mp.usage import DECODE, PREFILL, LayerRoom, Swap, Usage, choose_swaps, preferred, prior_weights, usage_path

SIZES = {1: 4, 3: 6}


def ids(*rows: list[int]) -> np.ndarray:
    """Routed ids [T, K]."""
    return np.array(rows, np.int32)


def used(path: Path | None = None) -> Usage:
    """Layer 1: experts 0 and 2 in decode, 3 in prefill; layer 3: expert 5 in decode."""
    usage = Usage(SIZES, path)
    usage.note(1, ids([0, 2], [2, -1]), None)
    usage.note(1, ids([3, 0], [2, 0]), np.array([True, False]))
    usage.note(3, ids([5, -1]), None)
    return usage


def test_decode_and_prefill_are_counted_apart() -> None:
    """Negative ids name nobody; heat is of decode alone, and cools by half."""
    usage = used()
    usage.count()
    assert usage.since_start[1][DECODE].tolist() == [2, 0, 3, 0]
    assert usage.since_start[1][PREFILL].tolist() == [1, 0, 0, 1]
    assert usage.since_start[3].sum() == 1
    usage.cool()
    assert usage.heat[1].tolist() == [1, 0, 1.5, 0]
    assert usage.since_start[1][DECODE].tolist() == [2, 0, 3, 0]


def test_ids_may_change_after_they_were_noted() -> None:
    """The coordinator's arrays are used again for the next layer."""
    usage, routed = Usage(SIZES, None), ids([1, 2])
    usage.note(1, routed, None)
    routed[:] = 0
    usage.count()
    assert usage.since_start[1][DECODE].tolist() == [0, 1, 1, 0]


def test_saves_add_up(tmp_path: Path) -> None:
    """What is saved twice counts twice, what was saved already does not; the next run starts with it."""
    path = tmp_path / "folder" / "usage"
    usage = used(path)
    usage.save()
    usage.save()
    again = used(path)
    assert again.before[1][DECODE].tolist() == [2, 0, 3, 0]
    again.save()
    assert Usage(SIZES, path).before[1].tolist() == [[4, 0, 6, 0], [2, 0, 0, 2]]
    assert path.read_text().splitlines()[1] == "1 0 4 2"


def test_two_clusters_lose_nothing(tmp_path: Path) -> None:
    """Many that save at once: each count arrives, and no reader ever sees a part of a file."""
    path = tmp_path / "usage"

    def save_often() -> None:
        usage = Usage(SIZES, path)
        for _ in range(25):
            usage.note(3, ids([4, 5]), None)
            usage.save()

    threads = [threading.Thread(target=save_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Usage(SIZES, path).before[3][DECODE].tolist() == [0, 0, 0, 0, 100, 100]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["usage", "usage.lock"]


@pytest.mark.parametrize("line", ["1 4 1 1", "2 0 1 1", "1 0 1", "one 0 1 1", "\N{BULLET}"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    """An expert or layer that the model does not have, or no counts at all: named, and not overwritten."""
    path = tmp_path / "usage"
    path.write_text(f"# a comment\n{line}\n", "utf-8")
    with pytest.raises(ConfigError, match=r"--usage .*usage"):
        Usage(SIZES, path)
    assert line in path.read_text("utf-8")


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's cache by fingerprint, in a file that was named, or nowhere."""
    monkeypatch.setenv("COLIBRI_CACHE_DIR", str(tmp_path))
    assert usage_path("auto", "abc") == tmp_path / "usage" / "abc"
    assert usage_path("model/usage", "abc") == Path("model/usage")
    assert usage_path("off", "abc") is None


def test_most_used_first_through_all_layers() -> None:
    """Each layer's slots are filled, a share of those above the floor pinned; experts nobody used are not read."""
    counts = {1: np.array([[5, 0, 9, 7], [0, 9, 0, 0]]), 3: np.array([[0] * 6, [0, 1, 0, 3, 2, 0]])}
    rooms = {1: LayerRoom(3, 1), 3: LayerRoom(2, 1)}
    wishes = preferred(counts, rooms, 0.5)
    assert wishes == [Wish(1, 2, True), Wish(3, 3, False), Wish(1, 3, False), Wish(3, 4, False), Wish(1, 0, False)]
    assert not any(wish.is_pinned for wish in preferred(counts, rooms, 0.0))
    assert preferred({1: np.zeros((2, 4), np.int64)}, {1: LayerRoom(3, 1)}, 0.5) == []


def test_prior_is_what_a_steady_share_would_weigh() -> None:
    """Twice share * half-life / ln 2, as far as it has been used so much; nothing for a layer without uses."""
    decode = np.array([[3000, 1000, 0, 0], [0, 0, 0, 9]], np.int64)
    prefill = np.array([[0, 0, 0, 0], [0, 0, 4, 0]], np.int64)
    priors = prior_weights({0: decode, 2: prefill, 5: np.zeros((2, 4), np.int64)}, top_k=2, half_life_tokens=8)
    total = 2 * 16 / math.log(2)
    assert priors.keys() == {0, 2}
    assert priors[0] == pytest.approx((0.75 * total, 0.25 * total, 0, 0), abs=1e-3)
    assert priors[2] == (0, 0, 4, 0)


def test_swaps_need_a_clear_gain() -> None:
    """hot > cold + cold / 4 + 4; the coldest pin goes first, residents are no candidates, at most so many at once."""
    heat = {0: np.array([8.0, 14.0, 14.1, 30.0, 2.0, 0.0])}
    resident = np.array([True, False, False, True, True, False])
    assert choose_swaps(heat, lambda _: [0], lambda _: resident) == [Swap(0, 0, 2)]
    heat[0][2] = 14.0
    assert choose_swaps(heat, lambda _: [0], lambda _: resident) == []
    assert choose_swaps(heat, lambda _: [0, 4], lambda _: resident) == [Swap(0, 4, 1)]
    warm = {layer: np.array([0.0, 20.0 + layer]) for layer in range(6)}
    found = choose_swaps(warm, lambda _: [0], lambda _: np.array([True, False]))
    assert [swap.layer for swap in found] == [5, 4, 3, 2]
