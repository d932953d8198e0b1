"""A model's forward pass in plain numpy, float64, straight from a checkpoint: no kernels, no processes, nothing clever.

Slow and short. It shows that the checkpoint reader and the families are right by themselves, and it is what to compare with
when a kernel is wrong. T tokens, D hidden, E experts, F width.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint import Checkpoint, ExpertLayer, StoredMatrix, TensorInfo
from colibri_mp.checkpoint.source import to_float32
from colibri_mp.formats import Encoding
from colibri_mp.models import DenseSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec, load_model
from colibri_mp.models.structure import DeltaNetTensors, IndexerTensors, MlaTensors
from colibri_mp.specs import QK_EPS, ClampedSwiGLU, DeltaNetSpec, IndexerSpec, MlaSpec

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: NDArray[np.int64]) -> Floats:
    """8-bit floats: sign, 4 bits of exponent (bias 7), 3 of mantissa; below the smallest exponent without the hidden one."""
    sign, exponent, mantissa = 1.0 - 2 * (codes >> 7), (codes >> 3) & 15, codes & 7
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def dequantise(encoding: Encoding, rows: int, cols: int, parts: list[Bytes]) -> Floats:
    """The values [rows, cols] of a stored matrix."""
    if not encoding.group_size:
        return to_float32(parts[0], encoding.kind.upper()).reshape(rows, cols).astype(float)
    bits = np.unpackbits(parts[0].reshape(rows, -1), axis=1, bitorder="little").reshape(rows, cols, encoding.bits)
    codes = (bits * (1 << np.arange(encoding.bits))).sum(axis=-1)

    if encoding.kind == "fp8":
        return e4m3(codes) * in_tiles(to_float32(parts[1], encoding.scale.upper()).astype(float), rows, cols)

    if encoding.kind == "row":
        signed = codes - 8 if encoding.bits == 4 else parts[0].view(np.int8).reshape(rows, cols)
        return signed * parts[1].view(np.float32).astype(float)[:, None]

    def by_column(part: NDArray[np.float64]) -> Floats:
        return part.reshape(rows, -1).repeat(encoding.group_size, axis=1)

    if encoding.kind == "affine":
        scales, biases = (by_column(to_float32(part, encoding.scale.upper()).astype(float)) for part in parts[1:])
        return codes * scales + biases
    if encoding.kind == "grouped":
        return (codes - 8) * by_column(parts[1].view(np.float32).astype(float))
    scales = e4m3(parts[1].astype(int)) if encoding.kind == "nvfp4" else 2.0 ** (parts[1].astype(float) - 127)
    return (FP4[codes] if encoding.bits == 4 else e4m3(codes)) * by_column(scales)


def in_tiles(scales: Floats, rows: int, cols: int) -> Floats:
    """The scale of each value of a matrix: one for 128 x 128 of them, from the first row and column on; the last tiles are smaller."""
    grid = scales.reshape(-(-rows // 128), -(-cols // 128))
    return grid.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :cols]


def softmax(x: Floats) -> Floats:
    """Over the last axis."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def frequencies(rope: RopeSpec) -> Floats:
    """Radians a position of each pair, default or yarn: slow pairs are interpolated, fast ones kept, those between mixed."""
    dim = rope.rotary_dim
    pairs = np.arange(dim // 2)
    kept = rope.theta ** (-2 * pairs / dim)
    if rope.rope_type == "default":
        return kept
    assert rope.rope_type == "yarn"
    low, high = (
        dim * np.log(rope.original_max_position / (2 * np.pi * turns)) / (2 * np.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((pairs - low) / (high - low), 0, 1)
    return kept / rope.factor * ramp + kept * (1 - ramp)


class PlainModel:
    """A checkpoint that can be run on one sequence from its first token. Methods are small: tests put mistakes into them."""

    refused = -np.inf
    unit_eps = QK_EPS
    read: NDArray[np.bool_]  # what the last layer with an indexer has chosen

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.model: ModelSpec = load_model(checkpoint)

    def logits(self, ids: NDArray[np.int32]) -> Floats:
        """Logits [T, V] after each of the tokens `ids`."""
        x = self.matrix(self.model.embed)[ids]
        for layer in self.model.layers:
            mixers = {MlaSpec: self.latent, DeltaNetSpec: self.delta_net}
            x = x + mixers.get(type(layer.attention), self.attention)(layer, x)
            hidden = self.norm(x, layer.mlp_norm)
            x = x + (self.moe(layer.mlp, hidden) if isinstance(layer.mlp, MoeSpec) else self.dense(layer.mlp, hidden))
        return self.norm(x, self.model.final_norm) @ self.matrix(self.model.head).T

    def matrix(self, stored: StoredMatrix) -> Floats:
        """The values of a matrix."""
        return self.values(stored.encoding, stored.rows, stored.cols, self.checkpoint.read_parts(stored))

    def values(self, encoding: Encoding, rows: int, cols: int, parts: list[Bytes]) -> Floats:
        """The values [rows, cols] of stored parts."""
        return dequantise(encoding, rows, cols, parts)

    def vector(self, info: TensorInfo | None) -> Floats:
        """The values of a bias or correction; 0 if there is none."""
        return np.zeros(1) if info is None else self.checkpoint.read_vector(info).astype(float)

    def norm(self, x: Floats, weight: TensorInfo | None, eps: float | None = None) -> Floats:
        """RMS norm over the last axis; `eps`: another one than the model's."""
        assert weight is not None
        eps = self.model.norm_eps if eps is None else eps
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self.checkpoint.read_vector(weight)

    def rotate(self, heads: Floats) -> Floats:
        """Rotary embedding of [T, heads, head_dim] at positions 0, 1, ...; what is beyond the rotary width stays."""
        half = self.model.rope.rotary_dim // 2
        angles = np.arange(len(heads))[:, None, None] * frequencies(self.model.rope)
        cos, sin = (self.model.rope.attention_scaling * turned for turned in (np.cos(angles), np.sin(angles)))
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def attention(self, layer: LayerSpec, x: Floats) -> Floats:
        """The attention block's addend to x [T, D]."""
        spec, tensors = layer.attention, layer.tensors
        x = self.norm(x, tensors.norm)
        projections = ((tensors.q, tensors.q_bias), (tensors.k, tensors.k_bias), (tensors.v, tensors.v_bias))
        q, k, v = (x @ self.matrix(stored).T + self.vector(bias) for stored, bias in projections)
        q, gate = q[:, : spec.q_width], q[:, spec.q_width :]
        if spec.qk_norm == "full":
            q, k = self.norm(q, tensors.q_norm), self.norm(k, tensors.k_norm)
        q, k, v = (projected.reshape(len(x), -1, spec.head_dim) for projected in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self.norm(q, tensors.q_norm), self.norm(k, tensors.k_norm)
        k, v = (heads.repeat(spec.num_heads // spec.num_kv_heads, axis=1) for heads in (self.rotate(k), v))
        scores = np.einsum("thd,shd->hts", self.rotate(q), k) * spec.scale
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        scores[:, (distance < 0) | (distance >= (spec.window or len(x)))] = -np.inf
        mixed = np.einsum("hts,shd->thd", self.attention_weights(scores, tensors.sinks), v).reshape(len(x), -1)
        if spec.gated:
            mixed = mixed * self.attention_gate(gate)
        return mixed @ self.matrix(tensors.o).T + self.vector(tensors.o_bias)

    def attention_gate(self, gate: Floats) -> Floats:
        """The factors of what the heads give."""
        return sigmoid(gate)

    def delta_net(self, layer: LayerSpec, x: Floats) -> Floats:
        """The gated delta net's addend to x [T, D]."""
        spec, tensors = layer.attention, layer.tensors
        assert isinstance(spec, DeltaNetSpec)
        assert isinstance(tensors, DeltaNetTensors)
        x = self.norm(x, tensors.norm)
        qkv, z, b, a = (x @ self.matrix(stored).T for stored in (tensors.qkv, tensors.z, tensors.b, tensors.a))
        q, k, v = np.split(self.convolve(qkv, tensors.conv), [spec.key_width, 2 * spec.key_width], axis=1)
        q, k = (rows.reshape(len(x), spec.num_key_heads, spec.key_dim) for rows in (q, k))
        q, k = (self.repeat(self.unit(heads), spec.group_size) for heads in (q, k))
        v = v.reshape(len(x), spec.num_value_heads, spec.value_dim)
        softplus = np.logaddexp(0, a + self.vector(tensors.dt_bias))
        decay, beta = np.exp(-np.exp(self.vector(tensors.a_log)) * softplus), sigmoid(b)
        state = np.zeros((spec.num_value_heads, spec.key_dim, spec.value_dim))
        rows = []
        for t in range(len(x)):
            row, state = self.advance(state, q[t] * spec.key_dim**-0.5, k[t], v[t], decay[t, :, None], beta[t, :, None])
            rows.append(row)
        heads = self.norm(np.array(rows), tensors.head_norm).reshape(len(x), -1)
        return self.gate_heads(heads, z) @ self.matrix(tensors.out).T

    def convolve(self, rows: Floats, weight: TensorInfo) -> Floats:
        """silu of each channel's sum over the last tokens, the current one times the last weight."""
        taps = self.taps(self.vector(weight).reshape(rows.shape[1], -1))
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, rows.shape[1])), rows])
        mixed = sum((padded[i : i + len(rows)] * taps[:, i] for i in range(taps.shape[1])), np.zeros_like(rows))
        return mixed * sigmoid(mixed)

    def taps(self, weight: Floats) -> Floats:
        """The weights [channels, tokens], those of the current token last."""
        return weight

    def unit(self, heads: Floats) -> Floats:
        """Each head divided by its length."""
        return heads / np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + self.unit_eps)

    def repeat(self, heads: Floats, count: int) -> Floats:
        """Key heads for all value heads: those of one key head follow one another."""
        return heads.repeat(count, axis=1)

    def advance(
        self, state: Floats, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
    ) -> tuple[Floats, Floats]:
        """One token through the states [heads, key_dim, value_dim]: what comes out [heads, value_dim], and the states after it."""
        state = state * decay[:, None]
        delta = beta * (v - np.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * delta[:, None, :]
        return np.einsum("hkv,hk->hv", state, q), state

    def gate_heads(self, heads: Floats, z: Floats) -> Floats:
        """What the normed heads give."""
        return heads * z * sigmoid(z)

    def latent(self, layer: LayerSpec, x: Floats) -> Floats:
        """The addend of latent attention to x [T, D], with keys and values unfolded as they were before they were projected down."""
        spec, tensors = layer.attention, layer.tensors
        x = self.norm(x, tensors.norm)
        q_source = x
        if tensors.q_a is not None:
            q_source = self.norm(x @ self.matrix(tensors.q_a).T, tensors.q_a_norm, spec.lora_eps)
        q = (q_source @ self.matrix(tensors.q).T).reshape(len(x), spec.num_heads, -1)
        q_nope, q_rope = np.split(q, [spec.nope_dim], axis=-1)
        latent, k_rope = np.split(x @ self.matrix(tensors.kv_a).T, [spec.kv_lora_rank], axis=-1)
        latent, k_rope = self.norm(latent, tensors.kv_a_norm, spec.lora_eps), self.rope_key(spec, k_rope)
        unfold_k, unfold_v = self.unfolding(spec, tensors)
        scores = np.einsum("thd,hdl,sl->hts", q_nope, unfold_k, latent)
        scores += np.einsum(
            "thd,sd->hts", self.rotate_pairs(spec, q_rope), self.rotate_pairs(spec, k_rope[:, None])[:, 0]
        )
        if spec.indexer is not None and tensors.indexer is not None:
            self.read = self.read_positions(spec.indexer, tensors.indexer, x, q_source)
        visible = np.arange(len(x))[:, None] >= np.arange(len(x))
        scores[:, ~(visible if spec.indexer is None else visible & self.read)] = -np.inf
        mixed = np.einsum("hts,sl,hvl->thv", softmax(scores * spec.scale), latent, unfold_v, optimize=True)
        return mixed.reshape(len(x), -1) @ self.matrix(tensors.o).T

    def read_positions(
        self, spec: IndexerSpec, tensors: IndexerTensors, x: Floats, q_source: Floats
    ) -> NDArray[np.bool_]:
        """Which positions each row reads [T, T]: those with the largest scores of the indexer, of equal ones the first."""
        q = (q_source @ self.matrix(tensors.q).T).reshape(len(x), spec.num_heads, -1)
        k = self.layer_norm(x @ self.matrix(tensors.k).T, tensors, spec.norm_eps)
        q, k = self.turn_index(spec, q), self.turn_index(spec, k[:, None])[:, 0]
        gates = x @ self.matrix(tensors.gates).T
        scores = np.einsum("th,ths->ts", gates, self.index_activation(np.einsum("thd,sd->ths", q, k)))
        scores[np.arange(len(x))[:, None] < np.arange(len(x))] = -np.inf
        read = np.zeros(scores.shape, bool)
        np.put_along_axis(read, np.argsort(-scores, axis=1, kind="stable")[:, : spec.top_k], True, axis=1)
        return read

    def layer_norm(self, keys: Floats, tensors: IndexerTensors, eps: float) -> Floats:
        """Of the indexer's keys [T, head_dim]."""
        centred = keys - keys.mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
        return normed * self.vector(tensors.k_norm) + self.vector(tensors.k_bias)

    def turn_index(self, spec: IndexerSpec, heads: Floats) -> Floats:
        """Rotary embedding of the first elements of [T, heads, head_dim]."""
        turned, rest = np.split(heads, [spec.rotary_dim], axis=-1)
        if spec.interleaved:
            turned = np.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1)
        return np.concatenate([self.rotate(turned), rest], axis=-1)

    def index_activation(self, products: Floats) -> Floats:
        """Of the products of a head's query and a key."""
        return np.maximum(products, 0)

    def rope_key(self, spec: MlaSpec, key: Floats) -> Floats:
        """What becomes of the key that turns, [T, rope], before it turns: nothing."""
        del spec
        return key

    def rotate_pairs(self, spec: MlaSpec, heads: Floats) -> Floats:
        """Rotary embedding of [T, heads, rope]: pairs are neighbours if the spec says so."""
        if spec.interleaved:
            heads = np.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)
        return self.rotate(heads)

    def unfolding(self, spec: MlaSpec, tensors: MlaTensors) -> tuple[Floats, Floats]:
        """From latents to keys [heads, nope, L] and to values [heads, v, L]."""
        if tensors.kv_b is not None:
            both = self.matrix(tensors.kv_b).reshape(spec.num_heads, -1, spec.kv_lora_rank)
            return both[:, : spec.nope_dim], both[:, spec.nope_dim :]
        assert tensors.embed_q is not None
        assert tensors.unembed is not None
        keys = self.matrix(tensors.embed_q).reshape(spec.num_heads, spec.kv_lora_rank, -1).transpose(0, 2, 1)
        return keys, self.matrix(tensors.unembed).reshape(spec.num_heads, -1, spec.kv_lora_rank)

    def attention_weights(self, scores: Floats, sinks: TensorInfo | None) -> Floats:
        """Softmax of the scores [heads, T, S]; a head's sink takes part in it and is dropped."""
        if sinks is None:
            return softmax(scores)
        column = np.broadcast_to(self.vector(sinks)[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate([scores, column], axis=-1))[..., :-1]

    def moe(self, spec: MoeSpec, x: Floats) -> Floats:
        """The sum of each token's chosen experts."""
        logits = x @ self.matrix(spec.gate).T + self.vector(spec.gate_bias)
        scores = softmax(logits) if spec.router.scoring == "softmax" else sigmoid(logits)
        choice = self.choice(spec, scores)
        chosen = np.argsort(-choice, axis=1, kind="stable")[:, : spec.router.top_k]
        weights = np.zeros_like(scores)
        np.put_along_axis(weights, chosen, np.take_along_axis(self.weights(scores, choice), chosen, axis=1), axis=1)
        if spec.router.norm_topk_prob:
            weights /= weights.sum(axis=1, keepdims=True)
        weights *= self.scaling(spec)
        experts = (self.expert(spec.experts, expert) for expert in range(spec.router.num_experts))
        routed = sum((weights[:, [e]] * self.swiglu(x, *parts) for e, parts in enumerate(experts)), np.zeros_like(x))
        return routed + self.shared(spec, x)

    def choice(self, spec: MoeSpec, scores: Floats) -> Floats:
        """What experts are chosen by: corrected scores, and `refused` in groups that are not among the best."""
        choice = scores + self.vector(spec.correction)
        groups = choice.reshape(len(choice), spec.router.num_groups, -1)
        if spec.router.kept_groups < spec.router.num_groups:
            best = self.group_scores(spec, groups)
            least = np.sort(best, axis=-1)[:, -spec.router.kept_groups, None]
            groups = np.where((best >= least)[..., None], groups, self.refused)
        return groups.reshape(choice.shape)

    def group_scores(self, spec: MoeSpec, groups: Floats) -> Floats:
        """What groups of experts [T, groups, size] are kept by."""
        count = 2 if spec.router.scoring == "sigmoid" else 1
        return np.sort(groups, axis=-1)[..., -count:].sum(axis=-1)

    def weights(self, scores: Floats, choice: Floats) -> Floats:
        """What an expert's weight is made from."""
        del choice
        return scores

    def scaling(self, spec: MoeSpec) -> float:
        """The factor of the weights of routed experts."""
        return spec.router.scaling

    def shared(self, spec: MoeSpec, x: Floats) -> Floats:
        """The shared expert, or 0."""
        if spec.shared is None:
            return np.zeros_like(x)
        share = 1.0 if spec.shared_gate is None else sigmoid(x @ self.matrix(spec.shared_gate).T)
        return share * self.dense(spec.shared, x)

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Any, ...]:
        """gate, up [F, D] and down [D, F] of one expert; if it has them, their biases; the activation."""
        places = zip(layer.file_idx[expert], layer.offset[expert], layer.piece_bytes, strict=True)
        pieces = [self.checkpoint.read(int(file_idx), int(offset), int(nbytes)) for file_idx, offset, nbytes in places]
        if layer.arrangement != "separate":
            return (*self.gpt_oss_expert(layer, pieces), layer.clamp)
        num_gate, num_up = len(layer.gate.parts), len(layer.up.parts)
        return (
            self.values(layer.gate, layer.width, layer.hidden, pieces[:num_gate]),
            self.values(layer.up, layer.width, layer.hidden, pieces[num_gate : num_gate + num_up]),
            self.values(layer.down, layer.hidden, layer.width, pieces[num_gate + num_up :]),
        )

    def gpt_oss_expert(self, layer: ExpertLayer, pieces: list[Bytes]) -> tuple[Floats, ...]:
        """gate, up, down and their biases: gate and up take turns, by rows in MXFP4, by columns of [in, out] in bf16."""
        *matrices, both_bias, down_bias = pieces
        wide = 2 * layer.width
        if layer.arrangement == "interleaved":
            both, down = (
                self.mxfp4(wide, layer.hidden, matrices[:2]),
                self.mxfp4(layer.hidden, layer.width, matrices[2:]),
            )
        else:
            both = dequantise(layer.gate, layer.hidden, wide, matrices[:1]).T
            down = dequantise(layer.down, layer.width, layer.hidden, matrices[1:]).T
        bias, down_bias = (to_float32(part, layer.bias.upper()).astype(float) for part in (both_bias, down_bias))
        return both[0::2], both[1::2], down, bias[0::2], bias[1::2], down_bias

    def mxfp4(self, rows: int, cols: int, parts: list[Bytes]) -> Floats:
        """Codes low nibble first, a power of two for each 32 of them."""
        return dequantise(Encoding("mxfp4", 4, 32, "u8"), rows, cols, parts)

    def dense(self, spec: DenseSpec, x: Floats) -> Floats:
        """A dense block."""
        return self.swiglu(x, self.matrix(spec.gate), self.matrix(spec.up), self.matrix(spec.down))

    def swiglu(self, x: Floats, gate: Floats, up: Floats, down: Floats, *more: Any) -> Floats:
        """down(silu(gate x) * up x) of x [T, D]; with biases and a clamp, gpt_oss's."""
        if more:
            gate_bias, up_bias, down_bias, clamp = more
            return self.clamped(x @ gate.T + gate_bias, x @ up.T + up_bias, clamp) @ down.T + down_bias
        gated = x @ gate.T
        return (gated * sigmoid(gated) * (x @ up.T)) @ down.T

    def clamped(self, gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
        """(up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up from both sides."""
        gate, up = np.minimum(gate, clamp.limit), np.clip(up, -clamp.limit, clamp.limit)
        return (up + 1) * gate * sigmoid(clamp.alpha * gate)
