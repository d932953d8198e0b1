"""A model's forward pass in plain numpy, float64, straight from a checkpoint: no kernels, no processes, nothing clever.

Slow and short. It shows that the checkpoint reader and the families are right by themselves, and it is what to compare with
when a kernel is wrong. T tokens, D hidden, E experts, F width.
"""

import numpy as np
from numpy.typing import NDArray

from colibri_mp.checkpoint import Checkpoint, ExpertLayer, StoredMatrix, TensorInfo
from colibri_mp.checkpoint.source import to_float32
from colibri_mp.formats import Encoding
from colibri_mp.models import DenseSpec, LayerSpec, ModelSpec, MoeSpec, load_model

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

    def by_column(part: NDArray[np.float64]) -> Floats:
        return part.reshape(rows, -1).repeat(encoding.group_size, axis=1)

    if encoding.kind == "affine":
        scales, biases = (by_column(to_float32(part, encoding.scale.upper()).astype(float)) for part in parts[1:])
        return codes * scales + biases
    scales = e4m3(parts[1].astype(int)) if encoding.kind == "nvfp4" else 2.0 ** (parts[1].astype(float) - 127)
    return (FP4[codes] if encoding.bits == 4 else e4m3(codes)) * by_column(scales)


def softmax(x: Floats) -> Floats:
    """Over the last axis."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


class PlainModel:
    """A checkpoint that can be run on one sequence from its first token."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.model: ModelSpec = load_model(checkpoint)

    def logits(self, ids: NDArray[np.int32]) -> Floats:
        """Logits [T, V] after each of the tokens `ids`."""
        x = self.matrix(self.model.embed)[ids]
        for layer in self.model.layers:
            x = x + self.attention(layer, x)
            hidden = self.norm(x, layer.mlp_norm)
            x = x + (self.moe(layer.mlp, hidden) if isinstance(layer.mlp, MoeSpec) else self.dense(layer.mlp, hidden))
        return self.norm(x, self.model.final_norm) @ self.matrix(self.model.head).T

    def matrix(self, stored: StoredMatrix) -> Floats:
        """The values of a matrix."""
        return dequantise(stored.encoding, stored.rows, stored.cols, self.checkpoint.read_parts(stored))

    def norm(self, x: Floats, weight: TensorInfo | None) -> Floats:
        """RMS norm over the last axis."""
        assert weight is not None
        return (
            x
            / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.model.norm_eps)
            * self.checkpoint.read_vector(weight)
        )

    def rotate(self, heads: Floats) -> Floats:
        """Rotary embedding of [T, heads, head_dim] at positions 0, 1, ... (the default type)."""
        dim = self.model.rope.rotary_dim
        frequencies = self.model.rope.theta ** (-np.arange(0, dim, 2) / dim)
        angles = np.arange(len(heads))[:, None, None] * frequencies
        first, second = heads[..., : dim // 2], heads[..., dim // 2 :]
        turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
        return np.concatenate(turned, axis=-1)

    def attention(self, layer: LayerSpec, x: Floats) -> Floats:
        """The attention block's addend to x [T, D]."""
        spec, tensors = layer.attention, layer.tensors
        x = self.norm(x, tensors.norm)
        q, k, v = (x @ self.matrix(stored).T for stored in (tensors.q, tensors.k, tensors.v))
        if spec.qk_norm == "full":
            q, k = self.norm(q, tensors.q_norm), self.norm(k, tensors.k_norm)
        q, k, v = (projected.reshape(len(x), -1, spec.head_dim) for projected in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self.norm(q, tensors.q_norm), self.norm(k, tensors.k_norm)
        k, v = (heads.repeat(spec.num_heads // spec.num_kv_heads, axis=1) for heads in (self.rotate(k), v))
        scores = np.einsum("thd,shd->hts", self.rotate(q), k) * spec.scale
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        scores[:, (distance < 0) | (distance >= (spec.window or len(x)))] = -np.inf
        mixed = np.einsum("hts,shd->thd", softmax(scores), v)
        return mixed.reshape(len(x), -1) @ self.matrix(tensors.o).T

    def moe(self, spec: MoeSpec, x: Floats) -> Floats:
        """The sum of each token's chosen experts."""
        probabilities = softmax(x @ self.matrix(spec.gate).T)
        chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, : spec.router.top_k]
        weights = np.zeros_like(probabilities)
        np.put_along_axis(weights, chosen, np.take_along_axis(probabilities, chosen, axis=1), axis=1)
        if spec.router.norm_topk_prob:
            weights /= weights.sum(axis=1, keepdims=True)
        experts = (self.expert(spec.experts, expert) for expert in range(spec.router.num_experts))
        return sum((weights[:, [e]] * swiglu(x, *matrices) for e, matrices in enumerate(experts)), np.zeros_like(x))

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Floats, Floats, Floats]:
        """gate, up [F, D] and down [D, F] of one expert."""
        places = zip(layer.file_idx[expert], layer.offset[expert], layer.piece_bytes, strict=True)
        pieces = [self.checkpoint.read(int(file_idx), int(offset), int(nbytes)) for file_idx, offset, nbytes in places]
        num_gate, num_up = len(layer.gate.parts), len(layer.up.parts)
        return (
            dequantise(layer.gate, layer.width, layer.hidden, pieces[:num_gate]),
            dequantise(layer.up, layer.width, layer.hidden, pieces[num_gate : num_gate + num_up]),
            dequantise(layer.down, layer.hidden, layer.width, pieces[num_gate + num_up :]),
        )

    def dense(self, spec: DenseSpec, x: Floats) -> Floats:
        """A dense block."""
        return swiglu(x, self.matrix(spec.gate), self.matrix(spec.up), self.matrix(spec.down))


def swiglu(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    """down(silu(gate x) * up x) of x [T, D]."""
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
