"""Router lookahead: what the next layers will ask for, predicted while a worker computes the current one.

    the state of layer L (after its attention) ─▶ norm and router of layer L + d ─▶ its top experts ─▶ Hint to their owner

The state is taken in one of two forms. `residual`: the stream through the norm of L + d. `input`: what layer L's own experts get,
the stream through the norm of L, straight into the router of L + d. Which predicts better differs from model to model: both are
tried for the first tokens, and the better one stays. A pair of layers whose prediction does not pay is left out from then on.

Nothing of this changes a result: a hint only makes a worker read earlier. Costs one router for each prediction, in the time in
which the coordinator would wait for the answer.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_mp.backend import Predictor
from colibri_mp.messages import Floats, Ints
from colibri_mp.trial import Trial

Form = Literal["residual", "input"]
FORMS: tuple[Form, ...] = ("residual", "input")
MOST_ROWS = 16
"""Rows of a step beyond which nothing is predicted: together they ask for nearly everything, and the disk has no idle moment."""
_TRIAL_PREDICTIONS = 32  # of each layer, before the better form is chosen and pairs that do not pay are left out
_LEAST_RECALL = 0.2

Send = Callable[[int, int, Ints], None]
"""(step, layer, experts): hint the owner of a layer."""


@dataclass(slots=True)
class Score:
    """Predictions that were held against the true route: experts predicted, experts asked for, and those in both."""

    count: int = 0
    predicted: int = 0
    asked: int = 0
    found: int = 0

    @property
    def recall(self) -> float:
        """Share of the experts asked for that had been predicted."""
        return self.found / self.asked if self.asked else 0.0


class Lookahead:
    """Predictions for one model. `send` is None where they are only measured; `trial` decides from step to step, if there is one."""

    def __init__(
        self, predictor: Predictor, has_router: Sequence[bool], width: int, distance: int, send: Send | None,
        trial: Trial | None = None,
    ) -> None:  # fmt: skip
        """`has_router`: of each layer; `width`: experts that `predictor` gives for each row; `distance`: layers ahead, at most."""
        self.width, self.distance = width, distance
        self.form: Form | None = None  # not chosen yet
        self.scores: dict[tuple[Form, int, int], Score] = {}  # by form, distance, target layer
        self._predict, self._has_router = predictor, has_router
        self._send, self._trial = send, trial
        self._predicted: dict[tuple[int, int], list[tuple[Form, int, Ints]]] = {}  # by step and target layer

    def start_step(self, step: int) -> None:
        """What was predicted for steps long over is of no use any more; the one before may still be under way."""
        for old in [key for key in self._predicted if key[0] < step - 1]:
            del self._predicted[old]

    def end_step(self, seconds: float, num_rows: int, num_reads: int) -> None:
        """A step without prefill took so long, and needed so many experts that were not in memory."""
        if self._trial is not None and num_rows <= MOST_ROWS:
            self._trial.note(seconds, num_rows, num_reads)

    def check(self, step: int, layer: int, ids: Ints) -> None:
        """The true route of a layer, ids [T, K]: score what was predicted for it."""
        predictions = self._predicted.pop((step, layer), None)
        if predictions is None:
            return
        asked = set(ids.ravel().tolist()) - {-1}
        for form, distance, experts in predictions:
            score = self.scores.setdefault((form, distance, layer), Score())
            score.count += 1
            score.predicted += len(experts)
            score.asked += len(asked)
            score.found += len(asked.intersection(experts.tolist()))

    def predict(self, step: int, layer: int, x: Floats) -> None:
        """Predict from layer `layer`, with its residual stream x [T, D] after attention."""
        if len(x) > MOST_ROWS or (self._trial is not None and not self._trial.is_on):
            return
        if self.form is None and self._trial_is_over():
            self.form = "input" if self._share_found("input") > self._share_found("residual") else "residual"
        for distance in range(1, self.distance + 1):
            target = layer + distance
            if target >= len(self._has_router) or not self._has_router[target]:
                continue
            for form in (self.form,) if self.form else FORMS:
                if self._pays(form, distance, target):
                    experts = _by_weight(*self._predict(target, layer if form == "input" else target, x))
                    self._predicted.setdefault((step, target), []).append((form, distance, experts))
                    if self._send is not None and form == (self.form or FORMS[0]):
                        self._send(step, target, experts)

    def _share_found(self, form: Form) -> float:
        return self.recall(form).recall

    def _trial_is_over(self) -> bool:
        counts = Counter[tuple[int, int]]()
        for (_, distance, target), score in self.scores.items():
            counts[distance, target] += score.count
        return bool(counts) and min(counts.values()) >= len(FORMS) * _TRIAL_PREDICTIONS

    def _pays(self, form: Form, distance: int, target: int) -> bool:
        score = self.scores.get((form, distance, target))
        return score is None or score.count < _TRIAL_PREDICTIONS or score.recall >= _LEAST_RECALL

    # -- reports -------------------------------------------------------------------------------------------------------

    def recall(self, form: Form, distance: int | None = None) -> Score:
        """The sum of a form's scores, of one distance or all."""
        total = Score()
        for (kind, ahead, _), score in self.scores.items():
            if kind == form and distance in (None, ahead):
                total = Score(*(a + b for a, b in zip(_fields(total), _fields(score), strict=True)))
        return total

    def describe(self) -> dict[str, Any]:
        """For `status`: recall of each form and distance, and of each layer for the form in use."""
        form = self.form or FORMS[0]
        return {
            "width": self.width,
            "distance": self.distance,
            "input": self.form or "on trial",
            "recall": {
                kind: {str(ahead): self.recall(kind, ahead).recall for ahead in range(1, self.distance + 1)}
                for kind in FORMS
            },
            "gain": self._trial.gain if self._trial else None,
            "is_on": self._send is not None and (self._trial is None or self._trial.is_on),
            "predictions": self.recall(form).count,
            "layers": {
                str(target): score.recall
                for (kind, ahead, target), score in sorted(self.scores.items())
                if kind == form and ahead == 1
            },
        }


def _fields(score: Score) -> tuple[int, int, int, int]:
    return score.count, score.predicted, score.asked, score.found


def _by_weight(ids: Ints, weights: NDArray[np.float32]) -> Ints:
    """The distinct experts of ids [T, K], the one with the largest weight for any row first."""
    order = np.argsort(-weights, axis=None, kind="stable")
    experts = ids.ravel()[order]
    _, first = np.unique(experts, return_index=True)
    likeliest: Ints = experts[np.sort(first)]
    return likeliest
