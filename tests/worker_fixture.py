"""Workers on random experts in a temporary folder: made, driven and compared, without coordinator and socket."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from expert_checkpoint import BF16, Q4, Q8, ExpertBytes, per_expert, random_experts, stacked, write
from numpy.typing import NDArray
from segments import fresh_name

from colibri_mp.kernels import reference
from colibri_mp.messages import StepCounters
from colibri_mp.shm.layout import LayerSlots, pool_bytes
from colibri_mp.shm.segment import Segment
from colibri_mp.workers.copies import Copy
from colibri_mp.workers.core import Worker, WorkerConfig

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, MAX_TOKENS = 128, 192, 12, 3, 32
LAYERS = (1, 4)
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Model:
    """Two layers of experts on disk: layer 1 in MLX's layout, 4 bit; layer 4 one expert after the other, mixed."""

    def __init__(self, folder: Path) -> None:
        self.experts: dict[int, ExpertBytes] = {}
        self.files: tuple[Path, ...] = ()
        self.expert_layers = []
        for layer, encodings, place in ((1, (Q4, Q4, Q4), stacked), (4, (Q8, Q4, BF16), per_expert)):
            experts = random_experts(layer, NUM_EXPERTS, HIDDEN, WIDTH, encodings)
            files = write(folder, experts, place)
            self.expert_layers.append(experts.expert_layer(len(self.files)))
            self.files += files
            self.experts[layer] = experts

    def config(self, num_slots: int, **changes: Any) -> WorkerConfig:
        """A worker with `num_slots` slots a layer; `changes` replace other fields."""
        slots = tuple(LayerSlots(x.layer, NUM_EXPERTS, num_slots, x.shape.slab_bytes) for x in self.expert_layers)
        name = fresh_name()
        copies = (Copy(self.files),)
        config = WorkerConfig(0, name, tuple(self.expert_layers), slots, copies, "c" * 64, TOP_K, MAX_TOKENS)
        return replace(config, **{"io_threads": 3, "read_timeout_s": 20.0, **changes})

    def reference(self, layer: int, x: Floats, ids: Ints, weights: Floats) -> Floats:
        """The routed sum in plain numpy, float64 inside."""
        experts = self.experts[layer]
        matrices = []
        for pieces in experts.pieces:
            parts = iter(pieces)
            gate, up, down = (
                reference.dequantise(encoding, rows, cols, [next(parts) for _ in encoding.parts])
                for encoding, rows, cols in experts.shapes()
            )
            matrices.append((gate, up, down))
        return reference.experts(x, ids, weights, matrices)


@contextmanager
def running(config: WorkerConfig) -> Iterator[Worker]:
    """A worker with a fresh pool; checks the pool at the end and removes everything."""
    with Segment.create(config.segment_name, pool_bytes(config.slots, config.staging)):
        worker = Worker(config)
        try:
            yield worker
            worker.check_integrity()
        finally:
            worker.close()


def random_batch(seed: int, num_tokens: int, skip: float = 0.0) -> tuple[Floats, Ints, Floats]:
    """x [T, D], distinct ids [T, K] ascending, weights [T, K]; a share `skip` of the ids is -1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    chosen = [np.sort(rng.choice(NUM_EXPERTS, TOP_K, replace=False)) for _ in range(num_tokens)]
    ids = np.array(chosen, np.int32).reshape(num_tokens, TOP_K)
    ids[rng.random(ids.shape) < skip] = -1
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    return x, ids, weights


def run_step(worker: Worker, layer: int, batch: tuple[Floats, Ints, Floats]) -> tuple[Floats, StepCounters]:
    """One step into an output full of NaN."""
    x, ids, weights = batch
    out = np.full_like(x, np.nan)
    counters = worker.step(layer, x, ids, weights, out)
    return out, counters


def experts_of(ids: Sequence[int]) -> tuple[Floats, Ints, Floats]:
    """A batch of one token for each three of `ids`."""
    x, _, weights = random_batch(99, len(ids) // TOP_K)
    return x, np.array(ids, np.int32).reshape(-1, TOP_K), weights
