"""Loading the resident weights: everything but the routed experts, read from disk and packed for the kernels.

Each matrix is read, packed and its stored bytes dropped before the next one, so loading needs the memory of one matrix
on top of the packed sum that the plan states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.checkpoint.source import Bytes, Checkpoint
from colibri_mp.kernels.layout import PackedMatrix, gather_rows, pack, packed_bytes
from colibri_mp.kernels.router import RouterWeights
from colibri_mp.kernels.team import Arena
from colibri_mp.messages import Floats
from colibri_mp.mixers.kinds import kind_of
from colibri_mp.models.structure import DenseSpec, LayerSpec, ModelSpec, MoeSpec, PredictorSpec
from colibri_mp.plan_terms import resident_bytes


@dataclass(frozen=True)
class ResidentLayer:
    """One layer's resident part. `mixer`: weights as the stage of its kind takes them.

    `expert_slab`: the packed expert that every token uses, a dense block or a shared expert.
    Without `router` there are no routed experts. `expert_gate` [D]: of a shared expert whose weight is a sigmoid.
    """

    spec: LayerSpec
    mixer: Any
    mlp_norm: Floats
    router: RouterWeights | None
    expert_slab: Bytes | None
    expert_gate: Floats | None


@dataclass(frozen=True)
class PredictorWeights:
    """What a predictor has beside its layer: see `models.structure.PredictorSpec`."""

    embed_norm: Floats
    hidden_norm: Floats
    merge: PackedMatrix
    final_norm: Floats


@dataclass(frozen=True)
class ResidentWeights:
    """All resident weights of a model; `head` is `embed` itself if the two are tied. The layer of `predictor` is the last of `layers`."""

    embed: PackedMatrix
    head: PackedMatrix
    final_norm: Floats
    layers: tuple[ResidentLayer, ...]
    predictor: PredictorWeights | None = None


def load_resident(checkpoint: Checkpoint, model: ModelSpec) -> ResidentWeights:
    """Read and pack.

    Raises:
        ReadError: a file cannot be read or has changed since its header was read.
    """
    loader = _Loader(checkpoint, Arena(resident_bytes(model)))
    embed = loader.matrix(model.embed)
    return ResidentWeights(
        embed=embed,
        head=embed if model.tied else loader.matrix(model.head),
        final_norm=checkpoint.read_vector(model.final_norm),
        layers=tuple(loader.layer(layer) for layer in model.layers),
        predictor=None if model.predictor is None else loader.predictor(model.predictor),
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, arena: Arena) -> None:
        self._checkpoint, self._arena = checkpoint, arena

    def layer(self, spec: LayerSpec) -> ResidentLayer:
        return ResidentLayer(
            spec=spec,
            mixer=kind_of(spec).load(self, spec.attention, spec.tensors),
            mlp_norm=self._checkpoint.read_vector(spec.mlp_norm),
            router=self._router(spec.mlp) if isinstance(spec.mlp, MoeSpec) else None,
            expert_slab=None if spec.resident_expert is None else self._expert(spec.resident_expert),
            expert_gate=self._expert_gate(spec.mlp) if isinstance(spec.mlp, MoeSpec) else None,
        )

    def predictor(self, spec: PredictorSpec) -> PredictorWeights:
        embed_norm, hidden_norm, final_norm = map(self._checkpoint.read_vector, spec.vectors)
        return PredictorWeights(embed_norm, hidden_norm, self.matrix(spec.merge), final_norm)

    def _router(self, spec: MoeSpec) -> RouterWeights:
        return RouterWeights(self.matrix(spec.gate), self.vector(spec.gate_bias), self.vector(spec.correction))

    def _expert_gate(self, spec: MoeSpec) -> Floats | None:
        if spec.shared_gate is None:
            return None
        return gather_rows(self.matrix(spec.shared_gate), np.zeros(1, np.int32)).reshape(-1)

    def matrix(self, stored: StoredMatrix) -> PackedMatrix:
        """A matrix in the kernels' form."""
        packed = self._arena.take(packed_bytes(stored.encoding.format, stored.rows, stored.cols))
        self._pack(stored, packed)
        return PackedMatrix(stored.encoding.format, stored.rows, stored.cols, packed)

    def _pack(self, stored: StoredMatrix, out: Bytes) -> None:
        pack(stored.encoding, stored.rows, stored.cols, self._checkpoint.read_parts(stored), out)

    def _expert(self, spec: DenseSpec) -> Bytes:
        shape = spec.shape
        slab = self._arena.take(shape.slab_bytes)
        for stored, offset in (
            (spec.gate, shape.gate_offset),
            (spec.up, shape.up_offset),
            (spec.down, shape.down_offset),
        ):
            nbytes = packed_bytes(stored.encoding.format, stored.rows, stored.cols)
            self._pack(stored, slab[offset : offset + nbytes])
        return slab

    def parts(self, stored: StoredMatrix) -> Sequence[Bytes]:
        """A matrix as stored."""
        return self._checkpoint.read_parts(stored)

    def vector(self, info: TensorInfo | None) -> Floats | None:
        """A vector as float32; None where there is none."""
        return None if info is None else self._checkpoint.read_vector(info)
