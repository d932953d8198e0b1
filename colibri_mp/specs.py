"""What a model says of its attention, router and rotary embedding, as plain values, checked when made.

The families fill them in, the kernels read them. No arrays, no files, no compiled code: importing this is cheap.
"""

import math
from dataclasses import dataclass
from typing import Literal

from colibri_mp.errors import CheckpointError

QKNorm = Literal["none", "head", "full"]
RopeType = Literal["default", "linear", "yarn", "llama3"]
Scoring = Literal["softmax", "sigmoid"]

MAX_HEAD_DIM = 512
MAX_EXPERTS = 512
MAX_TOP_K = 64


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Shape and rules of one attention block; `head_dim` is given, never hidden / num_heads.

    `qk_norm`: RMS norm of q and k not at all, over each head, or over the whole projection; before the rotary embedding.
    `clip_qkv`: q, k and v are clamped to [-clip_qkv, clip_qkv] after the norm (OLMoE). `window`: position s is visible from
    t iff 0 <= t - s < window; None: all. `scale` multiplies the scores, usually head_dim^-0.5. The biases of q, k and v come together.
    `sinks`: each head has a logit more in its softmax, whose probability goes nowhere (gpt_oss). `gated`: what the heads give is
    multiplied by the sigmoid of a projection of its own (Qwen3-Next); its rows follow those of q, in the same matrix.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    qk_norm: QKNorm = "none"
    clip_qkv: float | None = None
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    gated: bool = False

    def __post_init__(self) -> None:
        if min(self.hidden, self.num_heads, self.num_kv_heads) <= 0 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"attention of width {self.hidden} with {self.num_heads} heads and {self.num_kv_heads} key-value heads is impossible"
            )
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even and at most {MAX_HEAD_DIM}, not {self.head_dim}")
        if self.qk_norm not in ("none", "head", "full"):
            raise CheckpointError(f"unknown q/k norm {self.qk_norm!r}")
        if self.window is not None and self.window <= 0:
            raise CheckpointError(f"a sliding window of {self.window} tokens is impossible")
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise CheckpointError(f"clip_qkv must be positive, not {self.clip_qkv}")
        if self.gated and (self.qkv_bias or self.qk_norm == "full"):
            raise CheckpointError(
                "attention with a gate and biases of q, k and v, or a norm of all of q, is not supported"
            )

    @property
    def group_size(self) -> int:
        """Query heads that read one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_width(self) -> int:
        """Elements of all query heads of a token: columns of o, and rows of q but for those of a gate."""
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q, those of a gate included."""
        return self.q_width * (2 if self.gated else 1)

    @property
    def kv_width(self) -> int:
        """Elements of all key heads of a token: rows of k and of v."""
        return self.num_kv_heads * self.head_dim


QK_EPS = 1e-6
"""Added to the squares of a gated delta net's q and k before they are divided by their length: fixed in the references."""


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Shape of one gated delta net (arXiv 2412.06464): linear attention over a state of fixed size in place of a cache.

    Each of `num_key_heads` key heads has a query and a key of `key_dim` elements and serves the `group_size` value heads that come
    one after the other; a value head has values of `value_dim` elements and a state [key_dim, value_dim]. q, k and v go through a
    causal convolution over the last `conv_tokens` tokens, each channel by itself. `norm_eps`: of the norms of x and of the heads.
    """

    hidden: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int
    norm_eps: float

    def __post_init__(self) -> None:
        if min(self.hidden, self.num_key_heads, self.num_value_heads) <= 0 or self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"a gated delta net of width {self.hidden} with {self.num_key_heads} key heads and {self.num_value_heads} "
                "value heads is impossible"
            )
        for name, width in (("linear_key_head_dim", self.key_dim), ("linear_value_head_dim", self.value_dim)):
            if not 0 < width <= MAX_HEAD_DIM or width % 16:
                raise CheckpointError(f"{name} must be a multiple of 16 and at most {MAX_HEAD_DIM}, not {width}")
        if not 1 < self.conv_tokens <= 16:
            raise CheckpointError(f"a convolution over {self.conv_tokens} tokens is not supported: 2 to 16 are")

    @property
    def group_size(self) -> int:
        """Value heads of one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_width(self) -> int:
        """Elements of all key heads of a token: rows of q and of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all value heads of a token: rows of v and of z, columns of out."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q, k and v of a token."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The indexer of sparse attention (DSA): which `top_k` positions a row's attention reads, once it sees more than so many.

    `num_heads` queries of `head_dim` are made from the `query_rank` numbers that the attention's queries are made from too, one key from
    the layer's normed input. The key is layer-normed (`norm_eps`), the first `rotary_dim` elements of both turn: pairs are
    neighbours if `interleaved` (GLM-5), else halves (DeepSeek-V3.2).
    """

    hidden: int
    query_rank: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    top_k: int
    interleaved: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.hidden, self.query_rank, self.num_heads, self.top_k) <= 0:
            raise CheckpointError(
                f"an indexer of width {self.hidden} with {self.num_heads} heads from {self.query_rank} numbers that chooses "
                f"{self.top_k} positions is impossible"
            )
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise CheckpointError(
                f"head_dim of an indexer must be even and at most {MAX_HEAD_DIM}, not {self.head_dim}"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise CheckpointError(
                f"{self.rotary_dim} of the {self.head_dim} elements of an indexer's heads turn: must be even and no more than all"
            )

    @property
    def q_width(self) -> int:
        """Elements of all queries of a token."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Shape and rules of one block of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    c = norm(first `kv_lora_rank` of kv_a h), k_rope = rope(the rest); q = q_b norm(q_a h), without `q_lora_rank` q h. Of a head's
    query `nope_dim` elements meet keys made of c, `rope_dim` elements turn and meet k_rope. `lora_eps`: of the norms of q_a and kv_a.
    `scale` multiplies the scores, yarn's factor included. `interleaved`: rotary pairs are neighbours, else halves.
    `indexer`: chooses the positions that a row reads; a layer that `shares_choice` has none of its own and takes what the last layer
    before it that has one has chosen in the same step.
    """

    hidden: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    norm_eps: float
    lora_eps: float = 1e-6
    interleaved: bool = True
    indexer: IndexerSpec | None = None
    shares_choice: bool = False

    def __post_init__(self) -> None:
        if self.indexer is not None and self.q_lora_rank != self.indexer.query_rank:
            raise CheckpointError(
                f"an indexer takes its queries from {self.indexer.query_rank} numbers, q_lora_rank is {self.q_lora_rank}"
            )
        sizes = (self.hidden, self.num_heads, self.kv_lora_rank, self.nope_dim, self.rope_dim, self.v_dim)
        if min(sizes) <= 0 or (self.q_lora_rank is not None and self.q_lora_rank <= 0):
            raise CheckpointError(
                f"latent attention with sizes {sizes} and a query rank of {self.q_lora_rank} is impossible"
            )
        if self.kv_lora_rank % 16 or self.rope_dim % 2:
            raise CheckpointError(
                f"kv_lora_rank must be a multiple of 16, not {self.kv_lora_rank}, and qk_rope_head_dim even, not {self.rope_dim}"
            )

    @property
    def q_width(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * (self.nope_dim + self.rope_dim)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Scores over all experts, the `top_k` largest, their weights divided by their sum iff `norm_topk_prob`, times `scaling`.

    `scoring` "sigmoid" (DeepSeek's noaux_tc): a correction is added to the scores for the choice only. The experts are in `num_groups`
    groups; those of the `kept_groups` with the largest sums of two corrected scores can be chosen, the others cannot. With "softmax"
    (DeepSeek-V2's group_limited_greedy) it is the groups with the largest single scores.
    A bias of the logits, and the correction, are weights of a layer and not known here.
    `top_p` below 1 is lossy and the user's choice, never a checkpoint's: of the top_k only the largest are kept until their sum
    reaches that share of the sum of all top_k; the others are dropped before the division.
    """

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    top_p: float = 1.0
    scoring: Scoring = "softmax"
    num_groups: int = 1
    kept_groups: int = 1
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise CheckpointError(f"unknown scores of a router {self.scoring!r}")
        self._check_groups()
        if not 0 < self.top_p <= 1:
            raise CheckpointError(f"a router that keeps {self.top_p} of its weights is impossible")
        if not 0 < self.top_k <= min(self.num_experts, MAX_TOP_K) or self.num_experts > MAX_EXPERTS:
            raise CheckpointError(
                f"a router to {self.top_k} of {self.num_experts} experts is impossible "
                f"(at most {MAX_TOP_K} of at most {MAX_EXPERTS})"
            )

    @property
    def num_eligible(self) -> int:
        """Experts in the groups that are kept."""
        return self.num_experts // self.num_groups * self.kept_groups

    def _check_groups(self) -> None:
        if self.num_groups == self.kept_groups == 1:
            return
        if not 0 < self.kept_groups <= self.num_groups:
            raise CheckpointError(
                f"a router with {self.scoring} scores and {self.kept_groups} of {self.num_groups} groups"
            )
        if (
            self.num_experts % self.num_groups
            or self.num_experts < 2 * self.num_groups
            or self.num_eligible < self.top_k
        ):
            raise CheckpointError(
                f"a router to {self.top_k} of {self.num_experts} experts in {self.kept_groups} of {self.num_groups} groups is "
                "impossible: groups are equal, have two experts or more, and those kept have as many as are chosen"
            )


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt_oss's activation: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-`limit`."""

    limit: float
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise CheckpointError(f"an activation clamped to {self.limit} is impossible")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """What a model's configuration says about its rotary embedding.

    `original_max_position` (tokens) is needed by yarn and llama3, `factor` by all types but "default".
    `attention_factor` multiplies cosines and sines; None means the rule of the type (see `attention_scaling`).
    """

    theta: float
    rotary_dim: int
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.rope_type not in ("default", "linear", "yarn", "llama3"):
            raise CheckpointError(
                f"rope type {self.rope_type!r} is not supported; supported are default, linear, yarn and llama3"
            )
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise CheckpointError(f"the rotary width must be even and positive, not {self.rotary_dim}")
        if self.theta <= 1.0 or self.factor <= 0.0:
            raise CheckpointError(f"rope theta {self.theta} or factor {self.factor} is out of range")
        if self.rope_type in ("yarn", "llama3") and self.original_max_position <= 0:
            raise CheckpointError(f"rope type {self.rope_type} needs original_max_position_embeddings")

    @property
    def attention_scaling(self) -> float:
        """The factor of cosines and sines: 1 unless yarn, there 0.1 ln(factor) + 1 or the ratio of the two mscales."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
