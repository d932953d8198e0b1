"""Mistakes put in on purpose: the golden checkpoints tell each of them from the right computation.

Each is a subclass of the plain forward pass with one method or setting wrong, and must differ from the reference's logits by more than the
parity tests allow. The right one passes (`test_plain_forward`), and so does the program itself (`test_parity`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plain_forward import Bytes, Floats, PlainModel, dequantise, e4m3, sigmoid
from test_parity import TOLERANCE

from colibri_mp.checkpoint import Checkpoint, TensorInfo
from colibri_mp.checkpoint.source import to_float32
from colibri_mp.formats import Encoding
from colibri_mp.models import AttentionSpec, AttentionTensors, LayerSpec, ModelSpec, MoeSpec
from colibri_mp.models.structure import IndexerTensors, MlaTensors
from colibri_mp.specs import ClampedSwiGLU, IndexerSpec, MlaSpec

GOLDEN = Path(__file__).parent


class Changed(PlainModel):
    """A model whose spec is changed before it runs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.model = self.changed(self.model)

    def changed(self, model: ModelSpec) -> ModelSpec:
        """The mistake."""
        return model

    def with_attention(self, model: ModelSpec, **changes: Any) -> ModelSpec:
        """Changes to the attention of layers that have a window."""
        return replace(
            model, layers=tuple(replace(layer, attention=_changed(layer.attention, changes)) for layer in model.layers)
        )


def _changed(spec: AttentionSpec, changes: dict[str, Any]) -> AttentionSpec:
    return replace(spec, **changes) if spec.window is not None else spec


class NormEps(Changed):
    """A constant in place of rms_norm_eps."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, norm_eps=1e-6)


class WholeHeadTurns(Changed):
    """The share of a head that turns is forgotten."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, rope=replace(model.rope, rotary_dim=2 * model.rope.rotary_dim))


class RoundedYarn(Changed):
    """yarn's range is rounded although the config says that it is not."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, rope=replace(model.rope, truncate=True))


class NoYarnScaling(Changed):
    """Cosine and sine without yarn's factor."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, rope=replace(model.rope, attention_factor=1.0))


class WindowTooWide(Changed):
    """A window sees one position more."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return self.with_attention(model, window=9)


class WindowTooNarrow(Changed):
    """A window sees one position less."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return self.with_attention(model, window=7)


class WindowsInTheOtherLayers(Changed):
    """The layers with and without a window are exchanged."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        specs = [layer.attention for layer in model.layers]
        layers = zip(model.layers, [*specs[1:], specs[0]], strict=True)
        return replace(model, layers=tuple(replace(layer, attention=spec) for layer, spec in layers))


class PairsTakeTurns(PlainModel):
    """Rotary pairs are neighbours instead of halves."""

    def rotate(self, heads: Floats) -> Floats:
        width = self.model.rope.rotary_dim
        order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
        turned = super().rotate(np.concatenate([heads[..., order], heads[..., width:]], axis=-1))
        turned[..., order] = turned[..., :width].copy()
        return turned


class NoSinks(PlainModel):
    """The sinks are forgotten."""

    def attention_weights(self, scores: Floats, sinks: TensorInfo | None) -> Floats:
        del sinks
        return super().attention_weights(scores, None)


class RefusedAreZero(PlainModel):
    """Experts of refused groups count as 0, which is more than a negative score."""

    refused = 0.0


class BiasedWeights(PlainModel):
    """The weights are the corrected scores."""

    def weights(self, scores: Floats, choice: Floats) -> Floats:
        del scores
        return np.where(np.isfinite(choice), choice, 0)


class ChoiceWithoutCorrection(PlainModel):
    """Experts are chosen by their plain scores."""

    def choice(self, spec: MoeSpec, scores: Floats) -> Floats:
        return super().choice(replace(spec, correction=None), scores)


class GroupsByTheirBest(PlainModel):
    """All groups are kept."""

    def choice(self, spec: MoeSpec, scores: Floats) -> Floats:
        return super().choice(replace(spec, router=replace(spec.router, num_groups=1, kept_groups=1)), scores)


class LoraNormsWithTheModelsEps(Changed):
    """The norms of q_a and kv_a have rms_norm_eps."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return with_latent(model, lora_eps=model.norm_eps)


class NoScoreFactor(Changed):
    """yarn's mscale_all_dim does not scale the scores."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        spec = model.layers[0].attention
        return with_latent(model, scale=(spec.nope_dim + spec.rope_dim) ** -0.5)


class ScaledByTheNopePart(Changed):
    """The scores are scaled by the width of the part that does not turn."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        spec = model.layers[0].attention
        return with_latent(model, scale=spec.scale * (1 + spec.rope_dim / spec.nope_dim) ** 0.5)


class PairsAreHalves(Changed):
    """Rotary pairs are halves instead of neighbours."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return with_latent(model, interleaved=False)


def with_latent(model: ModelSpec, **changes: Any) -> ModelSpec:
    """Changes to latent attention."""
    layers = (replace(layer, attention=replace(layer.attention, **changes)) for layer in model.layers)
    return replace(model, layers=tuple(layers))


class NormedRopeKey(PlainModel):
    """The key that turns is normed like the latent."""

    def rope_key(self, spec: MlaSpec, key: Floats) -> Floats:
        return key / np.sqrt((key * key).mean(axis=-1, keepdims=True) + spec.lora_eps)


class PlainFrequencies(Changed):
    """No yarn."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, rope=replace(model.rope, rope_type="default"))


class ValuesBeforeKeys(PlainModel):
    """kv_b's rows of a head are taken for values first."""

    def unfolding(self, spec: MlaSpec, tensors: MlaTensors) -> tuple[Floats, Floats]:
        assert tensors.kv_b is not None
        both = self.matrix(tensors.kv_b).reshape(spec.num_heads, -1, spec.kv_lora_rank)
        return both[:, spec.v_dim :], both[:, : spec.v_dim]


class KeysOfAllHeadsFirst(PlainModel):
    """kv_b's rows are taken for the keys of all heads, then the values of all."""

    def unfolding(self, spec: MlaSpec, tensors: MlaTensors) -> tuple[Floats, Floats]:
        assert tensors.kv_b is not None
        keys, values = np.split(self.matrix(tensors.kv_b), [spec.num_heads * spec.nope_dim])
        shape = (spec.num_heads, -1, spec.kv_lora_rank)
        return keys.reshape(shape), values.reshape(shape)


class GroupsByTheirTwoBest(PlainModel):
    """Groups are kept by the sum of two scores, as noaux_tc does it."""

    def group_scores(self, spec: MoeSpec, groups: Floats) -> Floats:
        return np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)


class GroupsByTheirSingleBest(PlainModel):
    """Groups are kept by their best score alone, as group_limited_greedy does it."""

    def group_scores(self, spec: MoeSpec, groups: Floats) -> Floats:
        return groups.max(axis=-1)


class IndexerWithTheModelsEps(Changed):
    """The layer norm of the indexer's keys has rms_norm_eps."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return with_indexer(model, norm_eps=model.norm_eps)


class IndexerPairsAreHalves(Changed):
    """The indexer's rotary pairs are halves, as in DeepSeek-V3.2."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return with_indexer(model, interleaved=False)


class OneMorePosition(Changed):
    """A row reads one position more than index_topk."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return with_indexer(model, top_k=model.layers[0].attention.indexer.top_k + 1)


class ReadsEverything(PlainModel):
    """The indexer is forgotten."""

    def read_positions(
        self, spec: IndexerSpec, tensors: IndexerTensors, x: Floats, q_source: Floats
    ) -> NDArray[np.bool_]:
        del spec, tensors, q_source
        return np.ones((len(x), len(x)), bool)


class EveryLayerKeepsTheFirstChoice(PlainModel):
    """Layers with an indexer of their own take the first layer's choice too."""

    def read_positions(
        self, spec: IndexerSpec, tensors: IndexerTensors, x: Floats, q_source: Floats
    ) -> NDArray[np.bool_]:
        return self.read if hasattr(self, "read") else super().read_positions(spec, tensors, x, q_source)


class SharedLayersTakeTheFirstChoice(PlainModel):
    """Layers without an indexer take the choice of the first layer, not of the last one that chose."""

    def latent(self, layer: LayerSpec, x: Floats) -> Floats:
        if layer.tensors.indexer is None:
            self.read = self.first
        result = super().latent(layer, x)
        self.first = getattr(self, "first", self.read)
        return result


class SharedLayersReadEverything(PlainModel):
    """Layers without an indexer read all positions."""

    def latent(self, layer: LayerSpec, x: Floats) -> Floats:
        return super().latent(
            replace(
                layer, attention=replace(layer.attention, indexer=layer.tensors.indexer and layer.attention.indexer)
            ),
            x,
        )


class NoKeyNorm(PlainModel):
    """The keys of the indexer are not normed."""

    def layer_norm(self, keys: Floats, tensors: IndexerTensors, eps: float) -> Floats:
        del tensors, eps
        return keys


class KeysWithoutBias(PlainModel):
    """The bias of the layer norm is forgotten."""

    def layer_norm(self, keys: Floats, tensors: IndexerTensors, eps: float) -> Floats:
        return super().layer_norm(keys, tensors, eps) - self.vector(tensors.k_bias)


class IndexerDoesNotTurn(PlainModel):
    """The indexer knows no positions."""

    def turn_index(self, spec: IndexerSpec, heads: Floats) -> Floats:
        del spec
        return heads


class LastElementsTurn(PlainModel):
    """The last elements of the indexer's heads turn instead of the first."""

    def turn_index(self, spec: IndexerSpec, heads: Floats) -> Floats:
        return np.roll(super().turn_index(spec, np.roll(heads, spec.rotary_dim, axis=-1)), -spec.rotary_dim, axis=-1)


class NegativeProductsCount(PlainModel):
    """The indexer's products are summed up without relu."""

    def index_activation(self, products: Floats) -> Floats:
        return products


def with_indexer(model: ModelSpec, **changes: Any) -> ModelSpec:
    """Changes to the indexer."""
    spec = replace(model.layers[0].attention.indexer, **changes)
    return with_latent(model, indexer=spec)


class NoScaling(PlainModel):
    """routed_scaling_factor is forgotten."""

    def scaling(self, spec: MoeSpec) -> float:
        del spec
        return 1.0


class ScaledShared(PlainModel):
    """routed_scaling_factor is applied to the shared expert too."""

    def shared(self, spec: MoeSpec, x: Floats) -> Floats:
        return spec.router.scaling * super().shared(spec, x)


class NoShared(PlainModel):
    """The shared expert is forgotten."""

    def shared(self, spec: MoeSpec, x: Floats) -> Floats:
        return super().shared(replace(spec, shared=None), x)


class UngatedShared(PlainModel):
    """The gate of the shared expert is forgotten."""

    def shared(self, spec: MoeSpec, x: Floats) -> Floats:
        return super().shared(replace(spec, shared_gate=None), x)


class GateOfTheOutput(PlainModel):
    """The sigmoid is left out of the gate."""

    def shared(self, spec: MoeSpec, x: Floats) -> Floats:
        assert spec.shared is not None
        assert spec.shared_gate is not None
        return x @ self.matrix(spec.shared_gate).T * self.dense(spec.shared, x)


class Renormalised(Changed):
    """norm_topk_prob is taken for its opposite."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, layers=tuple(replace(layer, mlp=_renormalised(layer.mlp)) for layer in model.layers))


def _renormalised(mlp: Any) -> Any:
    if not isinstance(mlp, MoeSpec):
        return mlp
    return replace(mlp, router=replace(mlp.router, norm_topk_prob=not mlp.router.norm_topk_prob))


class NoRouterBias(PlainModel):
    """The bias of the router is forgotten."""

    def moe(self, spec: MoeSpec, x: Floats) -> Floats:
        return super().moe(replace(spec, gate_bias=None), x)


class GateClampedTwice(PlainModel):
    """gate is clamped from below too."""

    def clamped(self, gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
        return super().clamped(np.maximum(gate, -clamp.limit), up, clamp)


class UpClampedOnce(PlainModel):
    """up is clamped from above only."""

    def clamped(self, gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
        gate, up = np.minimum(gate, clamp.limit), np.minimum(up, clamp.limit)
        return (up + 1) * gate * sigmoid(clamp.alpha * gate)


class LimitOfSeven(PlainModel):
    """The limit is a constant instead of the config's."""

    def clamped(self, gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
        return super().clamped(gate, up, replace(clamp, limit=7.0))


class PlainSilu(PlainModel):
    """alpha is 1."""

    def clamped(self, gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
        return super().clamped(gate, up, replace(clamp, alpha=1.0))


class UpWithoutOne(PlainModel):
    """up instead of up + 1."""

    def clamped(self, gate: Floats, up: Floats, clamp: ClampedSwiGLU) -> Floats:
        return super().clamped(gate, up, clamp) - super().clamped(gate, np.zeros_like(up), clamp)


class NoExpertBiases(PlainModel):
    """The biases of the experts are forgotten."""

    def swiglu(self, x: Floats, gate: Floats, up: Floats, down: Floats, *more: Any) -> Floats:
        return super().swiglu(x, gate, up, down, 0.0, 0.0, 0.0, more[3])


class HalvesOfGateUp(PlainModel):
    """gate is the first half of gate_up instead of every other row."""

    def swiglu(self, x: Floats, gate: Floats, up: Floats, down: Floats, *more: Any) -> Floats:
        both = np.stack([gate, up], axis=1).reshape(2 * len(gate), -1)
        return super().swiglu(x, both[: len(gate)], both[len(gate) :], down, *more)


class HighNibbleFirst(PlainModel):
    """The two codes of a byte are taken in the other order."""

    def mxfp4(self, rows: int, cols: int, parts: list[Bytes]) -> Floats:
        codes: NDArray[np.uint8] = (parts[0] << 4) | (parts[0] >> 4)
        return dequantise(Encoding("mxfp4", 4, 32, "u8"), rows, cols, [codes, parts[1]])


class NormsNotCentred(Changed):
    """w instead of 1 + w in the norms of the layers."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, layers=tuple(_plain_norms(layer, "norm") for layer in model.layers))


class HeadNormsNotCentred(Changed):
    """w instead of 1 + w in the norms of q and k."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, layers=tuple(_plain_norms(layer, "q_norm", "k_norm") for layer in model.layers))


class AllNormsCentred(Changed):
    """1 + w in the norm of the delta nets' heads too."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return replace(model, layers=tuple(_plain_norms(layer, "head_norm", added=1.0) for layer in model.layers))


def _plain_norms(layer: LayerSpec, *names: str, added: float = 0.0) -> LayerSpec:
    found = {name: info for name in names if (info := getattr(layer.tensors, name, None)) is not None}
    return replace(
        layer, tensors=replace(layer.tensors, **{name: info._replace(added=added) for name, info in found.items()})
    )


class NoAttentionGate(PlainModel):
    """The gate of attention is forgotten."""

    def attention_gate(self, gate: Floats) -> Floats:
        return np.ones_like(gate)


class AttentionGateOfSilu(PlainModel):
    """The gate of attention is silu instead of a sigmoid."""

    def attention_gate(self, gate: Floats) -> Floats:
        return gate * sigmoid(gate)


class GatesComeFirst(Changed):
    """Of the rows of q_proj the gate's come before q's in each head."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return _with_other_rows(model, lambda tensors, half: tensors.q.pieces[half:] + tensors.q.pieces[:half])


class GatesComeLast(Changed):
    """The rows of q_proj are taken as they are: all of q, then all gates."""

    def changed(self, model: ModelSpec) -> ModelSpec:
        return _with_other_rows(model, lambda tensors, _: tuple(sorted(tensors.q.pieces)))


def _with_other_rows(model: ModelSpec, order: Any) -> ModelSpec:
    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.tensors, AttentionTensors):
            return layer
        q = replace(layer.tensors.q, pieces=order(layer.tensors, len(layer.tensors.q.pieces) // 2))
        return replace(layer, tensors=replace(layer.tensors, q=q))

    return replace(model, layers=tuple(changed(layer) for layer in model.layers))


class TapsBackwards(PlainModel):
    """The first weight of the convolution is that of the current token."""

    def taps(self, weight: Floats) -> Floats:
        return weight[:, ::-1]


class NoUnitLength(PlainModel):
    """q and k keep their length."""

    def unit(self, heads: Floats) -> Floats:
        return heads


class NormEpsInLengths(PlainModel):
    """rms_norm_eps in the length of q and k."""

    unit_eps = 1e-3


class HeadsTakeTurns(PlainModel):
    """Value heads go to the key heads in turns instead of in groups."""

    def repeat(self, heads: Floats, count: int) -> Floats:
        return np.tile(heads, (1, count, 1))


class DecayAfterUpdate(PlainModel):
    """What is taken in decays at once."""

    def advance(
        self, state: Floats, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
    ) -> tuple[Floats, Floats]:
        out, state = super().advance(state, q, k, v, np.ones_like(decay), beta)
        return out * decay, state * decay[:, None]


class ErrorBeforeDecay(PlainModel):
    """What the state says of k is read before it decays."""

    def advance(
        self, state: Floats, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
    ) -> tuple[Floats, Floats]:
        delta = beta * (v - np.einsum("hkv,hk->hv", state, k))
        state = state * decay[:, None] + k[:, :, None] * delta[:, None, :]
        return np.einsum("hkv,hk->hv", state, q), state


class OutBeforeUpdate(PlainModel):
    """What comes out is read before the token goes in."""

    def advance(
        self, state: Floats, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
    ) -> tuple[Floats, Floats]:
        out = np.einsum("hkv,hk->hv", state * decay[:, None], q)
        return out, super().advance(state, q, k, v, decay, beta)[1]


class GateOfHeadsSigmoid(PlainModel):
    """The gate of a delta net's heads is a sigmoid instead of silu."""

    def gate_heads(self, heads: Floats, z: Floats) -> Floats:
        return heads * sigmoid(z)


_DELTA_NET = (
    *(NormsNotCentred, HeadNormsNotCentred, AllNormsCentred, NoAttentionGate, AttentionGateOfSilu),
    *(GatesComeFirst, GatesComeLast, TapsBackwards, NoUnitLength, HeadsTakeTurns, DecayAfterUpdate, ErrorBeforeDecay),
    *(OutBeforeUpdate, GateOfHeadsSigmoid, WholeHeadTurns, UngatedShared, Renormalised),
)


class TilesOfEqualSize(PlainModel):
    """An FP8 matrix is cut into equal tiles, as many as there are scales, instead of tiles of 128 of which the last is smaller."""

    def values(self, encoding: Encoding, rows: int, cols: int, parts: list[Bytes]) -> Floats:
        if encoding.kind != "fp8":
            return super().values(encoding, rows, cols, parts)
        down, across = encoding.groups(rows, cols)
        grid = to_float32(parts[1], "F32").astype(float).reshape(down, across)
        scales = grid.repeat(rows // down, axis=0).repeat(cols // across, axis=1)
        return e4m3(parts[0].astype(int)).reshape(rows, cols) * scales


class HighCodesFirst(PlainModel):
    """The two codes of a byte of a 4-bit matrix are taken in the other order."""

    def values(self, encoding: Encoding, rows: int, cols: int, parts: list[Bytes]) -> Floats:
        if encoding.bits == 4:
            parts = [(parts[0] << 4) | (parts[0] >> 4), *parts[1:]]
        return super().values(encoding, rows, cols, parts)


MISTAKES: dict[str, tuple[type[PlainModel], ...]] = {
    "glm4_moe": (
        *(WholeHeadTurns, PairsTakeTurns, BiasedWeights, ChoiceWithoutCorrection),
        *(NoScaling, ScaledShared, NoShared, Renormalised),
    ),
    "glm4_moe_groups": (
        NormEps,
        RefusedAreZero,
        GroupsByTheirBest,
        BiasedWeights,
        ChoiceWithoutCorrection,
        NoScaling,
        NoShared,
    ),
    "deepseek_v3": (
        *(NormEps, LoraNormsWithTheModelsEps, NormedRopeKey, PairsAreHalves, NoScoreFactor, ScaledByTheNopePart),
        *(PlainFrequencies, KeysOfAllHeadsFirst, RefusedAreZero, GroupsByTheirBest, GroupsByTheirSingleBest),
        *(BiasedWeights, ChoiceWithoutCorrection, NoScaling, ScaledShared, NoShared, Renormalised),
    ),
    "glm_moe_dsa": (
        *(LoraNormsWithTheModelsEps, NormedRopeKey, PairsAreHalves, BiasedWeights, NoScaling, NoShared),
        *(IndexerWithTheModelsEps, IndexerPairsAreHalves, OneMorePosition, ReadsEverything, NoKeyNorm, KeysWithoutBias),
        *(IndexerDoesNotTurn, LastElementsTurn, NegativeProductsCount, EveryLayerKeepsTheFirstChoice),
    ),
    "glm_moe_dsa_shared": (
        *(SharedLayersTakeTheFirstChoice, SharedLayersReadEverything, EveryLayerKeepsTheFirstChoice, ReadsEverything),
    ),
    "deepseek_v2": (
        *(NormEps, LoraNormsWithTheModelsEps, NormedRopeKey, PairsAreHalves, NoScoreFactor, NoYarnScaling),
        *(PlainFrequencies, ValuesBeforeKeys, KeysOfAllHeadsFirst, GroupsByTheirBest, GroupsByTheirTwoBest),
        *(NoScaling, ScaledShared, NoShared, Renormalised),
    ),
    "deepseek_v2_lite": (PairsAreHalves, NormedRopeKey, NoShared, Renormalised),
    "qwen2_moe": (
        *(NormEps, PairsTakeTurns, WindowTooWide, WindowTooNarrow, WindowsInTheOtherLayers),
        *(NoShared, UngatedShared, GateOfTheOutput, Renormalised),
    ),
    "gpt_oss": (
        *(NormEps, PairsTakeTurns, RoundedYarn, NoYarnScaling, WindowTooWide, WindowTooNarrow, WindowsInTheOtherLayers),
        *(NoSinks, NoRouterBias, Renormalised, GateClampedTwice, UpClampedOnce, LimitOfSeven, PlainSilu, UpWithoutOne),
        *(NoExpertBiases, HalvesOfGateUp),
    ),
    "gpt_oss_mxfp4": (HighNibbleFirst, NoSinks, HalvesOfGateUp),
    "qwen3_next": _DELTA_NET,
    "qwen3_5_moe": (*_DELTA_NET, NormEps, NormEpsInLengths),
    "qwen3_moe_fp8": (TilesOfEqualSize,),
    "deepseek_v3_fp8": (TilesOfEqualSize,),
    "qwen3_moe_q4": (HighCodesFirst,),
    "qwen3_moe_nvfp4": (HighCodesFirst,),
}
CASES = [(fixture, mistake) for fixture, mistakes in MISTAKES.items() for mistake in mistakes]


@pytest.mark.parametrize(("fixture", "mistake"), CASES, ids=[f"{name}-{mistake.__name__}" for name, mistake in CASES])
def test_mistake_is_noticed(fixture: str, mistake: type[PlainModel]) -> None:
    """The logits leave the tolerance of the parity tests."""
    (folder,) = GOLDEN.glob(f"tiny*/{fixture}")
    golden = np.load(folder / "golden.npz")
    ids = np.concatenate([golden["input_ids"], golden["generated_ids"]])
    logits = mistake(Checkpoint.open(folder)).logits(ids)
    assert np.abs(logits - golden["logits"]).max() > TOLERANCE
