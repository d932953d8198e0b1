"""Where the time of the steps goes: a clock that the coordinator presses after each stage of a layer.

    start_step ─ for each layer: start_layer ─ lap_block ─ lap_workers ─ end_layer ─ start_head ─ end_step
                                     │             │            │            │            │           │
                  other: embedding, what   attention,   compute and    combine         other         head
                  is between the stages    route        fetch_wait as the worker
                                                        measured them, ipc

`ipc` is what is left of a round trip: messages, wake-ups, and the pool's bookkeeping. A dense block's time is `compute`.
Beside the seconds, the clock counts *unions*, the distinct experts that a layer needs for one step, by the rows of the step.
A press takes some 0.2 us. The control thread reads while the main thread writes: figures may be of different moments.
"""

from time import perf_counter
from typing import Any

from colibri_mp.messages import StepCounters

PHASES = ("attention", "route", "ipc", "fetch_wait", "compute", "combine", "head", "other")
ATTENTION, ROUTE, IPC, FETCH_WAIT, COMPUTE, COMBINE, HEAD, OTHER = range(len(PHASES))
_NUM_LAYER_PHASES = HEAD
_MOST_ROWS_BITS = 32


class _Unions:
    """Sizes of the unions of one layer: number of steps, sum and maximum, by the bit length of the step's rows."""

    def __init__(self) -> None:
        self.steps = [0] * _MOST_ROWS_BITS
        self.sums = [0] * _MOST_ROWS_BITS
        self.largest = [0] * _MOST_ROWS_BITS

    def add(self, num_rows: int, size: int) -> None:
        bits = num_rows.bit_length()
        self.steps[bits] += 1
        self.sums[bits] += size
        self.largest[bits] = max(self.largest[bits], size)


class StepClock:
    """See the module docstring. One thread presses it; seconds are totals since the start."""

    def __init__(self, num_layers: int) -> None:
        self.num_steps = 0
        self.layer_s = self.step_s = 0.0  # of the last layer and step that ended
        self._seconds = [[0.0] * len(PHASES) for _ in range(num_layers)]
        self._outside = [0.0] * len(PHASES)  # of no layer: head, other
        self._unions = [_Unions() for _ in range(num_layers)]
        self._num_routed = self._num_choices = 0  # rows that went through a router, experts chosen for them
        self._row = self._outside
        self._layer = 0
        self._step_started = self._layer_started = self._last = perf_counter()

    # -- presses -------------------------------------------------------------------------------------------------------

    def start_step(self) -> float:
        """A step begins: now, by `time.perf_counter`."""
        self.num_steps += 1
        self._step_started = self._last = perf_counter()
        return self._step_started

    def resume_step(self, started_s: float, layer: int) -> None:
        """A step that began at `started_s` goes on, in `layer`, after another in its midst."""
        self._step_started = started_s
        self._layer, self._row = layer, self._seconds[layer]

    def start_layer(self, layer: int) -> None:
        """A layer begins; the time since the last press belongs to none."""
        self._layer = layer
        self._row = self._outside
        self.lap(OTHER)
        self._row = self._seconds[layer]
        self._layer_started = self._last

    def lap(self, phase: int) -> None:
        """A stage of the layer has ended."""
        now = perf_counter()
        self._row[phase] += now - self._last
        self._last = now

    def lap_block(self, router_started_s: float) -> None:
        """Attention and router, which are one call, have ended; the router's turn began at `router_started_s`."""
        now, row = perf_counter(), self._row
        row[ATTENTION] += router_started_s - self._last
        row[ROUTE] += now - router_started_s
        self._last = now

    def lap_workers(self, counters: StepCounters, num_rows: int, num_choices: int) -> None:
        """The workers' answer has come: `num_rows` tokens had chosen `num_choices` experts in all.

        What they did while the coordinator computed for another step cost no time: it is not counted.
        """
        now, row = perf_counter(), self._row
        waited = now - self._last
        compute_s = min(counters.compute_s, waited)
        wait_s = min(counters.wait_s, waited - compute_s)
        row[IPC] += waited - wait_s - compute_s
        row[FETCH_WAIT] += wait_s
        row[COMPUTE] += compute_s
        self._last = now
        self._unions[self._layer].add(num_rows, counters.asked)
        self._num_routed += num_rows
        self._num_choices += num_choices

    def end_layer(self) -> None:
        """The answer has been added: the layer is done."""
        self.lap(COMBINE)
        self.layer_s = self._last - self._layer_started

    def start_head(self) -> None:
        """All layers are done, the head follows; what was between belongs to neither."""
        self._row = self._outside
        self.lap(OTHER)

    def end_step(self) -> None:
        """The logits are there."""
        self.lap(HEAD)
        self.step_s = self._last - self._step_started

    @property
    def fetch_wait_s(self) -> float:
        """Seconds that steps waited for reads, in all layers since the start."""
        return sum(row[FETCH_WAIT] for row in self._seconds)

    # -- report --------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What `status` says: seconds of each phase in all and by layer; unions by rows of a step, in all and by layer."""
        layers = [dict(zip(PHASES[:_NUM_LAYER_PHASES], row, strict=False)) for row in self._seconds]
        total = dict(zip(PHASES, map(sum, zip(*self._seconds, self._outside, strict=True)), strict=True))
        return {
            "steps": self.num_steps,
            "total_s": sum(total.values()),
            "seconds": total,
            "experts_per_token": self._num_choices / self._num_routed if self._num_routed else 0.0,
            "unions": _describe_unions(self._unions),
            "layers": [
                {
                    "layer": idx,
                    "total_s": sum(seconds.values()),
                    "seconds": seconds,
                    "unions": _describe_unions([unions]),
                }
                for idx, (seconds, unions) in enumerate(zip(layers, self._unions, strict=True))
            ],
        }


def _describe_unions(layers: list[_Unions]) -> list[dict[str, Any]]:
    """One entry for each range of rows that has occurred: how many (layer, step) pairs, mean and largest union."""
    found = []
    for bits in range(1, _MOST_ROWS_BITS):
        steps = sum(unions.steps[bits] for unions in layers)
        if steps:
            mean = sum(unions.sums[bits] for unions in layers) / steps
            largest = max(unions.largest[bits] for unions in layers)
            least, most = 1 << (bits - 1), (1 << bits) - 1
            found.append({"least_rows": least, "most_rows": most, "count": steps, "mean": mean, "largest": largest})
    return found
