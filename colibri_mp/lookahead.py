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

Form = Literal["residual", "input"]
FORMS: tuple[Form, ...] = ("residual", "input")
MOST_ROWS = 16
"""Rows of a step beyond which nothing is predicted: together they ask for nearly everything, and the disk has no idle moment."""
_TRIAL_PREDICTIONS = 32  # of each layer, before the better form is chosen and pairs that do not pay are left out
_LEAST_RECALL = 0.2
_CHANGE = 2.0  # times as many reads a step, or as few, are another situation than that of the last trial
_FEW_READS = 0.5  # a step: differences below are chance

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


class Trial:
    """Whether hints pay here: some decode steps with and without them in turn, then the quicker way for a long while.

    A read that the page cache serves takes less time than the hint for it; one from a disk takes many times more. What the
    machine has, and how much of it is left by others, is nothing to be guessed. The blocks of a trial are off, on, on, off, off,
    on, on, off: a pool that gets warmer speaks for neither. A new trial begins early where steps read twice as much as in the last
    one, or half.
    """

    def __init__(self, block: int = 16, rounds: int = 4, keep: int = 2048) -> None:
        """Steps of a block, blocks of each kind in a trial, steps until the next trial."""
        self._block, self._rounds, self._keep = block, rounds, keep
        self.is_on = False
        self.gain: float | None = None  # of the last trial: time without hints over time with them
        self._reads = 0.0  # of a step, in the last trial
        self._begin()

    def note(self, seconds: float, num_rows: int, num_reads: int) -> None:
        """A decode step took so long, for which so many experts had to be read, ahead of it or in it.

        Steps of different numbers of rows cannot be compared: then a trial under way begins anew.
        """
        self._num_reads += num_reads
        self._num_steps += 1
        if self._kept:
            self._look_for_change()
            return
        if num_rows != self._num_rows:
            self._begin(num_rows)
            return
        self._seconds[self.is_on].append(seconds)
        if self._num_steps % self._block == 0:
            self.is_on = self._num_steps // self._block % 4 in (1, 2)
            if self._num_steps == 2 * self._block * self._rounds:
                self._decide()

    def _begin(self, num_rows: int = 1) -> None:
        self._kept, self._num_rows = 0, num_rows
        self._num_reads = self._num_steps = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self.is_on = False

    def _decide(self) -> None:
        """Means, not medians: it is the rare long waits that hints are for."""
        self.gain = sum(self._seconds[False]) / sum(self._seconds[True])
        self.is_on, self._kept = self.gain > 1.0, self._keep
        self._reads = self._num_reads / self._num_steps
        self._num_reads = self._num_steps = 0

    def _look_for_change(self) -> None:
        """In the steps after a trial: whether it is time for another one."""
        self._kept -= 1
        if self._num_steps == 2 * self._block:
            reads, self._num_reads, self._num_steps = self._num_reads / self._num_steps, 0, 0
            if max(reads, self._reads) > _CHANGE * min(reads, self._reads) + _FEW_READS:
                self._kept = 0
        if not self._kept:
            self._begin()


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
        self._predicted: dict[int, list[tuple[Form, int, Ints]]] = {}  # by target layer, of this step

    def start_step(self) -> None:
        """What was predicted for the step before is of no use any more."""
        self._predicted.clear()

    def end_step(self, seconds: float, num_rows: int, num_reads: int) -> None:
        """A step without prefill took so long, and needed so many experts that were not in memory."""
        if self._trial is not None and num_rows <= MOST_ROWS:
            self._trial.note(seconds, num_rows, num_reads)

    def check(self, layer: int, ids: Ints) -> None:
        """The true route of a layer, ids [T, K]: score what was predicted for it."""
        predictions = self._predicted.pop(layer, None)
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
                    self._predicted.setdefault(target, []).append((form, distance, experts))
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
