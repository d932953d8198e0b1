"""Grouped-query attention as a kind of mixer: `kernels.attention` on a cache of keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from colibri_mp.kernels.activations import form
from colibri_mp.kernels.attention import AttentionStage, AttentionWeights
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.kv_cache8 import CACHES
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.mixers.kind import MixerKind, StageLimits, WeightReader
from colibri_mp.models.structure import AttentionTensors
from colibri_mp.specs import AttentionSpec


@dataclass(frozen=True)
class KVShape:
    """Keys and values of `num_kv_heads` heads."""

    num_kv_heads: int
    head_dim: int
    bits: int

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of a cache of this shape."""
        return CACHES[self.bits].nbytes(num_layers, num_blocks, self.num_kv_heads, self.head_dim)

    def make(self, num_layers: int, num_blocks: int) -> KVCache:
        """A cache."""
        return CACHES[self.bits](num_layers, num_blocks, self.num_kv_heads, self.head_dim)


class Attention(MixerKind):
    """See the module docstring."""

    block = "attention"

    def stage_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Layers that differ in their window alone share a stage: `AttentionWeights` has it."""
        return replace(spec, window=None)

    def cache_shape(self, spec: AttentionSpec, kv_bits: int) -> KVShape:
        """Windows make no difference: a block is kept as long as its sequence."""
        return KVShape(spec.num_kv_heads, spec.head_dim, kv_bits)

    def make_stage(
        self, team: ThreadTeam, spec: AttentionSpec, tables: RopeTables, limits: StageLimits
    ) -> AttentionStage:
        """The stage for these layers."""
        return AttentionStage(team, spec, tables, limits.max_rows, limits.max_context, limits.planes, limits.kv_bits)

    def scratch_bytes(self, spec: AttentionSpec, tensors: Sequence[AttentionTensors], limits: StageLimits) -> int:
        """Depends on how many group sizes the projections of one layer mix, plain ones counting as one."""
        num_forms = max(len({form(matrix.encoding.format) for matrix in layer.matrices}) for layer in tensors)
        return AttentionStage.scratch_bytes(
            spec, limits.max_rows, limits.max_context, limits.num_threads, num_forms=num_forms
        )

    def load(self, reader: WeightReader, spec: AttentionSpec, tensors: AttentionTensors) -> AttentionWeights:
        """Each projection, packed."""
        norm = reader.vector(tensors.norm)
        assert norm is not None
        return AttentionWeights(
            norm=norm,
            q=reader.matrix(tensors.q),
            k=reader.matrix(tensors.k),
            v=reader.matrix(tensors.v),
            o=reader.matrix(tensors.o),
            q_bias=reader.vector(tensors.q_bias),
            k_bias=reader.vector(tensors.k_bias),
            v_bias=reader.vector(tensors.v_bias),
            o_bias=reader.vector(tensors.o_bias),
            q_norm=reader.vector(tensors.q_norm),
            k_norm=reader.vector(tensors.k_norm),
            sinks=reader.vector(tensors.sinks),
            window=spec.window,
        )
