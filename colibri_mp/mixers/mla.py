"""Multi-head latent attention as a kind of mixer: `kernels.mla` on a cache of latents and rope keys.

With an indexer (DSA) its keys are in the cache too; layers without one of their own have a cache without.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from colibri_mp.formats import Encoding
from colibri_mp.kernels.indexer import IndexerWeights
from colibri_mp.kernels.latent_cache import LATENT_CACHES, LatentCache
from colibri_mp.kernels.layout import BLOCK_ROWS, packed_bytes
from colibri_mp.kernels.mla import MlaStage
from colibri_mp.kernels.mla_weights import Absorbed, MlaWeights, absorb, pad_values, padded_bytes
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.mixers.kind import MixerKind, StageLimits, WeightReader
from colibri_mp.models.structure import IndexerTensors, MlaTensors
from colibri_mp.specs import MlaSpec


@dataclass(frozen=True)
class LatentShape:
    """A latent and a rope key for each position, and a key of the indexer if `index_dim` is not 0."""

    latent_dim: int
    rope_dim: int
    index_dim: int
    bits: int

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of a cache of this shape."""
        tile_bytes = LATENT_CACHES[self.bits].tile_bytes(self.latent_dim, self.rope_dim, self.index_dim)
        return num_layers * num_blocks * tile_bytes

    def make(self, num_layers: int, num_blocks: int) -> LatentCache:
        """A cache."""
        return LATENT_CACHES[self.bits](num_layers, num_blocks, self.latent_dim, self.rope_dim, self.index_dim)


class Mla(MixerKind):
    """See the module docstring."""

    block = "latent attention"

    def stage_spec(self, spec: MlaSpec) -> MlaSpec:
        """Layers that share a choice of positions have the stage that made it."""
        return replace(spec, shares_choice=False)

    def continues(self, spec: MlaSpec) -> bool:
        """A choice belongs to the rows of one step."""
        return spec.shares_choice

    def cache_shape(self, spec: MlaSpec, kv_bits: int) -> LatentShape:
        """All heads read the same."""
        index_dim = 0 if spec.indexer is None or spec.shares_choice else spec.indexer.head_dim
        return LatentShape(spec.kv_lora_rank, spec.rope_dim, index_dim, kv_bits)

    def make_stage(self, team: ThreadTeam, spec: MlaSpec, tables: RopeTables, limits: StageLimits) -> MlaStage:
        """The stage for these layers."""
        return MlaStage(team, spec, tables, limits.max_rows, limits.max_context, limits.planes, limits.kv_bits)

    def scratch_bytes(self, spec: MlaSpec, tensors: Sequence[MlaTensors], limits: StageLimits) -> int:
        """Depends on the shape alone."""
        del tensors
        return MlaStage.scratch_bytes(spec, limits.max_rows, limits.max_context, limits.num_threads)

    def matrix_bytes(self, spec: MlaSpec, tensors: MlaTensors) -> int:
        """kv_b is kept in another form, and unembed's heads in whole blocks."""
        plain = [matrix for matrix in tensors.matrices if matrix not in (tensors.kv_b, tensors.unembed)]
        others = sum(packed_bytes(matrix.encoding.format, matrix.rows, matrix.cols) for matrix in plain)
        if tensors.kv_b is not None:
            return others + Absorbed.of(tensors.kv_b.encoding, spec).nbytes(spec)
        assert tensors.unembed is not None
        return others + padded_bytes(tensors.unembed.encoding.format, spec)

    def encodings(self, spec: MlaSpec, tensors: MlaTensors) -> Iterable[Encoding]:
        """Those of the checkpoint, and what kv_b becomes."""
        yield from super().encodings(spec, tensors)
        if tensors.kv_b is not None:
            yield Absorbed.of(tensors.kv_b.encoding, spec).uk
        if spec.nope_dim % BLOCK_ROWS or spec.v_dim % BLOCK_ROWS:
            yield Encoding("f32")

    def load(self, reader: WeightReader, spec: MlaSpec, tensors: MlaTensors) -> MlaWeights:
        """Each projection packed, kv_b absorbed."""
        norm, kv_a_norm = reader.vector(tensors.norm), reader.vector(tensors.kv_a_norm)
        assert norm is not None
        assert kv_a_norm is not None
        if tensors.kv_b is not None:
            parts = absorb(tensors.kv_b.encoding, reader.parts(tensors.kv_b), spec)
        else:
            assert tensors.embed_q is not None
            assert tensors.unembed is not None
            parts = {"uk": reader.matrix(tensors.embed_q), "uv": pad_values(reader.matrix(tensors.unembed), spec)}
        return MlaWeights(
            norm=norm,
            q_a=None if tensors.q_a is None else reader.matrix(tensors.q_a),
            q_a_norm=reader.vector(tensors.q_a_norm),
            q=reader.matrix(tensors.q),
            kv_a=reader.matrix(tensors.kv_a),
            kv_a_norm=kv_a_norm,
            o=reader.matrix(tensors.o),
            indexer=None if tensors.indexer is None else _load_indexer(reader, tensors.indexer),
            **parts,
        )


def _load_indexer(reader: WeightReader, tensors: IndexerTensors) -> IndexerWeights:
    k_norm, k_bias = reader.vector(tensors.k_norm), reader.vector(tensors.k_bias)
    assert k_norm is not None
    assert k_bias is not None
    q, k, gates = (reader.matrix(matrix) for matrix in (tensors.q, tensors.k, tensors.gates))
    return IndexerWeights(q, k, gates, k_norm, k_bias)
