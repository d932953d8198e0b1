"""Answers and logits with a shared prefix are, bit for bit, those without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_mp import Cluster

TINY = Path(__file__).parents[1] / "golden" / "tiny"
MODELS = ["olmoe", "mixtral_swa_tied"]  # without and with a sliding window


@pytest.fixture(scope="module", params=MODELS)
def clusters(request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, Cluster]]:
    """The same model with and without sharing; little KV memory, prompts in several chunks."""
    options: dict[str, Any] = {"num_workers": 1, "num_threads": 1, "ctx": 128, "prefill_chunk": 24}
    with (
        Cluster.launch(TINY / request.param, **options) as shared,
        Cluster.launch(TINY / request.param, prefix_cache="off", **options) as alone,
    ):
        yield shared, alone


def test_next_turns_are_those_without_sharing(clusters: tuple[Cluster, Cluster]) -> None:
    """Five turns of a growing conversation, sampled: the same tokens, of which the old ones are not computed again."""
    shared, alone = clusters
    prompt = list(range(1, 40))
    for turn in range(5):
        options = {"max_tokens": 9, "temperature": 1.0, "seed": turn, "ignore_eos": True}
        got, want = shared.generate(prompt, **options), alone.generate(prompt, **options)
        assert got.token_ids == want.token_ids
        assert want.stats["cached_tokens"] == 0
        assert got.stats["cached_tokens"] == (0 if turn == 0 else (len(prompt) - 3) // 16 * 16)
        prompt += [*got.token_ids, 50 + turn, 7]
    assert shared.stats()["prefix_cache"]["hit_tokens"] > 0
    assert not alone.stats()["prefix_cache"]["enabled"]


def test_scores_after_answers_are_those_without_sharing(clusters: tuple[Cluster, Cluster]) -> None:
    """Logits of every position are computed and equal, also where an answer begins in blocks that a score left."""
    shared, alone = clusters
    prompt = [5, 6, 7, 8] * 12
    np.testing.assert_array_equal(shared.logits(prompt), alone.logits(prompt))
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    got, want = shared.generate(prompt, **options), alone.generate(prompt, **options)
    assert got.token_ids == want.token_ids
    assert got.stats["cached_tokens"] == 32
    tokens = prompt + got.token_ids
    np.testing.assert_array_equal(shared.logits(tokens), alone.logits(tokens))
