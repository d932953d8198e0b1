"""Learned usage: how often each expert was chosen, kept between runs, and what follows from it.

    count ─▶ since the start (decode and prefill apart) ─▶ save: added to the user's file, under a lock, replaced as a whole
          └▶ heat: recent uses, halved at each repin
    preferred(...)      at start: which experts to read before anybody asks, and which of these to pin
    prior_weights(...)  at start: what the eviction policy takes each expert for
    choose_swaps(...)   between turns: pins that have gone cold for experts that have become hot

The file is the user's, not the model's: <user cache>/usage/<fingerprint of the checkpoint>, a text of lines
`layer expert decode prefill`. Several clusters may write it: each adds what it has counted.
"""

import fcntl
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import ConfigError
from colibri_mp.messages import Ints, Wish
from colibri_mp.user_cache import replace_file, user_cache_dir

Counts = NDArray[np.int64]
_HEADER = "# colibri-mp: uses of experts: layer expert decode prefill\n"
_MOST_SWAPS = 4
_PRIOR_WEIGHT = 2
DECODE, PREFILL = 0, 1


def usage_path(setting: str, fingerprint: str) -> Path | None:
    """The file that `--usage` names: "auto" in the user's cache, "off" none, else a path."""
    if setting == "off":
        return None
    return user_cache_dir() / "usage" / fingerprint if setting == "auto" else Path(setting)


class Usage:
    """Counts of one cluster, int64 [2 (decode, prefill), E] for each layer. One thread calls it."""

    def __init__(self, num_experts: Mapping[int, int], path: Path | None) -> None:
        """`num_experts` by layer. Reads what was learned before; a missing file is an empty one.

        Raises:
            ConfigError: the file is there but is not such a file, or of other layers.
        """
        self.path = path
        self._num_experts = dict(num_experts)
        self.before = self._zeros() if path is None else self._read(path)
        self.since_start = self._zeros()
        self._unsaved = self._zeros()
        self.heat = {layer: np.zeros(count, np.float64) for layer, count in num_experts.items()}
        self._pending: list[tuple[int, Ints, NDArray[np.bool_] | None]] = []
        self._num_pending = 0

    def note(self, layer: int, ids: Ints, is_prefill: NDArray[np.bool_] | None) -> None:
        """Rows of a step have chosen ids [T, K] (negative: none); `is_prefill` [T], None: all decode. Counted later."""
        self._pending.append((layer, ids.copy(), is_prefill))
        self._num_pending += ids.size
        if self._num_pending > 1 << 16:
            self.count()

    def count(self) -> None:
        """Add up what has been noted."""
        pending, self._pending, self._num_pending = self._pending, [], 0
        for layer, ids, is_prefill in pending:
            parts = [(DECODE, ids)] if is_prefill is None else [(DECODE, ids[~is_prefill]), (PREFILL, ids[is_prefill])]
            for kind, chosen in parts:
                uses = np.bincount(chosen[chosen >= 0], minlength=self._num_experts[layer])
                self.since_start[layer][kind] += uses
                self._unsaved[layer][kind] += uses
                if kind == DECODE:
                    self.heat[layer] += uses

    def cool(self) -> None:
        """Halve all heat; the counts stay."""
        for layer in self.heat:
            self.heat[layer] *= 0.5

    def save(self) -> None:
        """Add what has been counted since the last save to the file.

        Raises:
            OSError: it cannot be written; what was counted is kept for the next save.
        """
        self.count()
        if self.path is None or not any(counts.any() for counts in self._unsaved.values()):
            return
        with _locked(self.path):
            stored = self._read(self.path)
            for layer, counts in self._unsaved.items():
                stored[layer] += counts
            replace_file(self.path, _HEADER.encode() + "".join(_lines(stored)).encode())
        self._unsaved = self._zeros()

    def _zeros(self) -> dict[int, Counts]:
        return {layer: np.zeros((2, count), np.int64) for layer, count in self._num_experts.items()}

    def _read(self, path: Path) -> dict[int, Counts]:
        counts = self._zeros()
        try:
            text = path.read_text("ascii")
        except (FileNotFoundError, NotADirectoryError):
            return counts
        except (OSError, ValueError) as error:
            raise ConfigError(f"--usage {path}: cannot be read: {error}; give another, or off") from error
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("#"):
                continue
            try:
                layer, expert, decode, prefill = map(int, line.split())
                counts[layer][:, expert] += (decode, prefill)
            except (ValueError, KeyError, IndexError):
                raise ConfigError(
                    f"--usage {path}: line {number}, {line[:60]!r}, is not `layer expert decode prefill` of this model; "
                    "remove the file or give another"
                ) from None
        return counts


def _lines(counts: Mapping[int, Counts]) -> Iterator[str]:
    for layer, by_kind in counts.items():
        for expert in np.flatnonzero(by_kind.any(axis=0)).tolist():
            yield f"{layer} {expert} {by_kind[DECODE, expert]} {by_kind[PREFILL, expert]}\n"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with the file among all clusters of the user; the lock goes with the process, however it ends."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- what follows ------------------------------------------------------------------------------------------------------


class LayerRoom(NamedTuple):
    """A layer's slots, and how many of them one token needs."""

    num_slots: int
    floor: int


def preferred(counts: Mapping[int, Counts], rooms: Mapping[int, LayerRoom], pin_share: float) -> list[Wish]:
    """What to have in memory before anybody asks, most used first through all layers: each layer's slots full of it.

    Uses while decoding count, and prefill where there are none. `pin_share` of a layer's slots above the floor are pinned.
    """
    ranked: list[tuple[int, int, Wish]] = []
    for layer, room in rooms.items():
        decode, prefill = counts[layer]
        uses = decode if decode.any() else prefill
        num_pins = int((room.num_slots - room.floor) * pin_share)
        order = np.argsort(-uses, kind="stable")[: room.num_slots]
        for rank, expert in enumerate(expert for expert in order.tolist() if uses[expert]):
            ranked.append((rank, layer, Wish(layer, expert, rank < num_pins)))
    return [wish for _, _, wish in sorted(ranked, key=lambda entry: entry[:2])]


def prior_weights(counts: Mapping[int, Counts], top_k: int, half_life_tokens: float) -> dict[int, tuple[float, ...]]:
    """By layer, what `shm.policy.Lrfu` gives each expert at the start, in uses; layers of which nothing is known are left out.

    It is twice what an expert comes to that is used with its share for long: share * half-life / ln 2, the half-life in uses. All
    together weigh no more than they have been used. Uses while decoding count, and prefill where there are none.
    """
    priors = {}
    for layer, (decode, prefill) in counts.items():
        uses = decode if decode.any() else prefill
        num_uses = int(uses.sum())
        if num_uses:
            total = min(num_uses, _PRIOR_WEIGHT * half_life_tokens * min(top_k, len(uses)) / math.log(2))
            priors[layer] = tuple(round(weight, 3) for weight in (uses * (total / num_uses)).tolist())
    return priors


class Swap(NamedTuple):
    """A pin to give up for an expert that is not in memory."""

    layer: int
    cold: int
    hot: int


def choose_swaps(
    heat: Mapping[int, NDArray[np.float64]],
    pinned: Callable[[int], Sequence[int]],
    resident: Callable[[int], NDArray[np.bool_]],
    most: int = _MOST_SWAPS,
) -> list[Swap]:
    """The swaps of one pass, largest gain first: the coldest pin for the hottest expert that is not in memory.

    Only where hot > cold + cold / 4 + 4: what is hardly hotter is not worth a read, and would soon be swapped back.
    """
    found = []
    for layer, warmth in heat.items():
        cold = sorted(pinned(layer), key=warmth.__getitem__)
        is_resident = resident(layer)
        hot = [e for e in np.argsort(-warmth, kind="stable").tolist() if not is_resident[e]]
        for pin, other in zip(cold, hot, strict=False):
            if warmth[other] <= warmth[pin] * 1.25 + 4:
                break
            found.append((warmth[other] - warmth[pin], Swap(layer, pin, other)))
    found.sort(key=lambda entry: -entry[0])
    return [swap for _, swap in found[:most]]
