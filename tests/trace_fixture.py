"""Traces made by hand: a header, and the steps of a run that a plain LRU pool would have counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colibri_mp.messages import StepCounters
from colibri_mp.shm.policy import Lru
from colibri_mp.simulate.cache import LayerCache
from colibri_mp.trace import Trace, TracedLayer, TraceHeader, read_trace
from colibri_mp.trace_writer import TraceWriter

READ_BYTES = 1000


def header(
    num_layers: int = 2, num_experts: int = 12, num_slots: int = 5, top_k: int = 2, **changes: Any
) -> TraceHeader:
    """Layers 0, 1, ... of equal sizes."""
    layers = tuple(TracedLayer(i, 0, num_experts, num_slots, top_k, 4096, READ_BYTES) for i in range(num_layers))
    fields: dict[str, Any] = {
        "program": "colibri-mp 0", "started": "2026-01-01T00:00:00+00:00", "model": "/model", "model_type": "olmoe",
        "fingerprint": "f" * 64, "top_k": top_k, "policy": "lru", "budget_bytes": 10**9, "lossy": (), "settings": {},
    }  # fmt: skip
    return TraceHeader(**{**fields, **changes}, layers=layers)


def write_run(
    path: Path, head: TraceHeader, steps: Sequence[Sequence[Sequence[int]]], num_rows: int = 1,
    miss_s: float = 0.0, visit_s: float = 0.0,
) -> Trace:  # fmt: skip
    """Write steps, each the unions of all layers, as an LRU pool counts them, and read the file.

    A layer takes 1 ms, `visit_s` more if anything is missing and `miss_s` more for each miss.
    """
    writer = TraceWriter(path, head)
    caches = [LayerCache(layer.num_slots, Lru()) for layer in head.layers]
    for number, unions in enumerate(steps, 1):
        writer.start_step(number, num_rows, 0)
        step_s = 0.0
        for layer, (cache, union) in enumerate(zip(caches, unions, strict=True)):
            misses, evictions = cache.visit(sorted(union))
            wait_s = visit_s * (misses > 0) + miss_s * misses
            counters = StepCounters(
                hits=len(union) - misses,
                misses=misses,
                evictions=evictions,
                bytes_read=misses * READ_BYTES,
                wait_s=wait_s,
            )
            ids = np.array([list(union)], np.int32)
            writer.add_layer(layer, ids, ids.size, counters, 1e-3 + wait_s)
            step_s += 1e-3 + wait_s
        writer.end_step(step_s)
    writer.close()
    return read_trace(path)
