"""How much memory a stage of latent attention takes, and how its queries are cut into chunks."""

from typing import ClassVar

from colibri_mp.kernels.attention_tiles import SCORE_STRIDE, SPLIT_TOKENS
from colibri_mp.kernels.indexer import Indexer
from colibri_mp.kernels.latent_cache import padded
from colibri_mp.kernels.mla_heads import TOKENS_A_PASS
from colibri_mp.kernels.mla_tiles import PART_BYTES, VECTOR_BYTES, VECTORS, WIDTH
from colibri_mp.specs import MlaSpec

CHUNK_QUERIES = 64
"""Query vectors that share a pass over the cache: the more, the less turning of tiles is in it; scratch is for the second-level cache."""

MAX_PARTIALS_BYTES = 64 << 20
"""Room for partials when the splits of one chunk are shared among threads; a longer context is not shared."""

ITEMS_A_THREAD = 4
"""Chunks for each thread, below which their splits are shared."""


def _heads_a_chunk(num_heads: int, num_threads: int) -> int:
    """A divisor of the heads, at most CHUNK_QUERIES; less where threads would have nothing to do."""
    divisors = [n for n in range(1, min(num_heads, CHUNK_QUERIES) + 1) if num_heads % n == 0]
    shared = [n for n in divisors if num_heads // n >= num_threads and n >= 2 * WIDTH]
    return max(shared or divisors)


def _prepared_bytes(cols: int) -> int:
    """Bytes of a prepared row, at most."""
    return cols * 9 // 2 + 128


class MlaSizes:
    """Sizes and offsets in bytes of a stage's memory (see `mla_core` for the layouts).

    A thread's scratch holds the packed queries of a chunk and what the core needs beside them, or, in the phases that go by rows or heads,
    a row, or the prepared rows of TOKENS_A_PASS tokens with the table of their addresses and one row more.
    """

    FRAME_FIELDS: ClassVar[tuple[str, ...]] = (
        *("group_size", "head_chunks", "v_padded", "key_width", "max_queries", "value_parts", "largest_offset"),
        *("scores_offset", "keys_offset", "rows_offset", "partial_offset", "merged_offset", "factors_offset"),
        *("table_offset", "row_offset", "scratch_bytes", "partial_bytes"),
    )

    def __init__(self, spec: MlaSpec, max_tokens: int, max_context: int, num_threads: int) -> None:
        heads, latent = spec.num_heads, spec.kv_lora_rank
        self.v_padded, self.key_width = padded(spec.v_dim), padded(latent + spec.rope_dim)
        self.widths = {
            "q_a": spec.q_lora_rank or 16,
            "kv_a": latent + spec.rope_dim,
            "q": max(spec.q_width, heads * self.v_padded),
            "latents": heads * latent,
            "out": spec.hidden,
        }
        context = heads * spec.v_dim
        largest = max(spec.hidden, spec.q_lora_rank or 0, context)
        self.prepared_bytes = (_prepared_bytes(largest), _prepared_bytes(spec.hidden))
        self._cut_queries(heads, num_threads)
        self._lay_out(spec, max_tokens, max_context, num_threads)
        most_read = max_context if spec.indexer is None else min(max_context, spec.indexer.top_k)
        num_splits = -(-most_read // SPLIT_TOKENS)
        wanted = ITEMS_A_THREAD * num_threads * num_splits if num_threads > 1 and num_splits > 1 else 0
        self.num_partials = min(wanted, MAX_PARTIALS_BYTES // self.partial_bytes)

    def _cut_queries(self, heads: int, num_threads: int) -> None:
        """How many heads and rows make a chunk."""
        self.group_size = _heads_a_chunk(heads, num_threads)
        self.head_chunks = heads // self.group_size
        self.rows_a_place = max(1, CHUNK_QUERIES // self.group_size)
        self.max_queries = -(-self.group_size * self.rows_a_place // 16) * 16

    def _lay_out(self, spec: MlaSpec, max_tokens: int, max_context: int, num_threads: int) -> None:
        parts = -(-spec.kv_lora_rank // 16)
        self.value_parts = -(-parts // VECTORS) * VECTORS
        self.largest_offset = self.max_queries * self.value_parts * VECTOR_BYTES
        self.partial_bytes = self.largest_offset + self.max_queries * 8
        self.scores_offset = self.max_queries * self.key_width * 4
        self.keys_offset = self.scores_offset + self.max_queries * SCORE_STRIDE * 4
        self.rows_offset = self.keys_offset + self.key_width * VECTORS * VECTOR_BYTES
        self.partial_offset = self.rows_offset + self.key_width // 16 * PART_BYTES
        self.merged_offset = self.partial_offset + self.partial_bytes
        self.factors_offset = self.merged_offset + self.partial_bytes
        core_bytes = self.factors_offset + self.max_queries * 8
        self.head_row_bytes = _prepared_bytes(max(spec.kv_lora_rank, spec.nope_dim))
        self.table_offset = -(-min(max_tokens, TOKENS_A_PASS) * self.head_row_bytes // 64) * 64
        self.row_offset = self.table_offset + 8 * TOKENS_A_PASS
        heads_bytes = self.row_offset + padded(max(spec.nope_dim, spec.rope_dim)) * 4
        index_bytes = (
            0 if spec.indexer is None else Indexer.thread_scratch_bytes(spec.indexer, max_context, num_threads)
        )
        self.scratch_bytes = -(-max(core_bytes, heads_bytes, padded(spec.hidden) * 4, index_bytes) // 64) * 64
