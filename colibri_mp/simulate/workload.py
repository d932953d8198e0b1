"""A trace, layer by layer: the unions that were asked for, what the run made of them, and what steps cost it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_mp.errors import TraceError
from colibri_mp.simulate.cache import LayerCache
from colibri_mp.trace import DROP, FILL, LAYER, LOAD, PIN, RESIZE, STEP, UNPIN, Trace, TracedLayer

Counts = NDArray[np.int64]


class Outcome(NamedTuple):
    """Misses and evictions of each visit of a layer, int64 [n]."""

    misses: Counts
    evictions: Counts


@dataclass(frozen=True)
class LayerWorkload:
    """One layer's `records` (LAYER and events, in order) and the union of each visit."""

    layer: TracedLayer
    records: NDArray[np.void]
    unions: list[list[int]]

    @cached_property
    def visits(self) -> NDArray[np.void]:
        """The LAYER records: one for each union."""
        found: NDArray[np.void] = self.records[self.records["kind"] == LAYER]
        return found

    @cached_property
    def asked(self) -> Counts:
        """Distinct experts of each visit."""
        return np.array([len(union) for union in self.unions], np.int64)

    @property
    def is_decode(self) -> NDArray[np.bool_]:
        """Whether a visit was of a step without prefill."""
        return np.asarray(self.visits["num_prefill_rows"] == 0)

    @property
    def bytes_a_read(self) -> float:
        """What one miss read on average in the run; an expert's stored bytes if nothing was read."""
        reads = int(self.visits["misses"].sum() + self.visits["promoted"].sum())
        return int(self.visits["bytes_read"].sum()) / reads if reads else self.layer.read_bytes

    def run(self, cache: LayerCache) -> Outcome:
        """What `cache` makes of the unions alone."""
        counts = [cache.visit(union) for union in self.unions]
        return Outcome(*np.array(counts, np.int64).reshape(-1, 2).T)

    def replay(self, cache: LayerCache) -> Outcome:
        """What `cache` makes of unions and events, as they came in the run.

        Raises:
            TraceError: an event that cannot happen.
        """
        apply: dict[int, Callable[[int], None]] = {
            LOAD: cache.load, FILL: cache.fill, PIN: cache.pin, UNPIN: cache.unpin, DROP: cache.drop, RESIZE: cache.resize
        }  # fmt: skip
        unions = iter(self.unions)
        counts = []
        for kind, value in zip(self.records["kind"].tolist(), self.records["value"].tolist(), strict=True):
            if kind == LAYER:
                counts.append(cache.visit(next(unions)))
            else:
                apply[kind](value)
        return Outcome(*np.array(counts, np.int64).reshape(-1, 2).T)


@dataclass(frozen=True)
class Workload:
    """All layers of a trace, and its STEP records."""

    layers: tuple[LayerWorkload, ...]
    steps: NDArray[np.void]

    @cached_property
    def decode_steps(self) -> NDArray[np.void]:
        """The steps without prefill."""
        found: NDArray[np.void] = self.steps[self.steps["num_prefill_rows"] == 0]
        return found

    @property
    def num_decode_tokens(self) -> int:
        """Rows of the decode steps."""
        return int(self.decode_steps["num_rows"].sum())

    @property
    def decode_asked(self) -> NDArray[np.float64]:
        """Distinct experts of each visit of decode, all layers, one after the other."""
        return np.concatenate([part.asked[part.is_decode] for part in self.layers]).astype(np.float64)

    def decode_field(self, name: str) -> NDArray[np.float64]:
        """A field of the visits of decode, in the same order."""
        return np.concatenate([part.visits[name][part.is_decode] for part in self.layers]).astype(np.float64)

    def total(self, name: str) -> int:
        """Sum of a count over all visits."""
        return sum(int(part.visits[name].sum()) for part in self.layers)


def workload_of(trace: Trace) -> Workload:
    """Raises `TraceError` for a trace without a single visit."""
    if not len(trace.of_kind(LAYER)):
        raise TraceError("the trace has no steps: nothing was generated while it was written")
    return Workload(tuple(_layer(trace, layer) for layer in trace.header.layers), trace.of_kind(STEP))


def _layer(trace: Trace, layer: TracedLayer) -> LayerWorkload:
    records = trace.records[(trace.records["layer"] == layer.layer) & (trace.records["kind"] != STEP)]
    return LayerWorkload(layer, records, _unions(records[records["kind"] == LAYER]["asked"]))


def _unions(asked: NDArray[np.uint8]) -> list[list[int]]:
    """The experts of each row of bits [n, bytes]."""
    rows, experts = np.nonzero(np.unpackbits(asked, axis=1, bitorder="little"))
    ends = np.searchsorted(rows, np.arange(1, len(asked) + 1)).tolist()
    flat: list[int] = experts.tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
