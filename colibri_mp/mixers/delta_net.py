"""The gated delta net as a kind of mixer: `kernels.delta_net` on states in slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colibri_mp.kernels.delta_net import DeltaNetStage, DeltaNetWeights, DeltaStates
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.messages import Floats
from colibri_mp.mixers.kind import MixerKind, StageLimits, WeightReader
from colibri_mp.models.structure import DeltaNetTensors
from colibri_mp.specs import DeltaNetSpec


@dataclass(frozen=True)
class DeltaStateShape:
    """States of layers of one spec."""

    spec: DeltaNetSpec

    def nbytes(self, num_layers: int, num_slots: int) -> int:
        """Bytes of so many."""
        return DeltaStates.nbytes(self.spec, num_layers, num_slots)

    def make(self, num_layers: int, num_slots: int) -> DeltaStates:
        """Room for them."""
        return DeltaStates(self.spec, num_layers, num_slots)


class DeltaNet(MixerKind):
    """See the module docstring."""

    block = "gated delta net"

    def cache_shape(self, spec: DeltaNetSpec, kv_bits: int) -> None:
        """None: what it keeps does not grow with the sequence."""
        del spec, kv_bits

    def state_shape(self, spec: DeltaNetSpec) -> DeltaStateShape:
        """The state of a layer."""
        return DeltaStateShape(spec)

    def make_stage(
        self, team: ThreadTeam, spec: DeltaNetSpec, tables: RopeTables, limits: StageLimits
    ) -> DeltaNetStage:
        """The stage for these layers."""
        del tables
        return DeltaNetStage(team, spec, limits.max_rows, limits.planes)

    def scratch_bytes(self, spec: DeltaNetSpec, tensors: Sequence[DeltaNetTensors], limits: StageLimits) -> int:
        """Depends on how many group sizes the inputs of one layer mix, plain ones counting as one."""
        num_forms = max(
            len({matrix.encoding.group_size for matrix in (layer.qkv, layer.z, layer.b, layer.a)}) for layer in tensors
        )
        return DeltaNetStage.scratch_bytes(spec, limits.max_rows, limits.num_threads, num_forms=num_forms)

    def load(self, reader: WeightReader, spec: DeltaNetSpec, tensors: DeltaNetTensors) -> DeltaNetWeights:
        """Matrices packed; the weights of the convolution by token, for vectors of channels."""
        names = ("norm", "conv", "a_log", "dt_bias", "head_norm")
        vectors: dict[str, Floats] = {}
        for name in names:
            vector = reader.vector(getattr(tensors, name))
            assert vector is not None
            vectors[name] = vector
        return DeltaNetWeights(
            norm=vectors["norm"],
            qkv=reader.matrix(tensors.qkv),
            z=reader.matrix(tensors.z),
            b=reader.matrix(tensors.b),
            a=reader.matrix(tensors.a),
            out=reader.matrix(tensors.out),
            conv=np.ascontiguousarray(vectors["conv"].reshape(spec.conv_width, spec.conv_tokens).T),
            rate=-np.exp(vectors["a_log"]),
            dt_bias=vectors["dt_bias"],
            head_norm=vectors["head_norm"],
        )
