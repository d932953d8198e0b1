"""Prefixes of models with recurrent states, over real processes: answers are those without sharing, and what was computed is not again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri_mp import Cluster

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3_5_moe"
PROMPT = [3 + 7 * i % 200 for i in range(100)]
OPTIONS: dict[str, Any] = {"num_workers": 1, "num_threads": 1, "ctx": 192, "prefill_chunk": 24}
GREEDY: dict[str, Any] = {"max_tokens": 13, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """States are kept, and tokens may be guessed."""
    with Cluster.launch(MODEL, state_slots=4, draft=4, **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[Cluster]:
    """Nothing is."""
    with Cluster.launch(MODEL, prefix_cache="off", **OPTIONS) as running:
        yield running


def test_turns_go_on_from_the_state_after_the_last_answer(shared: Cluster, alone: Cluster) -> None:
    """Three turns of a conversation, sampled: the same tokens, of which all whole blocks of the last turn are not computed again."""
    prompt = PROMPT[:40]
    for turn in range(3):
        options = {"max_tokens": 9, "temperature": 1.0, "seed": turn, "ignore_eos": True}
        got, want = shared.generate(prompt, **options, draft=0), alone.generate(prompt, **options)
        assert got.token_ids == want.token_ids
        assert got.stats["cached_tokens"] == (0 if turn == 0 else (len(prompt) - 3) // 16 * 16)
        assert want.stats["cached_tokens"] == 0
        prompt += [*got.token_ids, 50 + turn, 7]


def test_a_saved_session_has_its_state(shared: Cluster, alone: Cluster, tmp_path: Path) -> None:
    """Another launch goes on from the file, bit for bit, and computes only what it does not hold."""
    tokens = PROMPT + shared.generate(PROMPT, **GREEDY).token_ids
    saved = shared.save_session(tokens, tmp_path / "session")
    assert saved.num_tokens == 112
    tokens += [9, 9, 9]
    want = alone.generate(tokens, **GREEDY)
    with Cluster.launch(MODEL, **OPTIONS) as another:
        assert another.restore_session(tmp_path / "session").num_tokens == 112
        done = another.generate(tokens, **GREEDY)
        assert (done.token_ids, done.stats["cached_tokens"]) == (want.token_ids, 112)
        assert another.restore_session(tmp_path / "session").num_tokens == 112  # it is there already
        requests = another.stats()["requests"]
        assert requests["kv_blocks_free"] == requests["kv_blocks"]


@pytest.mark.parametrize("favoured", [{7: 100.0}, {7: 100.0, 8: 97.0}])
def test_guesses_that_are_wrong_leave_no_trace(shared: Cluster, alone: Cluster, favoured: dict[int, float]) -> None:
    """Tokens that can be guessed, always or mostly: they and their probabilities are those of plain decoding, bit for bit."""
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 1}
    got, want = (cluster.generate(PROMPT[:30], logit_bias=favoured, **options) for cluster in (shared, alone))
    assert got.token_ids == want.token_ids
    assert got.logprobs == want.logprobs
    assert got.stats["accepted_tokens"] > 5
    assert (got.stats["accepted_tokens"] < got.stats["drafted_tokens"]) == (len(favoured) > 1)
    assert len(set(got.token_ids)) == len(favoured)


def test_scores_are_computed_and_leave_nothing_half_done(shared: Cluster, alone: Cluster) -> None:
    """Logits of all positions take nothing from others; an answer after them is right, and a second one takes what it can."""
    prompt = [5, 6, 7, 8] * 12
    assert shared.logits(prompt).tobytes() == alone.logits(prompt).tobytes()
    want = alone.generate(prompt, **GREEDY).token_ids
    first, second = shared.generate(prompt, **GREEDY), shared.generate(prompt, **GREEDY)
    assert first.token_ids == second.token_ids == want
    assert (first.stats["cached_tokens"], second.stats["cached_tokens"]) == (0, 32)
