"""Drafted answers of whole clusters are those of plain decoding, bit for bit: every family, greedy and sampled, many at once."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri_mp import Cluster
from colibri_mp.messages import Constraint, Failed, Finished, Piece

TINY = Path(__file__).parents[1] / "golden" / "tiny"
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral_swa_tied", "qwen3_next", "deepseek_v3", "glm_moe_dsa_shared")


def answers(cluster: Cluster, prompts: list[list[int]], draft: int, **options: Any) -> list[list[Any]]:
    """Tokens, logprobs and end of each prompt's answer, all asked for at once, each with a seed of its own."""
    ids = [
        cluster.submit(prompt, draft=draft, seed=seed, logprobs=2, ignore_eos=True, **options)
        for seed, prompt in enumerate(prompts)
    ]
    found: dict[int, list[Any]] = {request_id: [] for request_id in ids}
    while (event := cluster.next_event()) is not None:
        request_id, message = event
        assert not isinstance(message, Failed), message
        if isinstance(message, Piece):
            found[request_id] += [message.token_ids, message.logprobs]
        if isinstance(message, Finished):
            found[request_id].append(message.finish_reason)
    return [found[request_id] for request_id in ids]


@pytest.fixture(params=FAMILIES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A family's fixture, with a pool that holds the experts of a few rows."""
    with Cluster.launch(TINY / request.param, num_workers=1, num_threads=1, ctx=128, kv_tokens=512, draft=5) as running:
        yield running


def test_drafted_answers_are_plain_answers(cluster: Cluster) -> None:
    """Repetitive prompts, together and with several temperatures: the same tokens and logprobs, though tokens were guessed."""
    rng = random.Random(7)
    phrases = [[rng.randrange(256) for _ in range(length)] for length in (3, 5, 9)]
    prompts = [phrase * (30 // len(phrase)) + phrase[:2] for phrase in phrases]
    for temperature in (0.0, 0.4):  # a bias for three tokens: answers repeat themselves
        options = {"max_tokens": 40, "temperature": temperature, "logit_bias": dict.fromkeys((3, 4, 5), 6.0)}
        assert answers(cluster, prompts, 5, **options) == answers(cluster, prompts, 0, **options)
    said = cluster.stats()["drafting"]
    assert said["proposed_tokens"] > 0


def test_built_in_model_drafts_under_a_constraint() -> None:
    """A constrained answer is the same with guesses, which the constraint judges as any token; text and stop strings too."""
    with Cluster.launch("demo", num_workers=1, num_threads=1, ctx=256, draft=4) as running:
        constraint = Constraint("regex", "(one, two, three, )+end")
        plain, drafted = (
            running.generate("Once", constraint=constraint, max_tokens=60, temperature=0.9, seed=3, draft=draft)
            for draft in (0, 4)
        )
        assert (drafted.text, drafted.token_ids, drafted.finish_reason) == (
            plain.text,
            plain.token_ids,
            plain.finish_reason,
        )
        assert drafted.stats["drafted_tokens"] > 0
        stopped = [
            running.generate("la la la la la la", stop=[" la la la"], max_tokens=30, temperature=0.0, draft=draft)
            for draft in (0, 4)
        ]
        assert stopped[0].text == stopped[1].text
