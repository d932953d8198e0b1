"""What families with multi-head latent attention share: its fields in config.json, and its tensors.

Reference: transformers/models/deepseek_v3/modeling_deepseek_v3.py.
"""

from typing import Any

from colibri_mp.checkpoint.matrices import Piece, Shape, StoredMatrix, TensorTable
from colibri_mp.models.config import ConfigReader, read_rope
from colibri_mp.models.decoder import DecoderConfig, decoder_with, find_norm
from colibri_mp.models.structure import MlaTensors
from colibri_mp.specs import MlaSpec, RopeSpec, yarn_mscale


def read_latent_decoder(config: ConfigReader, *, default_eps: float = 1e-6, interleaved: bool = True) -> DecoderConfig:
    """The fields of a decoder all of whose layers have latent attention. The norms of q_a and kv_a have a fixed eps of 1e-6.

    `interleaved`: where the config does not say whether rotary pairs are neighbours.
    """
    config.require("hidden_act", config.text("hidden_act", default="silu"), "silu")
    config.require("attention_bias", config.flag("attention_bias", default=False), False)
    nope_dim, rope_dim = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
    rope = read_rope(config, rope_dim, default_theta=10_000.0)
    spec = MlaSpec(
        hidden=config.whole("hidden_size"),
        num_heads=config.whole("num_attention_heads"),
        q_lora_rank=config.whole("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_lora_rank=config.whole("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.whole("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _score_factor(rope),
        norm_eps=config.positive("rms_norm_eps", default=default_eps),
        interleaved=config.flag("rope_interleave", default=interleaved),
    )
    return decoder_with(config, spec, rope)


def find_latent_attention(table: TensorTable, layer_path: str, spec: MlaSpec) -> MlaTensors:
    """The tensors of latent attention of the layer `layer_path`."""
    path, rank = f"{layer_path}.self_attn", spec.q_lora_rank
    q_rows = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
    kv_rows = Shape((spec.kv_lora_rank + spec.rope_dim, spec.hidden), "kv_lora_rank + qk_rope_head_dim, hidden_size")
    o_rows = Shape((spec.hidden, spec.num_heads * spec.v_dim), "hidden_size, num_attention_heads * v_head_dim")
    if rank is None:
        q: dict[str, Any] = {
            "q": table.matrix(f"{path}.q_proj", Shape((spec.q_width, spec.hidden), f"{q_rows}, hidden_size"))
        }
        q_norm = None
    else:
        q = {
            "q_a": table.matrix(f"{path}.q_a_proj", Shape((rank, spec.hidden), "q_lora_rank, hidden_size")),
            "q": table.matrix(f"{path}.q_b_proj", Shape((spec.q_width, rank), f"{q_rows}, q_lora_rank")),
        }
        q_norm = table.vector(f"{path}.q_a_layernorm.weight", Shape((rank,), "q_lora_rank"))
    return MlaTensors(
        norm=find_norm(table, f"{layer_path}.input_layernorm", spec.hidden),
        **q,
        q_a_norm=q_norm,
        kv_a=table.matrix(f"{path}.kv_a_proj_with_mqa", kv_rows),
        kv_a_norm=table.vector(f"{path}.kv_a_layernorm.weight", Shape((spec.kv_lora_rank,), "kv_lora_rank")),
        **_find_kv_b(table, path, spec),
        o=table.matrix(f"{path}.o_proj", o_rows),
    )


def _find_kv_b(table: TensorTable, path: str, spec: MlaSpec) -> dict[str, Any]:
    """As published, or its halves as MLX keeps them."""
    if f"{path}.embed_q.weight" in table:
        heads, latent = spec.num_heads, spec.kv_lora_rank
        queries = Shape((heads, latent, spec.nope_dim), "num_attention_heads, kv_lora_rank, qk_nope_head_dim")
        values = Shape((heads, spec.v_dim, latent), "num_attention_heads, v_head_dim, kv_lora_rank")
        return {
            "embed_q": _stack(table, f"{path}.embed_q", queries),
            "unembed": _stack(table, f"{path}.unembed_out", values),
        }
    rows = spec.num_heads * (spec.nope_dim + spec.v_dim)
    meaning = "num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank"
    return {"kv_b": table.matrix(f"{path}.kv_b_proj", Shape((rows, spec.kv_lora_rank), meaning))}


def _stack(table: TensorTable, path: str, shape: Shape) -> StoredMatrix:
    """A stack of matrices as one, its rows one matrix after the other."""
    encoding, parts = table.parts(path, shape)
    count, rows, cols = shape.dims
    pieces = tuple(Piece(part.file_idx, part.offset, part.nbytes) for part in parts)
    return StoredMatrix(path, count * rows, cols, encoding, pieces)


def _score_factor(rope: RopeSpec) -> float:
    """Squared, since the reference would have it in queries and keys; 1 without scaling, or where `mscale_all_dim` is absent or 0."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
