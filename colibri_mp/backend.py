"""What computes a model's resident part: everything but the routed experts. The coordinator's forward pass calls it, layer by layer.

T rows of a step, D hidden, K experts a token, V vocabulary. Rows are float32 and belong to the caller, results to the backend: they are
valid until its next call of the same kind, but for `embed`.
"""

from typing import Any, Protocol

from colibri_mp.checkpoint.source import Bytes
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.messages import Floats, Ints


class Blocks(Protocol):
    """Paged caches by block: what prefix sharing and session files need of them."""

    num_blocks: int
    bits: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in all layers."""

    def copy_block(self, block: int) -> Bytes:
        """All that is cached for the 16 positions of a block, uint8 [block_bytes]."""

    def set_block(self, block: int, data: Bytes) -> None:
        """The inverse of `copy_block`."""


class Slots(Protocol):
    """The states of recurrent layers by slot: what session files need of them. Without such layers there are no slots."""

    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in all layers."""

    def copy_slot(self, slot: int) -> Bytes:
        """What a slot holds, uint8 [slot_bytes]."""

    def set_slot(self, slot: int, data: Bytes) -> None:
        """The inverse of `copy_slot`."""


class Predictor(Protocol):
    """What a router would choose for rows that are not its own."""

    def __call__(self, layer_idx: int, norm_idx: int, x: Floats) -> tuple[Ints, Floats]:
        """Experts [T, width] that layer `layer_idx` would choose for x [T, D] after the mlp norm of layer `norm_idx`; their weights."""


class Backend(Protocol):
    """See the module docstring."""

    @property
    def caches(self) -> Blocks:
        """All that is kept of earlier positions, by block."""

    @property
    def states(self) -> Slots:
        """All that recurrent layers know of sequences, by slot; what a step does with slots is in `Batch.state_runs`."""

    @property
    def description(self) -> str:
        """What computes, for the notes of a launch; "" where it is the usual: the kernels."""

    def embed(self, token_ids: Ints) -> Floats:
        """The embeddings [T, D] of token ids [T], a new array."""

    def mix(self, layer_idx: int, x: Floats, batch: Batch) -> None:
        """x += mixer(norm(x)), in place."""

    def mix_and_route(self, layer_idx: int, x: Floats, batch: Batch) -> tuple[Floats, Ints, Floats]:
        """x += mixer(norm(x)), in place; then h = mlp_norm(x) [T, D], the chosen experts [T, K] and their weights [T, K]."""

    def prepare(self, layer_idx: int, x: Floats, batch: Batch) -> None:
        """`mix_and_route` will be called with these next, unless something else comes in between; the values of x may still change.

        The moment for what needs no values: a worker's answer is awaited.
        """

    @property
    def mixer_ended_s(self) -> float:
        """When the mixer of the last `mix_and_route` had ended, by `time.perf_counter`."""

    def predictor(self, width: int) -> Predictor:
        """The routers of the model for predictions of `width` experts a row, for `lookahead.MOST_ROWS` rows at most."""

    def mlp_norm(self, layer_idx: int, x: Floats) -> Floats:
        """mlp_norm(x), a new array."""

    def resident_expert(self, layer_idx: int, h: Floats) -> Floats:
        """The expert that every token uses, of h [T, D]: the dense block, or the shared expert."""

    def head(self, x: Floats) -> Floats:
        """Logits [T, V]."""

    def final_norm(self, x: Floats) -> Floats:
        """What the head multiplies, a new array [T, D]: what a predictor begins with."""

    def merge(self, token_ids: Ints, hidden: Floats) -> Floats:
        """The predictor's input [T, D], a new array: of tokens [T] and what comes before them, normed, [T, D]."""

    def predictor_norm(self, x: Floats) -> Floats:
        """`final_norm` after the predictor's layer."""

    def predictor_head(self, x: Floats) -> Floats:
        """Logits [T, V] of what the predictor's layer gives."""

    def expect(self) -> None:
        """A worker's answer is on its way, and a call will follow: the moment to wake threads."""

    def identity(self) -> dict[str, Any]:
        """What the bits of its results depend on beside model and rows, JSON-compatible."""
