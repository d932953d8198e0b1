"""What a cluster's memory is made of: the size of every term of the plan but the expert pools.

The terms are what gets allocated and touched: the objects that allocate report the same sizes (`scratch_bytes`, `nbytes`,
`packed_bytes`). What interpreters and libraries take cannot be computed; it was measured, and `scripts/measure_memory.py
--matrix` holds the sum of all terms against the memory of running clusters.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig
from colibri_mp.kernels import expert
from colibri_mp.kernels.head import HeadStage
from colibri_mp.kernels.layout import packed_bytes
from colibri_mp.kernels.resident_expert import ResidentExpert
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.router import RouterStage
from colibri_mp.lookahead import MOST_ROWS
from colibri_mp.mixers import kinds
from colibri_mp.mixers.kind import StageLimits
from colibri_mp.models.structure import ModelSpec, MoeSpec
from colibri_mp.workers.expert_reader import scratch_bytes as read_scratch_bytes
from colibri_mp.workers.slab_audit import audit_bytes

# Measured on Linux x86-64 with Python 3.11 (docs/log.md): pages of files that the processes share, and what each has alone.
LIBRARY_BYTES = 84_000_000
CLIENT_BYTES = 18_500_000
SERVER_BYTES = 40_000_000  # more than CLIENT_BYTES: the HTTP libraries, and 64 clients at a time
COORDINATOR_BYTES = 70_000_000
TRACKER_BYTES = 7_000_000  # multiprocessing's resource tracker
WORKER_BYTES = 68_000_000
_TOKENIZER_BYTES, _TOKENIZER_FACTOR = 1_100_000, 8.6  # the library's tables, by the size of tokenizer.json
TENSOR_BYTES = 860  # what the coordinator remembers of a tensor of the checkpoint

LOGITS_BYTES = 16_000_000  # logits of one step are kept below this (see `max_logit_rows`)


@dataclass(frozen=True)
class Term:
    """One line of the plan: `nbytes` that `process` will hold."""

    process: str
    name: str
    nbytes: int


class ExpertRoom(NamedTuple):
    """Bytes that a budget leaves for experts; the slabs of pools take `floor` at least and `most` at most."""

    left: int
    floor: int
    most: int


def max_logit_rows(vocab_size: int, prefill_chunk: int) -> int:
    """Rows whose logits one step may keep, so that they take at most `LOGITS_BYTES` (one row always may)."""
    return max(1, min(prefill_chunk, LOGITS_BYTES // (4 * vocab_size)))


def resident_bytes(model: ModelSpec) -> int:
    """Bytes of the packed matrices that the coordinator keeps, dense blocks and shared experts included, and of all vectors."""
    others = sum(packed_bytes(m.encoding.format, m.rows, m.cols) for m in model.other_resident_matrices())
    return vector_bytes(model) + kinds.matrix_bytes(model) + others


def vector_bytes(model: ModelSpec) -> int:
    """Bytes of all norms, biases and other vectors, as float32."""
    return sum(4 * math.prod(info.shape) for info in model.resident_vectors())


def table_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the tokenizer and of what is remembered of each tensor."""
    path = checkpoint.path / "tokenizer.json"
    tokenizer = _TOKENIZER_BYTES + int(path.stat().st_size * _TOKENIZER_FACTOR) if path.exists() else 0
    return tokenizer + len(checkpoint.tensors) * TENSOR_BYTES


def lookahead_bytes(model: ModelSpec) -> int:
    """Scratch of the router that predicts."""
    return RouterStage.scratch_bytes(model.router, model.hidden, MOST_ROWS)


def top_k(model: ModelSpec, experts: ExpertLayer) -> int:
    """Experts that one token needs in a layer."""
    mlp = model.layers[experts.layer].mlp
    assert isinstance(mlp, MoeSpec)
    return min(mlp.router.top_k, experts.num_experts)


@dataclass(frozen=True)
class Sizes:
    """Bytes of everything but the pools, for one choice of context, rows a step (`chunk`) and threads; with the compiled kernels.

    `library_bytes`: pages that the processes share; `process_bytes`: what coordinator and workers have beside the kernels, each.
    """

    library_bytes: ClassVar[int] = LIBRARY_BYTES
    process_bytes: ClassVar[int] = 0

    model: ModelSpec
    config: LaunchConfig
    ctx_tokens: int
    chunk: int
    num_threads: int

    def terms(self, groups: Sequence[Sequence[ExpertLayer]], tables: int) -> Iterator[Term]:
        """All terms but the pools and the allowance; `tables` as in `table_bytes`, one group of layers a worker."""
        rows = self.logit_rows
        yield Term("all", "libraries, pages that the processes share", self.library_bytes)
        yield Term("client", "interpreter and libraries", CLIENT_BYTES)
        if self.config.client == "server":
            yield Term("client", "HTTP server, its tokenizer", SERVER_BYTES + tables)
        yield Term("coordinator", "interpreter and libraries", COORDINATOR_BYTES + TRACKER_BYTES + self.process_bytes)
        yield Term("coordinator", "tokenizer, table of tensors", tables)
        yield Term("coordinator", "resident weights", self.resident())
        for worker_id, group in enumerate(groups):
            yield from self.worker_terms(worker_id, group)
        yield Term("coordinator", f"scratch, {self.chunk} rows a step", self.coordinator_scratch())
        yield Term("coordinator", f"logits, {rows} rows a step", self.logits())
        if self.model.uses_predictor:
            yield Term("coordinator", "scratch of the predictor", self.predictor_scratch())
        bits = self.config.kv_bits
        name = f"KV cache, {self.kv_tokens} tokens" + (f" in {bits} bits" if bits != 32 else "")
        yield Term("coordinator", name, self.kv(self.kv_tokens))
        if num_bytes := kinds.state_bytes(self.model, slots := self.config.state_slots):
            yield Term("coordinator", f"states of recurrent layers, {slots} slots", num_bytes)

    def worker_terms(self, worker_id: int, group: Sequence[ExpertLayer]) -> Iterator[Term]:
        """A worker's terms but its pool."""
        name, in_flight = f"worker {worker_id}", self.config.io_threads
        yield Term(name, "interpreter and libraries", WORKER_BYTES + self.process_bytes)
        yield Term(name, f"scratch, {self.chunk} rows a step", self.worker_scratch(group))
        buffers = read_scratch_bytes(group, in_flight) + (audit_bytes(group) if self.config.verify == "always" else 0)
        yield Term(name, f"read buffers, {in_flight} in flight", buffers)

    def resident(self) -> int:
        """Weights that the coordinator keeps."""
        return resident_bytes(self.model)

    def kv(self, num_tokens: int) -> int:
        """What is cached of so many positions."""
        return kinds.kv_bytes(self.model, num_tokens, self.config.kv_bits)

    def device_bytes(self, groups: Sequence[Sequence[ExpertLayer]], left: ExpertRoom) -> tuple[int, ...]:
        """What experts take on a device, beside the pool, of each worker: the kernels compute on the pool itself."""
        del left
        return (0,) * len(groups)

    @property
    def kv_tokens(self) -> int:
        """Positions of all sessions together."""
        return self.config.kv_tokens or self.ctx_tokens

    @property
    def logit_rows(self) -> int:
        """Rows of a step whose logits may be wanted."""
        return max_logit_rows(self.model.vocab_size, self.chunk)

    def logits(self) -> int:
        """The head's buffers, and a copy of the logits on its way to the client."""
        vocab = self.model.vocab_size
        return HeadStage.scratch_bytes(self.model.hidden, vocab, self.logit_rows) + self.logit_rows * vocab * 4

    @property
    def limits(self) -> StageLimits:
        """What the stages of mixers are made for."""
        config = self.config
        return StageLimits(self.chunk, self.ctx_tokens, self.num_threads, config.planes, config.kv_bits)

    def coordinator_scratch(self) -> int:
        """The stages' buffers, rotary tables, messages."""
        model, rows, planes = self.model, self.chunk, self.config.planes
        shapes = {layer.resident_expert.shape for layer in model.layers if layer.resident_expert is not None}
        return (
            kinds.scratch_bytes(model, self.limits)
            + RouterStage.scratch_bytes(model.router, model.hidden, rows)
            + sum(ResidentExpert.scratch_bytes(shape, rows, planes, self.num_threads) for shape in shapes)
            + RopeTables.nbytes_for(model.rope.rotary_dim, self.ctx_tokens)
            + (lookahead_bytes(model) if self.config.lookahead != "off" else 0)
            + self.message_bytes()
        )

    def predictor_scratch(self) -> int:
        """Hidden states that wait for it, old and new, and for a step's rows: embedding, norms, both together, prepared rows, product."""
        return self.chunk * self.model.hidden * (3 * 4 + 2 * 8 + 8 + 9 + 8)

    def worker_scratch(self, group: Sequence[ExpertLayer]) -> int:
        """One stage for each shape among the worker's layers, and messages."""
        shapes = {layer.shape: top_k(self.model, layer) for layer in group}
        stages = (
            expert.scratch_bytes(shape, self.chunk, num_chosen, self.config.planes, self.num_threads)
            for shape, num_chosen in shapes.items()
        )
        return sum(stages) + self.message_bytes()

    def message_bytes(self) -> int:
        """A step's activations on their way: sent, received and decoded copies."""
        return 4 * self.chunk * self.model.hidden * 4
