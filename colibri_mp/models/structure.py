"""A model as found in a checkpoint: its specs together with where each tensor lies, checked but not loaded.

Shapes: D hidden, F width, V vocabulary, E experts. Nothing here holds weights or files; everything can be pickled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.specs import AttentionSpec, DeltaNetSpec, MlaSpec, RopeSpec, RouterSpec

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
    sinks: TensorInfo | None = None

    @property
    def matrices(self) -> Iterator[StoredMatrix]:
        """All projections."""
        yield from (self.q, self.k, self.v, self.o)

    @property
    def vectors(self) -> Iterator[TensorInfo]:
        """All norms, biases and sinks that there are."""
        found = (self.norm, self.q_bias, self.k_bias, self.v_bias, self.o_bias, self.q_norm, self.k_norm, self.sinks)
        yield from (info for info in found if info is not None)


@dataclass(frozen=True, slots=True)
class IndexerTensors:
    """Of sparse attention's indexer: q [heads * head_dim, query_rank], k [head_dim, D], gates [heads, D]; k_norm and k_bias [head_dim]."""

    q: StoredMatrix
    k: StoredMatrix
    gates: StoredMatrix
    k_norm: TensorInfo
    k_bias: TensorInfo

    @property
    def matrices(self) -> Iterator[StoredMatrix]:
        """All projections."""
        yield from (self.q, self.k, self.gates)

    @property
    def vectors(self) -> Iterator[TensorInfo]:
        """The layer norm of the keys."""
        yield from (self.k_norm, self.k_bias)


@dataclass(frozen=True, slots=True)
class MlaTensors:
    """`norm` [D] comes first; q_a [q_lora, D] and q_a_norm if there is a query rank; q, kv_a, kv_a_norm, o as `MlaSpec` says.

    Either `kv_b` [heads * (nope + v), L], or its halves as MLX keeps them, `embed_q` [heads * L, nope] and `unembed` [heads * v, L].
    """

    norm: TensorInfo
    q: StoredMatrix
    kv_a: StoredMatrix
    kv_a_norm: TensorInfo
    o: StoredMatrix
    q_a: StoredMatrix | None = None
    q_a_norm: TensorInfo | None = None
    kv_b: StoredMatrix | None = None
    embed_q: StoredMatrix | None = None
    unembed: StoredMatrix | None = None
    indexer: IndexerTensors | None = None

    @property
    def matrices(self) -> Iterator[StoredMatrix]:
        """All projections."""
        found = (self.q_a, self.q, self.kv_a, self.kv_b, self.embed_q, self.unembed, self.o)
        yield from (matrix for matrix in found if matrix is not None)
        if self.indexer is not None:
            yield from self.indexer.matrices

    @property
    def vectors(self) -> Iterator[TensorInfo]:
        """All norms."""
        yield from (info for info in (self.norm, self.q_a_norm, self.kv_a_norm) if info is not None)
        if self.indexer is not None:
            yield from self.indexer.vectors


@dataclass(frozen=True, slots=True)
class DeltaNetTensors:
    """Of a gated delta net. qkv: all query heads, then all key heads, then all value heads; z like v; b and a [value heads, D].

    out [D, rows of v]. `conv` holds a weight for each channel and token. `norm` [D] comes before the projections, `head_norm` [value_dim]
    after the recurrence.
    """

    norm: TensorInfo
    qkv: StoredMatrix
    z: StoredMatrix
    b: StoredMatrix
    a: StoredMatrix
    out: StoredMatrix
    conv: TensorInfo
    a_log: TensorInfo
    dt_bias: TensorInfo
    head_norm: TensorInfo

    @property
    def matrices(self) -> Iterator[StoredMatrix]:
        """All projections."""
        yield from (self.qkv, self.z, self.b, self.a, self.out)

    @property
    def vectors(self) -> Iterator[TensorInfo]:
        """All that is kept as float32."""
        yield from (self.norm, self.conv, self.a_log, self.dt_bias, self.head_norm)


MixerSpec = AttentionSpec | MlaSpec | DeltaNetSpec
MixerTensors = AttentionTensors | MlaTensors | DeltaNetTensors
"""What a layer does before its experts, and its tensors, of the same kind. How a kind is computed: `colibri_mp.mixers`."""


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

        gate, up, down = (matrix.encoding.format for matrix in (self.gate, self.up, self.down))
        return ExpertShape(self.gate.cols, self.gate.rows, gate, up, down)

    @property
    def matrices(self) -> Iterator[StoredMatrix]:
        """All of it."""
        yield from (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture-of-experts block; `gate` is the router's matrix [E, D], `gate_bias` [E] and `correction` [E] go with it.

    `shared`: an expert that every token uses too; its weight is 1, or the sigmoid of `shared_gate` [1, D].
    """

    router: RouterSpec
    gate: StoredMatrix
    experts: ExpertLayer
    gate_bias: TensorInfo | None = None
    correction: TensorInfo | None = None
    shared: DenseSpec | None = None
    shared_gate: StoredMatrix | None = None

    @property
    def matrices(self) -> Iterator[StoredMatrix]:
        """What stays in memory: everything but the routed experts."""
        yield self.gate
        if self.shared is not None:
            yield from self.shared.matrices
        if self.shared_gate is not None:
            yield self.shared_gate


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x += mixer(norm(x)); x += mlp(mlp_norm(x)). `attention` says what the mixer is, `tensors` are of its kind."""

    attention: MixerSpec
    tensors: MixerTensors
    mlp_norm: TensorInfo
    mlp: MoeSpec | DenseSpec

    @property
    def resident_expert(self) -> DenseSpec | None:
        """The expert that every token uses: the dense block, or the shared expert."""
        return self.mlp.shared if isinstance(self.mlp, MoeSpec) else self.mlp

    @property
    def vectors(self) -> Iterator[TensorInfo]:
        """Norms, biases, sinks and corrections."""
        yield from self.tensors.vectors
        yield self.mlp_norm
        if isinstance(self.mlp, MoeSpec):
            yield from (info for info in (self.mlp.gate_bias, self.mlp.correction) if info is not None)


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A layer that predicts the token after the next one (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Of the last layer's output h, normed by the model's final norm, and the next token t: x = merge [D, 2D] of
    [embed_norm(embed(t)); hidden_norm(h)], then `layer`, `final_norm` and the model's head.
    """

    embed_norm: TensorInfo
    hidden_norm: TensorInfo
    merge: StoredMatrix
    layer: LayerSpec
    final_norm: TensorInfo

    @property
    def vectors(self) -> tuple[TensorInfo, ...]:
        """The norms beside those of the layer."""
        return self.embed_norm, self.hidden_norm, self.final_norm


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model; `head` is `embed` itself (the same object) if the two are tied.

    `predictors`: only where they were asked for. Where one is used (`with_predictor`), its layer is the last of `layers`, so that it has
    weights, a cache and experts as any other; the first `depth` are those that a token goes through.
    """

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
    predictors: tuple[PredictorSpec, ...] = ()
    uses_predictor: bool = False

    @property
    def depth(self) -> int:
        """Layers that a token goes through."""
        return len(self.layers) - self.uses_predictor

    @property
    def predictor(self) -> PredictorSpec | None:
        """The one that is used."""
        return self.predictors[0] if self.uses_predictor else None

    def with_predictor(self) -> "ModelSpec":
        """The model with its first predictor in use, or as it is if it has none."""
        if not self.predictors:
            return self
        return replace(self, layers=(*self.layers, self.predictors[0].layer), uses_predictor=True)

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
        yield from self.other_resident_matrices()
        for layer in self.layers:
            yield from layer.tensors.matrices

    def other_resident_matrices(self) -> Iterator[StoredMatrix]:
        """Those that belong to no mixer."""
        yield self.embed
        if not self.tied:
            yield self.head
        if self.predictor is not None:
            yield self.predictor.merge
        for layer in self.layers:
            yield from layer.mlp.matrices

    def resident_vectors(self) -> Iterator[TensorInfo]:
        """Every norm, bias, sink and correction: kept as float32."""
        yield self.final_norm
        if self.predictor is not None:
            yield from self.predictor.vectors
        for layer in self.layers:
            yield from layer.vectors
