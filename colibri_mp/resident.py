"""Loading the resident weights: everything but the routed experts, read from disk and packed for the kernels.

Each matrix is read, packed and its stored bytes dropped before the next one, so loading needs the memory of one matrix
on top of the packed sum that the plan states.
"""

from dataclasses import dataclass

from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.checkpoint.source import Bytes, Checkpoint
from colibri_mp.kernels.attention import AttentionWeights
from colibri_mp.kernels.layout import PackedMatrix, pack, packed_bytes
from colibri_mp.kernels.team import aligned_bytes
from colibri_mp.messages import Floats
from colibri_mp.models.structure import AttentionTensors, DenseSpec, LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True)
class ResidentLayer:
    """One layer's resident part: `gate` is the router's matrix [E, D], `dense_slab` a dense block in its place."""

    spec: LayerSpec
    attention: AttentionWeights
    mlp_norm: Floats
    gate: PackedMatrix | None
    dense_slab: Bytes | None


@dataclass(frozen=True)
class ResidentWeights:
    """All resident weights of a model; `head` is `embed` itself if the two are tied."""

    embed: PackedMatrix
    head: PackedMatrix
    final_norm: Floats
    layers: tuple[ResidentLayer, ...]


def load_resident(checkpoint: Checkpoint, model: ModelSpec) -> ResidentWeights:
    """Read and pack.

    Raises:
        ReadError: a file cannot be read or has changed since its header was read.
    """
    loader = _Loader(checkpoint)
    embed = loader.matrix(model.embed)
    return ResidentWeights(
        embed=embed,
        head=embed if model.tied else loader.matrix(model.head),
        final_norm=checkpoint.read_vector(model.final_norm),
        layers=tuple(loader.layer(layer) for layer in model.layers),
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def layer(self, spec: LayerSpec) -> ResidentLayer:
        return ResidentLayer(
            spec=spec,
            attention=self._attention(spec.tensors),
            mlp_norm=self._checkpoint.read_vector(spec.mlp_norm),
            gate=self.matrix(spec.mlp.gate) if isinstance(spec.mlp, MoeSpec) else None,
            dense_slab=self._dense(spec.mlp) if isinstance(spec.mlp, DenseSpec) else None,
        )

    def matrix(self, stored: StoredMatrix) -> PackedMatrix:
        packed = aligned_bytes(packed_bytes(stored.encoding.format, stored.rows, stored.cols))
        self._pack(stored, packed)
        return PackedMatrix(stored.encoding.format, stored.rows, stored.cols, packed)

    def _pack(self, stored: StoredMatrix, out: Bytes) -> None:
        pack(stored.encoding, stored.rows, stored.cols, self._checkpoint.read_parts(stored), out)

    def _dense(self, spec: DenseSpec) -> Bytes:
        shape = spec.shape
        slab = aligned_bytes(shape.slab_bytes)
        for stored, offset in (
            (spec.gate, shape.gate_offset),
            (spec.up, shape.up_offset),
            (spec.down, shape.down_offset),
        ):
            nbytes = packed_bytes(stored.encoding.format, stored.rows, stored.cols)
            self._pack(stored, slab[offset : offset + nbytes])
        return slab

    def _attention(self, tensors: AttentionTensors) -> AttentionWeights:
        return AttentionWeights(
            norm=self._checkpoint.read_vector(tensors.norm),
            q=self.matrix(tensors.q),
            k=self.matrix(tensors.k),
            v=self.matrix(tensors.v),
            o=self.matrix(tensors.o),
            q_bias=self._vector(tensors.q_bias),
            k_bias=self._vector(tensors.k_bias),
            v_bias=self._vector(tensors.v_bias),
            o_bias=self._vector(tensors.o_bias),
            q_norm=self._vector(tensors.q_norm),
            k_norm=self._vector(tensors.k_norm),
        )

    def _vector(self, info: TensorInfo | None) -> Floats | None:
        return None if info is None else self._checkpoint.read_vector(info)
