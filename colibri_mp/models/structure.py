"""A model as found in a checkpoint: its specs together with where each tensor lies, checked but not loaded.

Shapes: D hidden, F width, V vocabulary, E experts. Nothing here holds weights or files; everything can be pickled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.specs import AttentionSpec, RopeSpec, RouterSpec

if TYPE_CHECKING:
    from colibri_mp.kernels.layout import ExpertShape


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """`norm` [D] comes before the projections; q, k, v [rows, D]; o [D, q rows]; norms of q and k as `qk_norm` says."""

    norm: TensorInfo
    q: StoredMatrix
    k: StoredMatrix
    v: StoredMatrix
    o: StoredMatrix
    q_bias: TensorInfo | None = None
    k_bias: TensorInfo | None = None
    v_bias: TensorInfo | None = None
    o_bias: TensorInfo | None = None
    q_norm: TensorInfo | None = None
    k_norm: TensorInfo | None = None


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture-of-experts block; `gate` is the router's matrix [E, D]."""

    router: RouterSpec
    gate: StoredMatrix
    experts: ExpertLayer


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense SwiGLU block: gate, up [F, D], down [D, F]."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    @property
    def shape(self) -> "ExpertShape":
        """The packed form that the kernels compute with: a dense block is one expert that every token uses."""
        # Here, since reading a checkpoint needs no kernels.
        from colibri_mp.kernels.layout import ExpertShape

        formats = (matrix.encoding.format for matrix in (self.gate, self.up, self.down))
        return ExpertShape(self.gate.cols, self.gate.rows, *formats)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x += attention(norm(x)); x += mlp(mlp_norm(x))."""

    attention: AttentionSpec
    tensors: AttentionTensors
    mlp_norm: TensorInfo
    mlp: MoeSpec | DenseSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model; `head` is `embed` itself (the same object) if the two are tied."""

    model_type: str
    hidden: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeSpec
    embed: StoredMatrix
    head: StoredMatrix
    final_norm: TensorInfo
    layers: tuple[LayerSpec, ...]

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one matrix."""
        return self.head is self.embed

    @property
    def router(self) -> RouterSpec:
        """The router of the mixture-of-experts layers; families give all of them the same."""
        return next(layer.mlp.router for layer in self.layers if isinstance(layer.mlp, MoeSpec))

    @property
    def expert_layers(self) -> tuple[ExpertLayer, ...]:
        """The routed experts of each mixture-of-experts layer, in order of the layers."""
        return tuple(layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoeSpec))

    @property
    def quantises_experts(self) -> bool:
        """Whether experts are quantised while they are read."""
        return any(layer.targets is not None for layer in self.expert_layers)

    def resident_matrices(self) -> Iterator[StoredMatrix]:
        """Every matrix but the routed experts, once each: what the coordinator keeps in memory."""
        yield self.embed
        if not self.tied:
            yield self.head
        for layer in self.layers:
            yield from (layer.tensors.q, layer.tensors.k, layer.tensors.v, layer.tensors.o)
            if isinstance(layer.mlp, MoeSpec):
                yield layer.mlp.gate
            else:
                yield from (layer.mlp.gate, layer.mlp.up, layer.mlp.down)
