"""The backend of compiled CPU kernels; see `backend.Backend`."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri_mp.backend import Predictor
from colibri_mp.kernels import isa
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.block import BlockStage, MixerStage
from colibri_mp.kernels.head import HeadStage
from colibri_mp.kernels.layout import gather_rows
from colibri_mp.kernels.linear import linear
from colibri_mp.kernels.norm import rms_norm
from colibri_mp.kernels.resident_expert import ResidentExpert
from colibri_mp.kernels.router import RouterStage
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.lookahead import MOST_ROWS
from colibri_mp.messages import Floats, Ints
from colibri_mp.mixers.kind import StageLimits
from colibri_mp.mixers.layers import LayerMixer, Mixers
from colibri_mp.models.structure import ModelSpec
from colibri_mp.resident import PredictorWeights, ResidentLayer, ResidentWeights


@dataclass(frozen=True)
class _Layer:
    weights: ResidentLayer
    mixer: LayerMixer
    block: BlockStage
    expert: ResidentExpert | None


class CpuBackend:
    """Stages, caches and weights of a model. One call at a time."""

    description = ""

    def __init__(
        self, team: ThreadTeam, lone_team: ThreadTeam, model: ModelSpec, weights: ResidentWeights, limits: StageLimits,
        num_blocks: int, num_state_slots: int, max_logit_rows: int,
    ) -> None:  # fmt: skip
        """`lone_team`: for predictions, which are made while the workers use the machine: one thread."""
        self._model, self._weights = model, weights
        self._team, self._lone_team, self._planes = team, lone_team, limits.planes
        mixers = Mixers(team, model, limits, num_blocks, num_state_slots)
        self.caches, self.states = mixers.caches, mixers.states
        router = RouterStage(team, model.router, model.hidden, model.norm_eps, limits.max_rows)
        blocks: dict[MixerStage, BlockStage] = {
            stage: BlockStage(team, stage, router) for stage in {layer.stage for layer in mixers.layers}
        }
        residents = (layer.resident_expert for layer in model.layers)
        shapes = {expert.shape for expert in residents if expert is not None}
        experts = {shape: ResidentExpert(team, shape, limits.max_rows, limits.planes) for shape in shapes}
        self._layers = [
            _Layer(
                layer,
                mixer,
                blocks[mixer.stage],
                None if layer.spec.resident_expert is None else experts[layer.spec.resident_expert.shape],
            )
            for layer, mixer in zip(weights.layers, mixers.layers, strict=True)
        ]
        self._last_block = self._layers[0].block
        self._prepared: tuple[int, Floats, Batch] | None = None  # what its block is bound to
        self._head = HeadStage(team, model.hidden, model.vocab_size, model.norm_eps, max_logit_rows, limits.planes)

    def embed(self, token_ids: Ints) -> Floats:
        """See `Backend`."""
        return gather_rows(self._weights.embed, token_ids)

    def mix(self, layer_idx: int, x: Floats, batch: Batch) -> None:
        """See `Backend`."""
        self._prepared = None
        layer = self._layers[layer_idx]
        layer.mixer.stage(x, layer.weights.mixer, layer.mixer.cache, layer.mixer.cache_layer, batch)

    def mix_and_route(self, layer_idx: int, x: Floats, batch: Batch) -> tuple[Floats, Ints, Floats]:
        """See `Backend`."""
        prepared, self._last_block = self._prepared, self._layers[layer_idx].block
        if prepared is None or prepared[0] != layer_idx or prepared[1] is not x or prepared[2] is not batch:
            self.prepare(layer_idx, x, batch)
        self._prepared = None
        return self._last_block.run()

    def prepare(self, layer_idx: int, x: Floats, batch: Batch) -> None:
        """See `Backend`."""
        layer = self._layers[layer_idx]
        weights, mixer = layer.weights, layer.mixer
        assert weights.router is not None
        self._prepared = None  # should it fail
        layer.block.bind(x, weights.mixer, mixer.cache, mixer.cache_layer, batch, weights.mlp_norm, weights.router)
        self._prepared = (layer_idx, x, batch)

    @property
    def mixer_ended_s(self) -> float:
        """See `Backend`."""
        return self._last_block.mixer_ended_s

    def predictor(self, width: int) -> Predictor:
        """See `Backend`."""
        spec = replace(self._model.router, top_k=width, norm_topk_prob=False, top_p=1.0)
        stage = RouterStage(self._lone_team, spec, self._model.hidden, self._model.norm_eps, MOST_ROWS)
        layers = self._weights.layers

        def predict(layer_idx: int, norm_idx: int, x: Floats) -> tuple[Ints, Floats]:
            router = layers[layer_idx].router
            assert router is not None
            return stage(x, layers[norm_idx].mlp_norm, router)[1:]

        return predict

    def mlp_norm(self, layer_idx: int, x: Floats) -> Floats:
        """See `Backend`."""
        return rms_norm(x, self._layers[layer_idx].weights.mlp_norm, self._model.norm_eps)

    def resident_expert(self, layer_idx: int, h: Floats) -> Floats:
        """See `Backend`."""
        layer = self._layers[layer_idx]
        assert layer.expert is not None
        assert layer.weights.expert_slab is not None
        return layer.expert(h, layer.weights.expert_slab, layer.weights.expert_gate)

    def head(self, x: Floats) -> Floats:
        """See `Backend`."""
        return self._head(x, self._weights.final_norm, self._weights.head)

    def final_norm(self, x: Floats) -> Floats:
        """See `Backend`."""
        return rms_norm(x, self._weights.final_norm, self._model.norm_eps)

    def merge(self, token_ids: Ints, hidden: Floats) -> Floats:
        """See `Backend`."""
        weights, eps = self._predictor, self._model.norm_eps
        both = [rms_norm(self.embed(token_ids), weights.embed_norm, eps), rms_norm(hidden, weights.hidden_norm, eps)]
        x = np.empty_like(hidden)
        linear(self._team, np.concatenate(both, axis=1), weights.merge, None, x, self._planes)
        return x

    def predictor_norm(self, x: Floats) -> Floats:
        """See `Backend`."""
        return rms_norm(x, self._predictor.final_norm, self._model.norm_eps)

    def predictor_head(self, x: Floats) -> Floats:
        """See `Backend`."""
        return self._head(x, self._predictor.final_norm, self._weights.head)

    @property
    def _predictor(self) -> PredictorWeights:
        assert self._weights.predictor is not None
        return self._weights.predictor

    def expect(self) -> None:
        """See `Backend`."""
        self._team.expect()

    def identity(self) -> dict[str, Any]:
        """See `Backend`."""
        return {"isa": isa.current().value, "planes": self._planes}
