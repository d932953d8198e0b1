"""The indexer of sparse attention (DSA) in a checkpoint: its spec, which layers have one, its tensors.

Reference: transformers/models/glm_moe_dsa. A layer without an indexer reads the positions that the last one before it with an indexer
has chosen in the same step. Which they are is said in one of four ways, the first that is there counts:

    indexer_types              ["full", "shared", ...]
    index_topk_pattern         "FFSS...", or such a list
    index_topk_freq, index_skip_topk_offset     f and o (default 2): layer i is full iff max(i - o + 1, 0) % f == 0
    none of them               all layers are full
"""

from colibri_mp.checkpoint.matrices import Shape, TensorTable
from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.structure import IndexerTensors
from colibri_mp.specs import IndexerSpec

_LETTERS = {"F": "full", "S": "shared"}


def read_indexer(config: ConfigReader, hidden: int, query_rank: int, rotary_dim: int) -> IndexerSpec:
    """The fields `index_*`; defaults are the reference's."""
    return IndexerSpec(
        hidden=hidden,
        query_rank=query_rank,
        num_heads=config.whole("index_n_heads", default=32),
        head_dim=config.whole("index_head_dim", default=128),
        rotary_dim=rotary_dim,
        top_k=config.whole("index_topk", default=2048),
        interleaved=config.flag("indexer_rope_interleave", default=True),
    )


def read_indexer_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Of each layer whether it has an indexer of its own. Lists may go on with the layers that predict further tokens."""
    name, types = _stated_types(config)
    if not types:
        frequency = config.whole("index_topk_freq", default=1)
        offset = config.whole("index_skip_topk_offset", default=2, least=0)
        name = "index_topk_freq, index_skip_topk_offset"
        types = ["shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(num_layers)]
    for kind in types:
        config.require(name, kind, "full", "shared")
    if len(types) < num_layers:
        raise CheckpointError(f"config.json: {name} names {len(types)} layers, num_hidden_layers = {num_layers}")
    if types[0] != "full":
        raise CheckpointError(f"config.json: {name}: the first layer has no other whose choice it could share")
    return tuple(kind == "full" for kind in types[:num_layers])


def find_indexer(table: TensorTable, path: str, spec: IndexerSpec) -> IndexerTensors:
    """The tensors of the indexer `path`."""
    keys = Shape((spec.head_dim,), "index_head_dim")
    return IndexerTensors(
        q=table.matrix(
            f"{path}.wq_b", Shape((spec.q_width, spec.query_rank), "index_n_heads * index_head_dim, q_lora_rank")
        ),
        k=table.matrix(f"{path}.wk", Shape((spec.head_dim, spec.hidden), "index_head_dim, hidden_size")),
        gates=table.matrix(f"{path}.weights_proj", Shape((spec.num_heads, spec.hidden), "index_n_heads, hidden_size")),
        k_norm=table.vector(f"{path}.k_norm.weight", keys),
        k_bias=table.vector(f"{path}.k_norm.bias", keys),
    )


def _stated_types(config: ConfigReader) -> tuple[str, list[str]]:
    """The field that lists the layers, and its list; empty if there is none."""
    if config.has("indexer_types"):
        return "indexer_types", config.text_list("indexer_types")
    if not config.has("index_topk_pattern"):
        return "", []
    if config.is_list("index_topk_pattern"):
        return "index_topk_pattern", config.text_list("index_topk_pattern")
    return "index_topk_pattern", [_LETTERS.get(letter, letter) for letter in config.text("index_topk_pattern")]
