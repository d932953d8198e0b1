"""Lookahead: what is predicted, how it is scored, and the trial that decides whether it pays."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import F32, random_matrix

from colibri_mp.kernels.router import RouterStage, RouterWeights
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.lookahead import MOST_ROWS, Lookahead
from colibri_mp.resident import ResidentLayer
from colibri_mp.specs import RouterSpec
from colibri_mp.trial import Trial

HIDDEN, NUM_EXPERTS, NUM_LAYERS = 32, 12, 4


ROUTER = RouterSpec(NUM_EXPERTS, 3, norm_topk_prob=False)


class _Thread:
    """The thread that predicts."""

    team: ThreadTeam


def layers(dense: int | None = None) -> list[ResidentLayer]:
    """Random routers and norms; layer `dense` has no router."""
    rng = np.random.default_rng(0)
    norms = [(1 + rng.standard_normal(HIDDEN) / 2).astype(np.float32) for _ in range(NUM_LAYERS)]
    gates = [random_matrix(rng, F32, NUM_EXPERTS, HIDDEN) for _ in range(NUM_LAYERS)]
    unused: Any = None
    return [
        ResidentLayer(unused, unused, norm, None if idx == dense else RouterWeights(gate), None, None)
        for idx, (norm, gate) in enumerate(zip(norms, gates, strict=True))
    ]


@pytest.fixture(autouse=True)
def team() -> Iterator[None]:
    """It runs while a test does."""
    with ThreadTeam(1) as _Thread.team:
        yield


@pytest.fixture
def sent() -> list[tuple[int, int, list[int]]]:
    """(step, layer, experts) of every hint."""
    return []


def make(sent: list[tuple[int, int, list[int]]], width: int = 0, distance: int = 1, **more: Any) -> Lookahead:
    """A lookahead that notes its hints in `sent`."""
    parts = layers(more.pop("dense", None))
    width = width or ROUTER.top_k
    stage = RouterStage(_Thread.team, replace(ROUTER, top_k=width), HIDDEN, 1e-6, MOST_ROWS)

    def predict(layer_idx: int, norm_idx: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return stage(x, parts[norm_idx].mlp_norm, parts[layer_idx].router)[1:]

    send = None if more.pop("measured", False) else lambda *hint: sent.append((*hint[:2], hint[2].tolist()))
    has_router = [part.router is not None for part in parts]
    return Lookahead(predict, has_router, width, distance, send, more.pop("trial", None))


def expected(target: int, norm_of: int, x: np.ndarray, width: int) -> list[int]:
    """The experts of the largest logits, in plain numpy; for one row."""
    parts = layers()
    router = parts[target].router
    assert router is not None
    values = (
        router.gate.data.view(np.float32).reshape(1, HIDDEN, 16).transpose(0, 2, 1).reshape(16, HIDDEN)[:NUM_EXPERTS]
    )
    normed = x[0] / np.sqrt((x[0] ** 2).mean() + 1e-6) * parts[norm_of].mlp_norm
    order: list[int] = np.argsort(-(values @ normed)).tolist()
    return order[:width]


def test_hints_are_the_next_routers_choice(sent: list[tuple[int, int, list[int]]]) -> None:
    """The target's norm and router on the stream, likeliest first, so many layers ahead, not beyond the last."""
    x = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32)
    lookahead = make(sent, width=4, distance=2)
    lookahead.predict(7, 0, x)
    lookahead.predict(7, 2, x)
    lookahead.predict(7, 3, x)
    assert sent == [(7, target, expected(target, target, x, 4)) for target in (1, 2, 3)]


def test_nothing_for_dense_layers_many_rows_or_a_measurement(sent: list[tuple[int, int, list[int]]]) -> None:
    """A layer without a router has no experts; a large batch asks for nearly all; `measure` scores and is silent."""
    x = np.ones((MOST_ROWS + 1, HIDDEN), np.float32)
    make(sent, dense=1).predict(0, 0, x[:1])
    make(sent).predict(0, 0, x)
    measured = make(sent, measured=True)
    measured.predict(0, 0, x[:1])
    assert not sent
    measured.check(0, 1, np.array([expected(1, 1, x, 3)], np.int32))
    assert measured.recall("residual").recall == 1.0


def test_batches_are_united(sent: list[tuple[int, int, list[int]]]) -> None:
    """Each row's experts, the largest weight of any row first, none twice."""
    x = np.random.default_rng(2).standard_normal((3, HIDDEN)).astype(np.float32)
    make(sent).predict(0, 0, x)
    ((_, _, experts),) = sent
    assert set(experts) == {expert for row in x for expert in expected(1, 1, row[None], 3)}
    assert len(set(experts)) == len(experts)


def test_recall_counts_what_was_asked_for() -> None:
    """Found over asked for; ids below zero were not asked for; what was predicted for an earlier step is forgotten."""
    x = np.random.default_rng(3).standard_normal((1, HIDDEN)).astype(np.float32)
    lookahead = make([])
    lookahead.predict(0, 0, x)
    first = expected(1, 1, x, 3)
    others = [e for e in range(NUM_EXPERTS) if e not in first]
    lookahead.check(0, 1, np.array([[first[0], others[0], -1]], np.int32))
    score = lookahead.recall("residual")
    assert (score.count, score.predicted, score.asked, score.found) == (1, 3, 2, 1)
    lookahead.predict(0, 0, x)
    lookahead.start_step(2)
    lookahead.check(0, 1, np.array([first], np.int32))
    assert lookahead.recall("residual").count == 1


def test_the_better_form_stays_and_useless_pairs_are_left_out(sent: list[tuple[int, int, list[int]]]) -> None:
    """After the trial only one form is computed; a layer whose prediction finds next to nothing gets no hints."""
    rng = np.random.default_rng(4)
    lookahead = make(sent)
    for step in range(40):
        x = rng.standard_normal((1, HIDDEN)).astype(np.float32)
        lookahead.start_step(step)
        for layer in range(NUM_LAYERS):
            target = layer + 1
            right = expected(target, layer, x, 3) if target < NUM_LAYERS else []
            wrong = (
                [e for e in range(NUM_EXPERTS) if e not in right and e not in expected(target, target, x, 3)]
                if right
                else []
            )
            lookahead.predict(step, layer, x)
            if right:
                lookahead.check(step, target, np.array([wrong[:3] if target == 2 else right], np.int32))
    assert lookahead.form == "input"
    counts = {key: score.count for key, score in lookahead.scores.items()}
    assert counts["input", 1, 1] == 40 > counts["residual", 1, 1] == 32
    assert counts["input", 1, 2] == 32, "found nothing in 32 predictions, so it is left out"
    assert {layer for step, layer, _ in sent if step > 35} == {1, 3}
    described = lookahead.describe()
    assert described["input"] == "input"
    assert described["layers"]["1"] == 1.0


def run_trial(
    trial: Trial, seconds: dict[bool, float], num_steps: int, num_rows: int = 1, num_reads: int = 3
) -> list[bool]:
    """Whether hints were on in each of some steps that took so long with and without them."""
    states = []
    for _ in range(num_steps):
        states.append(trial.is_on)
        trial.note(seconds[trial.is_on], num_rows, num_reads)
    return states


@pytest.mark.parametrize("gain", [0.8, 1.2])
def test_trial_keeps_what_is_faster(gain: float) -> None:
    """Blocks without and with in turn, then the faster way, then another trial."""
    trial = Trial(block=2, rounds=2, keep=5)
    seconds = {False: 1.0, True: 1.0 / gain}
    states = run_trial(trial, seconds, 16)
    assert states[:8] == [False, False, True, True, True, True, False, False]
    assert states[8:13] == [gain > 1] * 5
    assert states[13:] == [False, False, True]
    assert trial.gain == pytest.approx(gain)


def test_trial_is_fair_while_the_pool_gets_warmer() -> None:
    """Steps that get shorter all the time speak for neither way."""
    trial = Trial(block=2, rounds=4)
    for step in range(16):
        trial.note(100.0 - step, 1, 3)
    assert trial.gain == 1.0
    assert not trial.is_on


def test_trial_begins_anew_with_other_batches() -> None:
    """Steps of one and of four sequences are not compared."""
    trial = Trial(block=2, rounds=1, keep=50)
    run_trial(trial, {False: 1.0, True: 0.1}, 3)
    assert trial.is_on
    run_trial(trial, {False: 1.0, True: 2.0}, 5, num_rows=4)
    assert (trial.is_on, trial.gain) == (False, 0.5)


@pytest.mark.parametrize("num_reads", [0, 20])
def test_trial_is_repeated_when_the_disk_has_another_part(num_reads: int) -> None:
    """Hints that paid while three experts a step were missing are tried again where none is, or twenty."""
    trial = Trial(block=2, rounds=1, keep=1000)
    run_trial(trial, {False: 1.0, True: 0.5}, 4)
    assert run_trial(trial, {False: 1.0, True: 0.5}, 8) == [True] * 8
    states = run_trial(trial, {False: 1.0, True: 2.0}, 12, num_reads=num_reads)
    assert states == [True] * 4 + [False, False, True, True] + [False] * 4
