"""The router: norm(x), scores of all experts, the top-k of them. One compiled call; everything in float32.

    0, 1  `normed_linear`: h, logits (activations always as 3 planes: float32 accuracy)
    2     rows: softmax or sigmoid -> top-k, ties to the lower id -> top-p of these (lossy, off unless asked for)
              -> ids ascending, weights (divided by their sum and scaled if the model does so)

With sigmoid scores the choice is made by score + correction; weights are the plain scores. Experts may be in groups, of which the best
are kept.

Formulas: transformers' `Qwen3MoeTopKRouter` (olmoe and mixtral alike), `GptOssTopKRouter` (a softmax over the chosen ones is the
renormalised softmax over all), `Glm4MoeMoE.route_tokens_to_experts` (DeepSeek-V3, arXiv 2412.19437), `DeepseekV2TopkRouter`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.attention_rows import add_row
from colibri_mp.kernels.jit import Native, carray, compiled
from colibri_mp.kernels.layout import PackedMatrix, num_blocks
from colibri_mp.kernels.linear import DEFAULT_PLANES
from colibri_mp.kernels.normed_linear import FRAME, NormedLinear, multiply_phase, norm_phase, num_row_chunks
from colibri_mp.kernels.team import PHASE_0, ThreadTeam, aligned_bytes, barrier, done, take
from colibri_mp.kernels.vectors import (
    exp16,
    get_f32,
    largest16,
    load16,
    max16,
    pointer_f32,
    pointer_i32,
    record_at,
    set_f32,
    splat16,
    store16,
    sum16,
)
from colibri_mp.specs import RouterSpec

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]

_ROWS_A_CHUNK = 4
_NO_EXPERT = np.float32(-1e30)
_DROPPED = np.int32(-1)
_TINY = np.float32(1e-20)
"""Added to the sum of sigmoid scores before dividing by it, as the references do."""


@dataclass(frozen=True, eq=False)
class RouterWeights:
    """A router: gate [E, D]; `bias` [E] of its logits; `correction` [E] of its scores, for the choice only. Vectors float32."""

    gate: PackedMatrix
    bias: F32Array | None = None
    correction: F32Array | None = None


@compiled
def router_phases(job: Any, control: int, tag: int, first_phase: int) -> None:
    """The three phases, numbered from `first_phase` on."""
    if norm_phase(job, control, tag, first_phase) and multiply_phase(job, control, tag, first_phase + 1):
        _choose_phase(job, control, tag, first_phase + 2)


def _router_stage(frame: int, control: int, tag: int) -> None:
    router_phases(record_at(frame, FRAME), control, tag, PHASE_0)


STAGE = Native(_router_stage)


@compiled
def _choose_phase(job: Any, control: int, tag: int, phase: int) -> None:
    num_chunks = num_row_chunks(job)
    chunk = take(control, tag, phase, num_chunks)
    while chunk >= 0:
        for row in range(chunk * _ROWS_A_CHUNK, min(job.num_rows, (chunk + 1) * _ROWS_A_CHUNK)):
            _choose(job, row, _score(job, row))
        done(control, phase)
        chunk = take(control, tag, phase, num_chunks)
    barrier(control, tag, phase, num_chunks)


@compiled
def _score(job: Any, row: int) -> int:
    """Scores of a row; returns where the values are by which experts are chosen."""
    logits, scores = job.y + row * job.y_stride, job.probabilities + row * job.y_stride
    add_row(logits, job.logit_bias, job.num_experts)
    if job.is_sigmoid == 0:
        _softmax(logits, scores, job.num_experts)
        if job.kept_groups < job.num_groups:
            _refuse_groups(job, scores, job.group_scores + row * job.num_groups * 4)
        return int(scores)
    _sigmoid(logits, scores, job.num_experts)
    add_row(logits, job.correction, job.num_experts)
    if job.kept_groups < job.num_groups:
        _refuse_groups(job, logits, job.group_scores + row * job.num_groups * 4)
    return int(logits)


@compiled
def _sigmoid(logits: int, scores: int, num_experts: int) -> None:
    """Both rows, the logits too, become the scores."""
    one, zero = splat16(np.float32(1.0)), splat16(np.float32(0.0))
    for i in range(0, 4 * num_experts, 64):
        score = one / (one + exp16(zero - load16(logits + i)))
        store16(scores + i, score)
        store16(logits + i, score)


@compiled
def _refuse_groups(job: Any, choice: int, group_scores: int) -> None:
    """Keep the best groups, ties to the lower one; nothing in the others can be chosen. See `RouterSpec` for what is best."""
    size = job.num_experts // job.num_groups
    for group in range(job.num_groups):
        first, second = _NO_EXPERT, _NO_EXPERT
        for expert in range(group * size, (group + 1) * size):
            value = get_f32(choice + 4 * expert)
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        set_f32(group_scores + 4 * group, first + second if job.is_sigmoid != 0 else first)
    for group in range(job.num_groups):
        score, num_better = get_f32(group_scores + 4 * group), 0
        for other in range(job.num_groups):
            rival = get_f32(group_scores + 4 * other)
            num_better += rival > score or (rival == score and other < group)
        if num_better >= job.kept_groups:
            for expert in range(group * size, (group + 1) * size):
                set_f32(choice + 4 * expert, _NO_EXPERT)


@compiled
def _softmax(logits: int, probabilities: int, num_experts: int) -> None:
    """Rows have room for whole vectors; those of the logits are completed with experts that cannot be chosen."""
    for expert in range(num_experts, (num_experts + 15) // 16 * 16):
        set_f32(logits + 4 * expert, _NO_EXPERT)
    largest = load16(logits)
    for i in range(64, 4 * num_experts, 64):
        largest = max16(largest, load16(logits + i))
    largest = splat16(largest16(largest))
    total = splat16(np.float32(0.0))
    for i in range(0, 4 * num_experts, 64):
        weight = exp16(load16(logits + i) - largest)
        store16(probabilities + i, weight)
        total = total + weight
    total = splat16(sum16(total))
    for i in range(0, 4 * num_experts, 64):
        store16(probabilities + i, load16(probabilities + i) / total)


@compiled
def _choose(job: Any, row: int, choice: int) -> None:
    """The top-k experts of a row by `choice`, in ascending order of id; those that top-p drops come first, with id -1 and weight 0."""
    top_k = job.top_k
    values = carray(pointer_f32(choice), job.num_experts)
    ids = carray(pointer_i32(job.ids + row * top_k * 4), top_k)
    weights = carray(pointer_f32(job.expert_weights + row * top_k * 4), top_k)
    _take_largest(values, ids, weights)
    if job.is_sigmoid != 0:
        for k in range(top_k):
            weights[k] = get_f32(job.probabilities + row * job.y_stride + 4 * ids[k])
    if job.top_p < 1.0:
        _sort_by_weight(ids, weights)
        _drop_smallest(ids, weights, np.float32(job.top_p))
    _sort_by_id(ids, weights)
    if job.renormalise != 0:
        total = _TINY if job.is_sigmoid != 0 else np.float32(0.0)
        for k in range(top_k):
            total += weights[k]
        for k in range(top_k):
            weights[k] /= total
    if job.scaling != 1.0:
        for k in range(top_k):
            weights[k] *= np.float32(job.scaling)


@compiled
def _take_largest(values: Any, ids: Any, best: Any) -> None:
    """Keep the best in descending order; a later value goes behind its equals."""
    count, top_k = 0, len(best)
    for index in range(len(values)):
        value = values[index]
        if count == top_k and not value > best[top_k - 1]:
            continue
        place = min(count, top_k - 1)
        while place > 0 and best[place - 1] < value:
            best[place], ids[place] = best[place - 1], ids[place - 1]
            place -= 1
        best[place], ids[place] = value, index
        count = min(count + 1, top_k)


@compiled
def _drop_smallest(ids: Any, descending: Any, top_p: Any) -> None:
    """Keep the largest until their sum reaches `top_p` of the sum of all, at least one."""
    total = np.float32(0.0)
    for k in range(len(ids)):
        total += descending[k]
    kept = np.float32(0.0)
    for k in range(len(ids)):
        if k > 0 and kept >= top_p * total:
            ids[k], descending[k] = _DROPPED, np.float32(0.0)
        kept += descending[k]


@compiled
def _sort_by_weight(ids: Any, weights: Any) -> None:
    """In descending order; softmax weights are already."""
    for k in range(1, len(ids)):
        expert, weight, place = ids[k], weights[k], k
        while place > 0 and weights[place - 1] < weight:
            ids[place], weights[place] = ids[place - 1], weights[place - 1]
            place -= 1
        ids[place], weights[place] = expert, weight


@compiled
def _sort_by_id(ids: Any, values: Any) -> None:
    for k in range(1, len(ids)):
        expert, value, place = ids[k], values[k], k
        while place > 0 and ids[place - 1] > expert:
            ids[place], values[place] = ids[place - 1], values[place - 1]
            place -= 1
        ids[place], values[place] = expert, value


class RouterStage:
    """Routers of one shape, for up to `max_tokens` tokens a call; one call at a time."""

    def __init__(self, team: ThreadTeam, spec: RouterSpec, hidden: int, norm_eps: float, max_tokens: int) -> None:
        self.spec, self._team = spec, team
        self._linear = NormedLinear(hidden, spec.num_experts, norm_eps, max_tokens, DEFAULT_PLANES)
        shape = (max_tokens, num_blocks(spec.num_experts) * 16)
        self._probabilities: F32Array = aligned_bytes(max_tokens * shape[1] * 4).view(np.float32).reshape(shape)
        self._ids: I32Array = np.zeros((max_tokens, spec.top_k), np.int32)
        self._weights: F32Array = np.zeros((max_tokens, spec.top_k), np.float32)
        self._group_scores: F32Array = np.zeros((max_tokens, spec.num_groups), np.float32)
        self._bound: dict[int, RouterWeights] = {}
        frame = self._linear.template
        frame["num_experts"], frame["top_k"], frame["renormalise"] = spec.num_experts, spec.top_k, spec.norm_topk_prob
        frame["probabilities"], frame["ids"] = self._probabilities.ctypes.data, self._ids.ctypes.data
        frame["expert_weights"], frame["top_p"] = self._weights.ctypes.data, spec.top_p
        frame["is_sigmoid"], frame["scaling"] = spec.scoring == "sigmoid", spec.scaling
        frame["num_groups"], frame["kept_groups"] = spec.num_groups, spec.kept_groups
        frame["group_scores"] = self._group_scores.ctypes.data

    @staticmethod
    def scratch_bytes(spec: RouterSpec, hidden: int, max_tokens: int) -> int:
        """Bytes a stage allocates, at most."""
        rows = num_blocks(spec.num_experts) * 64 + spec.top_k * 8 + spec.num_groups * 4
        return NormedLinear.scratch_bytes(hidden, spec.num_experts, max_tokens) + max_tokens * rows

    def __call__(self, x: F32Array, norm: F32Array, weights: RouterWeights) -> tuple[F32Array, I32Array, F32Array]:
        """x [T, D] float32, C-contiguous; norm [D] -> (h = norm(x) [T, D], ids [T, K], weights [T, K]).

        ids ascend within a token; -1: dropped by top-p, weight 0. The results are views of buffers of the stage, valid until the next call.
        """
        self._bind(weights)
        self._linear.run(self._team, STAGE, x, norm, weights.gate)
        return self.results(x.shape[0])

    def frame(self, x: F32Array, norm: F32Array, weights: RouterWeights) -> NDArray[np.void]:
        """The frame of a call, as part of a larger stage, which leaves `results`."""
        self._bind(weights)
        return self._linear.frame(x, norm, weights.gate)

    def _bind(self, weights: RouterWeights) -> None:
        """Put the vectors of a router that is met for the first time into its frame."""
        if id(weights) in self._bound:
            return
        frame = self._linear.bound(weights.gate)
        for name, vector in (("logit_bias", weights.bias), ("correction", weights.correction)):
            assert vector is None or (vector.shape == (self.spec.num_experts,) and vector.dtype == np.float32)
            frame[name] = 0 if vector is None else vector.ctypes.data
        self._bound[id(weights)] = weights

    def results(self, num_tokens: int) -> tuple[F32Array, I32Array, F32Array]:
        """What a call returns, for the last one."""
        return self._linear.h[:num_tokens], self._ids[:num_tokens], self._weights[:num_tokens]

    def logits(self, num_tokens: int) -> F32Array:
        """Gate logits [T, E] of the last call, a view; with sigmoid scores what the choice was made by."""
        return self._linear.y[:num_tokens, : self.spec.num_experts]
