"""Guesses by a model's own predictor (MTP), through real processes: right ones are taken, wrong ones change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversion import made
from predictor_fixture import Edit, perfect_predictor, random_mtp, random_predictor, with_predictor

from colibri_mp import Cluster
from colibri_mp.checkpoint import Checkpoint
from colibri_mp.messages import Failed, Finished, Piece
from colibri_mp.models import load_model

SMALL: dict[str, Any] = {"num_workers": 2, "num_threads": 1, "ctx": 128, "kv_tokens": 512, "prefill_chunk": 24}
PROMPTS = [list(range(3, 40)), [7, 8, 9] * 3, [250]]


def answers(cluster: Cluster, draft: int, **options: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Tokens and statistics of the answers to all prompts, asked for at once."""
    ids = [
        cluster.submit(prompt, draft=draft, seed=seed, max_tokens=40, ignore_eos=True, **options)
        for seed, prompt in enumerate(PROMPTS)
    ]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    stats: dict[int, dict[str, Any]] = {}
    while (event := cluster.next_event()) is not None:
        request_id, message = event
        assert not isinstance(message, Failed), message
        if isinstance(message, Piece):
            tokens[request_id] += message.token_ids
        if isinstance(message, Finished):
            stats[request_id] = message.stats
    return [(tokens[request_id], stats[request_id]) for request_id in ids]


def test_right_guesses_are_taken(tmp_path: Path) -> None:
    """A predictor that is always right: every guess is taken, and greedy answers are those without guesses."""
    with Cluster.launch(with_predictor("glm4_moe", tmp_path, perfect_predictor), draft=3, **SMALL) as cluster:
        plain = answers(cluster, 0, temperature=0.0)
        drafted = answers(cluster, 3, temperature=0.0)
        stats = cluster.stats()
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    assert stats["drafting"]["source"] == "mtp"
    assert stats["drafting"]["accepted_tokens"] == stats["drafting"]["proposed_tokens"] > 0
    assert stats["model"]["num_layers"] == 4


@pytest.mark.parametrize(
    ("family", "predictor"),
    [("glm4_moe_groups", random_predictor), ("glm_moe_dsa", random_predictor), ("qwen3_next", random_mtp)],
)
def test_wrong_guesses_change_nothing(tmp_path: Path, family: str, predictor: Edit) -> None:
    """A predictor of random weights, greedy and sampled, prompts in several chunks and together: the same tokens; prefixes are shared."""
    with Cluster.launch(with_predictor(family, tmp_path, predictor), draft=2, **SMALL) as cluster:
        for options in ({"temperature": 0.0}, {"temperature": 1.0}):
            plain, drafted = answers(cluster, 0, **options), answers(cluster, 2, **options)
            assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
            assert drafted[0][1]["cached_tokens"] > 0
        said = cluster.stats()["drafting"]
        assert said["proposed_tokens"] > 0


def test_without_guesses_the_predictor_is_left_out(tmp_path: Path) -> None:
    """Its layer is there only where tokens are guessed; its experts then belong to the layer after the last."""
    checkpoint = Checkpoint.open(with_predictor("glm4_moe", tmp_path, random_predictor))
    plain, predicting = load_model(checkpoint), load_model(checkpoint, predicts=True)
    assert (len(plain.layers), plain.predictors) == (4, ())
    assert (len(predicting.layers), predicting.depth) == (5, 4)
    assert [experts.layer for experts in predicting.expert_layers] == [1, 2, 3, 4]


@pytest.mark.parametrize(("family", "predictor"), [("glm4_moe", random_predictor), ("qwen3_next", random_mtp)])
def test_container_has_the_predictors_experts(tmp_path: Path, family: str, predictor: Edit) -> None:
    """Converted with the others, as the layer after the last; used where tokens are guessed, left out elsewhere."""
    made(with_predictor(family, tmp_path, predictor), tmp_path / "container")
    container = Checkpoint.open(tmp_path / "container")
    last = load_model(container, predicts=True).expert_layers[-1]
    assert (last.layer, last.is_packed) == (4, True)
    assert len(load_model(container).layers) == 4


def test_container_without_the_predictors_experts_has_no_predictor(tmp_path: Path) -> None:
    """An older one: tokens are guessed from the text."""
    made(with_predictor("glm4_moe", tmp_path, random_predictor), tmp_path / "container")
    container = Checkpoint.open(tmp_path / "container")
    older = replace(container, packed_layers={i: found for i, found in container.packed_layers.items() if i < 4})
    assert not load_model(older, predicts=True).uses_predictor
