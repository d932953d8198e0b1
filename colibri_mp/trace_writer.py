"""Writes the route trace (see `trace`), without slowing the run: gathered in memory, written about once a second."""

import dataclasses
import logging
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from colibri_mp import __version__
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.errors import ConfigError
from colibri_mp.messages import Ints, StepCounters
from colibri_mp.models.structure import ModelSpec
from colibri_mp.planner import Plan
from colibri_mp.shm.policy import Eviction
from colibri_mp.trace import (
    FILL,
    LAYER,
    LOAD,
    MAGIC,
    RECORD,
    STEP,
    TracedLayer,
    TraceHeader,
    encode_header,
    record_type,
)

_BATCH = 1024
_FLUSH_S = 1.0
_log = logging.getLogger(__name__)


class TraceWriter:
    """Appends records; one thread calls it. A file that cannot be written any more ends the trace, not the run."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Create `path`, or replace an older trace there.

        Raises:
            ConfigError: the file cannot be created, or is something else than a trace.
        """
        num_experts = max(layer.num_experts for layer in header.layers)
        self.path = path
        self._records = np.zeros((_BATCH, record_type(num_experts).itemsize), np.uint8)
        self._buffer = self._records.data.cast("B")
        self._asked = np.zeros((_BATCH, num_experts + 1), np.uint8)  # the last column: choices that were dropped (-1)
        self._num_records = 0
        self._step = self._num_rows = self._num_prefill_rows = 0
        self._flushed = self._step_ended = self._step_started = perf_counter()
        try:
            _refuse_other_file(path)
            path.write_bytes(encode_header(header, self._records.shape[1]))
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"--trace {path}: cannot be written: {error.strerror}") from error

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start_step(self, step: int, num_rows: int, num_prefill_rows: int) -> None:
        """A step of `num_rows` rows begins; `num_prefill_rows` of them stand beside others of their sequence."""
        self._step, self._num_rows, self._num_prefill_rows = step, num_rows, num_prefill_rows
        self._step_started = perf_counter()

    def add_layer(self, layer: int, ids: Ints, num_choices: int, counters: StepCounters, seconds: float) -> None:
        """A layer with experts is done: ids [T, K] (-1: dropped) were asked for."""
        c = counters
        self._asked[self._num_records, ids] = 1
        self._add(
            LAYER, layer, num_choices, seconds,
            c.hits, c.misses, c.evictions, c.promoted, c.bytes_read, c.disk_s, c.wait_s, c.compute_s,
        )  # fmt: skip

    def end_step(self, seconds: float) -> None:
        """The step is done; a step without this failed."""
        pause_s = self._step_started - self._step_ended
        self._step_ended = perf_counter()
        self._add(STEP, 0, 0, seconds, pause_s=pause_s)
        if self._step_ended - self._flushed > _FLUSH_S:
            self.flush()

    def add_event(self, kind: int, layer: int, value: int) -> None:
        """What happens to a layer beside the steps, see docs/trace.md: of an expert, or RESIZE to a number of slots."""
        assert LOAD <= kind <= FILL, f"a record of kind {kind} is no event"
        self._add(kind, layer, value)

    # -- file ----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what has been gathered."""
        count, self._num_records = self._num_records, 0
        self._flushed = perf_counter()
        if not count or self._file.closed:
            return
        bits = np.packbits(self._asked[:count, :-1], axis=1, bitorder="little")
        self._records[:count, RECORD.size : RECORD.size + bits.shape[1]] = bits
        self._asked[:count] = 0
        try:
            self._file.write(self._records[:count].data)
            self._file.flush()
        except OSError as error:
            _log.error("the trace %s ends here, it cannot be written any more: %s", self.path, error.strerror)
            self._abandon()

    def close(self) -> None:
        """Write the rest and close. Idempotent."""
        self.flush()
        self._abandon()

    def _add(
        self, kind: int, layer: int, value: int = 0, seconds: float = 0.0, hits: int = 0, misses: int = 0, evictions: int = 0,
        promoted: int = 0, bytes_read: int = 0, disk_s: float = 0.0, wait_s: float = 0.0, compute_s: float = 0.0,
        pause_s: float = 0.0,
    ) -> None:  # fmt: skip
        RECORD.pack_into(
            self._buffer, self._num_records * self._records.shape[1], kind, 0, layer, self._step, self._num_rows, self._num_prefill_rows,
            value, seconds, hits, misses, evictions, promoted, bytes_read, disk_s, wait_s, compute_s, pause_s,
        )  # fmt: skip
        self._num_records += 1
        if self._num_records == _BATCH:
            self.flush()

    def _abandon(self) -> None:
        try:
            self._file.close()
        except OSError:  # what was buffered cannot be written either; that has been said
            assert self._file.closed


class NoTrace:
    """Stands in for a `TraceWriter` where no trace is wanted."""

    def start_step(self, step: int, num_rows: int, num_prefill_rows: int) -> None:
        """Nothing."""

    def add_layer(self, layer: int, ids: Ints, num_choices: int, counters: StepCounters, seconds: float) -> None:
        """Nothing."""

    def end_step(self, seconds: float) -> None:
        """Nothing."""

    def add_event(self, kind: int, layer: int, value: int) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_trace(
    config: LaunchConfig,
    checkpoint: Checkpoint,
    model: ModelSpec,
    plan: Plan,
    lossy: tuple[str, ...],
    eviction: Eviction,
) -> TraceWriter | NoTrace:
    """The trace that the launch asked for; its header says what runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not config.trace:
        return NoTrace()
    by_layer = {experts.layer: experts for experts in model.expert_layers}
    layers = [
        TracedLayer(
            layer, worker_id, by_layer[layer].num_experts, num_slots, min(model.router.top_k, by_layer[layer].num_experts),
            by_layer[layer].shape.slab_bytes, by_layer[layer].stored_bytes, eviction.prior.get(layer, ()),
        )
        for worker_id, share in enumerate(plan.workers)
        for layer, num_slots in zip(share.layers, share.num_slots, strict=True)
        if layer < model.depth
    ]  # fmt: skip
    header = TraceHeader(
        program=f"colibri-mp {__version__}",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        model=str(checkpoint.path),
        model_type=model.model_type,
        fingerprint=checkpoint.fingerprint,
        top_k=model.router.top_k,
        policy=eviction.policy,
        budget_bytes=plan.budget_bytes,
        lossy=lossy,
        settings=dataclasses.asdict(config),
        layers=tuple(layers),
        half_life_tokens=eviction.half_life_tokens,
    )
    return TraceWriter(Path(config.trace), header)


def _refuse_other_file(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"--trace {path}: the file exists and is no trace; give another name")
