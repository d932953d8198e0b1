"""The coordinator's part of a model on MLX: embedding, mixers with their caches, routers, shared and dense experts, head.

Rows come and go as numpy arrays: between two layers they cross to a worker process anyway.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from colibri_mp.backend import Predictor
from colibri_mp.checkpoint.matrices import StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.kernels.attention_inputs import Batch
from colibri_mp.kernels.rope import rope_tables
from colibri_mp.messages import Floats, Ints
from colibri_mp.mlx_backend import device
from colibri_mp.mlx_backend.activation import activate
from colibri_mp.mlx_backend.device import to_device, to_host
from colibri_mp.mlx_backend.kv_cache import MlxBlocks, MlxSlots
from colibri_mp.mlx_backend.matrices import Matrix, load
from colibri_mp.mlx_backend.mixer import Mixer, Room
from colibri_mp.mlx_backend.mixers import KINDS
from colibri_mp.mlx_backend.router import Router, choose
from colibri_mp.mlx_backend.rows import Rope, rms_norm
from colibri_mp.models.structure import LayerSpec, ModelSpec, MoeSpec, PredictorSpec


@dataclass(frozen=True, eq=False)
class Expert:
    """The expert that every token uses; `share` [1, D]: of a shared one whose weight is a sigmoid."""

    gate: Matrix
    up: Matrix
    down: Matrix
    share: Matrix | None

    def __call__(self, h: mx.array) -> mx.array:
        """h [T, D] -> [T, D]."""
        y = self.down(activate(self.gate(h), self.up(h), None))
        return y if self.share is None else mx.sigmoid(self.share(h)) * y


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's resident part."""

    mixer: Mixer
    mlp_norm: mx.array
    router: Router | None
    expert: Expert | None


@dataclass(frozen=True, eq=False)
class PredictorParts:
    """What a predictor has beside its layer."""

    embed_norm: mx.array
    hidden_norm: mx.array
    merge: Matrix
    final_norm: mx.array


class MlxModel:
    """Weights, caches and computation. Implements `backend.Backend`; one thread calls it."""

    def __init__(self, checkpoint: Checkpoint, model: ModelSpec, max_context: int, room: Room) -> None:
        """Raises ReadError when a file cannot be read or has changed since its header was read."""
        device.prepare()
        self._model, self.description = model, f"backend mlx: {device.describe()}"
        reader = _Reader(checkpoint)
        rope = Rope(rope_tables(model.rope, max_context))
        self._embed = reader.matrix(model.embed)
        self._head = self._embed if model.tied else reader.matrix(model.head)
        self._final_norm = reader.vector(model.final_norm)
        self._layers = [reader.layer(layer, rope, room) for layer in model.layers]
        self._predictor = None if model.predictor is None else reader.predictor(model.predictor)
        self.caches = MlxBlocks([array for layer in self._layers for array in layer.mixer.paged], room.num_blocks)
        states = [array for layer in self._layers for array in layer.mixer.states]
        self.states = MlxSlots(states, room.num_state_slots)
        self._mixer_ended_s = 0.0

    def embed(self, token_ids: Ints) -> Floats:
        """See `Backend`."""
        return np.array(to_host(self._embed.gather(token_ids)))

    def mix(self, layer_idx: int, x: Floats, batch: Batch) -> None:
        """See `Backend`."""
        np.copyto(x, to_host(self._layers[layer_idx].mixer(to_device(x), batch)))

    def mix_and_route(self, layer_idx: int, x: Floats, batch: Batch) -> tuple[Floats, Ints, Floats]:
        """See `Backend`."""
        layer = self._layers[layer_idx]
        assert layer.router is not None
        mixed = layer.mixer(to_device(x), batch)
        np.copyto(x, to_host(mixed))
        self._mixer_ended_s = time.perf_counter()
        h = rms_norm(mixed, layer.mlp_norm, self._model.norm_eps)
        ids, weights = choose(to_host(layer.router.logits(h)), layer.router.correction, self._model.router)
        return np.ascontiguousarray(to_host(h)), ids, weights

    def prepare(self, layer_idx: int, x: Floats, batch: Batch) -> None:
        """See `Backend`: nothing to do."""

    @property
    def mixer_ended_s(self) -> float:
        """See `Backend`."""
        return self._mixer_ended_s

    def predictor(self, width: int) -> Predictor:
        """See `Backend`."""
        spec = replace(self._model.router, top_k=width, norm_topk_prob=False, top_p=1.0)

        def predict(layer_idx: int, norm_idx: int, x: Floats) -> tuple[Ints, Floats]:
            router = self._layers[layer_idx].router
            assert router is not None
            h = rms_norm(to_device(x), self._layers[norm_idx].mlp_norm, self._model.norm_eps)
            return choose(to_host(router.logits(h)), router.correction, spec)

        return predict

    def mlp_norm(self, layer_idx: int, x: Floats) -> Floats:
        """See `Backend`."""
        return np.array(to_host(rms_norm(to_device(x), self._layers[layer_idx].mlp_norm, self._model.norm_eps)))

    def resident_expert(self, layer_idx: int, h: Floats) -> Floats:
        """See `Backend`."""
        expert = self._layers[layer_idx].expert
        assert expert is not None
        return to_host(expert(to_device(h)))

    def head(self, x: Floats) -> Floats:
        """See `Backend`."""
        return to_host(self._head(rms_norm(to_device(x), self._final_norm, self._model.norm_eps)))

    def final_norm(self, x: Floats) -> Floats:
        """See `Backend`."""
        return np.array(to_host(rms_norm(to_device(x), self._final_norm, self._model.norm_eps)))

    def merge(self, token_ids: Ints, hidden: Floats) -> Floats:
        """See `Backend`."""
        predictor, eps = self._predictor_parts, self._model.norm_eps
        embedded = rms_norm(self._embed.gather(token_ids), predictor.embed_norm, eps)
        before = rms_norm(to_device(hidden), predictor.hidden_norm, eps)
        return np.array(to_host(predictor.merge(mx.concatenate([embedded, before], axis=1))))

    def predictor_norm(self, x: Floats) -> Floats:
        """See `Backend`."""
        return np.array(to_host(rms_norm(to_device(x), self._predictor_parts.final_norm, self._model.norm_eps)))

    def predictor_head(self, x: Floats) -> Floats:
        """See `Backend`."""
        return to_host(self._head(rms_norm(to_device(x), self._predictor_parts.final_norm, self._model.norm_eps)))

    @property
    def _predictor_parts(self) -> PredictorParts:
        assert self._predictor is not None
        return self._predictor

    def expect(self) -> None:
        """MLX keeps its own threads."""

    def identity(self) -> dict[str, Any]:
        """See `Backend`."""
        return {"backend": self.description}


class _Reader:
    """Reads weights to the device, one matrix at a time: loading needs the memory of one beside what is kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def matrix(self, stored: StoredMatrix) -> Matrix:
        """A matrix."""
        return load(stored, self._checkpoint.read_parts(stored))

    def vector(self, info: TensorInfo) -> mx.array:
        """A vector as float32."""
        vector = to_device(self._checkpoint.read_vector(info))
        mx.eval(vector)
        return vector

    def optional(self, info: TensorInfo | None) -> mx.array | None:
        """The same; None where there is none."""
        return None if info is None else self.vector(info)

    def layer(self, spec: LayerSpec, rope: Rope, room: Room) -> Layer:
        """The resident part of a layer, with an empty cache."""
        mixer = KINDS[type(spec.attention)].make(self, spec.attention, spec.tensors, rope, room)
        return Layer(mixer, self.vector(spec.mlp_norm), self._router(spec), self._expert(spec))

    def predictor(self, spec: PredictorSpec) -> PredictorParts:
        """What a predictor has beside its layer."""
        embed_norm, hidden_norm, final_norm = map(self.vector, spec.vectors)
        return PredictorParts(embed_norm, hidden_norm, self.matrix(spec.merge), final_norm)

    def _router(self, spec: LayerSpec) -> Router | None:
        if not isinstance(spec.mlp, MoeSpec):
            return None
        correction = spec.mlp.correction
        return Router(
            self.matrix(spec.mlp.gate),
            self.optional(spec.mlp.gate_bias),
            None if correction is None else self._checkpoint.read_vector(correction),
        )

    def _expert(self, spec: LayerSpec) -> Expert | None:
        dense = spec.resident_expert
        if dense is None:
            return None
        share = spec.mlp.shared_gate if isinstance(spec.mlp, MoeSpec) else None
        gate, up, down = (self.matrix(matrix) for matrix in dense.matrices)
        return Expert(gate, up, down, None if share is None else self.matrix(share))
