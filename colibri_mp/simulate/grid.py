"""The simulation itself: the traced run once more as it was, then every memory size with every policy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colibri_mp.shm.policy import Eviction
from colibri_mp.simulate.cache import POLICIES, LayerCache
from colibri_mp.simulate.prediction import FORMULA, Costs, decode_seconds, measure_costs
from colibri_mp.simulate.sizes import Size
from colibri_mp.simulate.workload import LayerWorkload, Outcome, Workload, workload_of
from colibri_mp.trace import Trace, TracedLayer

_FEW_READS = 1000


@dataclass(frozen=True)
class AsRun:
    """What the run counted, and what the simulation of its own policy and sizes counts; `is_exact`: equal in every visit.

    Measured misses include experts that prefetch had on their way. `decode_tok_s` is measured.
    """

    resident_share: float
    measured_hits: int
    measured_misses: int
    measured_evictions: int
    simulated_hits: int
    simulated_misses: int
    simulated_evictions: int
    is_exact: bool
    decode_tokens: int
    decode_tok_s: float | None


@dataclass(frozen=True)
class Cell:
    """One memory size with one policy. `tokens_per_s` is predicted, for decode; None where the trace cannot tell."""

    size: str
    ram_bytes: int | None
    pool_bytes: int
    resident_share: float
    policy: str
    hits: int
    misses: int
    evictions: int
    hit_rate: float
    decode_hit_rate: float | None
    decode_bytes_per_token: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Simulation:
    """Everything that is reported. `refused`: sizes that the planner says cannot run, with the reason; `notes`: what limits the rest."""

    as_run: AsRun
    costs: Costs
    cells: tuple[Cell, ...]
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "formula": FORMULA}


def simulate(
    trace: Trace, sizes: Sequence[Size], policies: Sequence[str], disk: int | None, progress: Callable[[str], None]
) -> Simulation:
    """Simulate each size with each policy (names of `cache.POLICIES`); `disk`: bytes/s in place of the measured speed.

    Raises:
        TraceError: the trace has no steps, or contradicts itself.
    """
    workload = workload_of(trace)
    costs = measure_costs(workload, disk)
    progress("simulating the run itself")
    as_run = _as_run(workload, trace.header.eviction)
    possible = [size for size in sizes if not size.refusal]
    cells: list[Cell] = []
    for size in possible:
        progress(f"simulating {size.name}")
        cells += [_cell(workload, costs, size, policy) for policy in policies]
    refused = tuple((size.name, size.refusal) for size in sizes if size.refusal)
    return Simulation(as_run, costs, tuple(cells), refused, (*trace.notes, *_notes(as_run, costs)))


def _notes(as_run: AsRun, costs: Costs) -> Iterator[str]:
    if not as_run.is_exact:
        yield "the simulation of the run itself disagrees with what the run counted: trust neither the rates nor the speeds"
    if costs.bandwidth is None:
        yield "the run read nothing while decoding, so speeds with misses cannot be predicted: give --disk, or trace with less memory"
    elif costs.num_reads < _FEW_READS:
        yield f"costs of a miss are from {costs.num_reads} reads only: trace a run with less memory for better speeds"


def _as_run(workload: Workload, eviction: Eviction) -> AsRun:
    layers = workload.layers
    outcomes = [layer.replay(_cache_as_run(eviction, layer.layer)) for layer in layers]
    asked = sum(int(layer.asked.sum()) for layer in layers)
    misses = sum(int(outcome.misses.sum()) for outcome in outcomes)
    decode_s = decode_seconds(workload)
    return AsRun(
        resident_share=_resident_share(workload, [layer.layer.num_slots for layer in layers]),
        measured_hits=workload.total("hits"),
        measured_misses=workload.total("misses") + workload.total("promoted"),
        measured_evictions=workload.total("evictions"),
        simulated_hits=asked - misses,
        simulated_misses=misses,
        simulated_evictions=sum(int(outcome.evictions.sum()) for outcome in outcomes),
        is_exact=all(_agree(layer, outcome) for layer, outcome in zip(layers, outcomes, strict=True)),
        decode_tokens=workload.num_decode_tokens,
        decode_tok_s=workload.num_decode_tokens / decode_s if decode_s else None,
    )


def _cache_as_run(eviction: Eviction, layer: TracedLayer) -> LayerCache:
    return LayerCache(layer.num_slots, eviction.make(layer.layer, layer.num_experts, layer.floor))


def _agree(layer: LayerWorkload, outcome: Outcome) -> bool:
    """Whether every visit of a layer had the simulated hits, misses and evictions."""
    visits = layer.visits
    misses = visits["misses"].astype(int) + visits["promoted"]
    is_equal = (outcome.misses == misses) & (outcome.evictions == visits["evictions"])
    return bool((is_equal & (layer.asked == visits["hits"] + misses)).all())


def _cell(workload: Workload, costs: Costs, size: Size, policy: str) -> Cell:
    outcomes = list(_outcomes(workload, size, policy))
    pairs = list(zip(workload.layers, outcomes, strict=True))
    asked = sum(int(layer.asked.sum()) for layer in workload.layers)
    misses = sum(int(outcome.misses.sum()) for outcome in outcomes)
    decode_asked = sum(int(layer.asked[layer.is_decode].sum()) for layer in workload.layers)
    decode = [(layer, outcome.misses[layer.is_decode]) for layer, outcome in pairs]
    bytes_read = sum(int(counts.sum()) * layer.bytes_a_read for layer, counts in decode)
    num_tokens = workload.num_decode_tokens
    return Cell(
        size=size.name,
        ram_bytes=size.ram_bytes,
        pool_bytes=sum(n * layer.layer.slab_bytes for n, layer in zip(size.num_slots, workload.layers, strict=True)),
        resident_share=_resident_share(workload, size.num_slots),
        policy=policy,
        hits=asked - misses,
        misses=misses,
        evictions=sum(int(outcome.evictions.sum()) for outcome in outcomes),
        hit_rate=1 - misses / asked if asked else 0.0,
        decode_hit_rate=1 - sum(int(counts.sum()) for _, counts in decode) / decode_asked if decode_asked else None,
        decode_bytes_per_token=bytes_read / num_tokens if num_tokens else None,
        tokens_per_s=costs.tokens_per_s(sum(int((counts > 0).sum()) for _, counts in decode), bytes_read),
    )


def _outcomes(workload: Workload, size: Size, policy: str) -> Iterator[Outcome]:
    make = POLICIES[policy].make
    for layer, num_slots in zip(workload.layers, size.num_slots, strict=True):
        yield layer.run(make(layer.unions, num_slots, layer.layer.floor))


def _resident_share(workload: Workload, num_slots: Sequence[int]) -> float:
    return sum(num_slots) / sum(layer.layer.num_experts for layer in workload.layers)
