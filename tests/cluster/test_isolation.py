"""Sessions beside each other: each transcript is, bit for bit, that of the session alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri_mp import Cluster
from colibri_mp.messages import Finished, Piece

TINY = Path(__file__).parents[1] / "golden" / "tiny"
MODELS = ["olmoe", "qwen3_next"]  # without and with recurrent states
NUM_SESSIONS, NUM_TURNS = 16, 3
Answer = list[tuple[int, float]]
"""Tokens with their log probabilities."""
SYSTEM = [3 + 5 * i % 250 for i in range(37)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Path:
    """One after the other."""
    return TINY / str(request.param)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """KV memory for 256 tokens and slots for 8 states: a third of what the sessions together would like to keep. Those that decode
    are in two groups.
    """
    with Cluster.launch(
        model, num_workers=2, num_threads=2, ctx=256, slots=4, prefill_chunk=32, overlap="on"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def plain_cluster(model: Path) -> Iterator[Cluster]:
    """Nothing is shared and everything in memory."""
    options: dict[str, Any] = {"ctx": 256, "kv_tokens": 8 * 256, "prefix_cache": "off"}
    with Cluster.launch(model, num_workers=1, num_threads=1, **options) as running:
        yield running


def options(session: int, turn: int) -> dict[str, Any]:
    """Sampling of a turn."""
    fixed = {"temperature": 0.9, "ignore_eos": True, "logprobs": 0}
    return {**fixed, "max_tokens": 5 + session % 4, "seed": 100 * session + turn}


def turn_tokens(session: int, turn: int) -> list[int]:
    """What the user says: secrets that no other session has."""
    rng = random.Random(1000 * session + turn)
    return [rng.randrange(3, 250) for _ in range(rng.randrange(4, 12))]


def alone(cluster: Cluster, session: int) -> list[Answer]:
    """All answers of a session, with nobody else there."""
    prompt, answers = list(SYSTEM), []
    for turn in range(NUM_TURNS):
        prompt += turn_tokens(session, turn)
        done = cluster.generate(prompt, **options(session, turn))
        answers.append([(entry.token_id, entry.logprob) for entry in done.logprobs])
        prompt += done.token_ids
    return answers


class Session:
    """A session of which one event is taken at a time; now and then it abandons an answer and asks again."""

    def __init__(self, cluster: Cluster, number: int, rng: random.Random) -> None:
        self.answers: list[Answer] = []
        self.num_cancelled = 0
        self._cluster, self._number, self._rng = cluster, number, rng
        self._prompt = SYSTEM + turn_tokens(number, 0)
        self._ask()

    def advance(self) -> None:
        """Take an event, or leave."""
        if self._rng.random() < 0.15 and self.num_cancelled < 3:
            self.num_cancelled += 1
            self._events.close()
            self._ask()
            return
        match next(self._events):
            case Piece(logprobs=logprobs):
                self._answer += [(entry.token_id, entry.logprob) for entry in logprobs]
            case Finished():
                self.answers.append(self._answer)
                self._prompt += [token for token, _ in self._answer] + turn_tokens(self._number, len(self.answers))
                self._events.close()
                if not self.is_over:
                    self._ask()

    @property
    def is_over(self) -> bool:
        """Whether all turns have been answered."""
        return len(self.answers) == NUM_TURNS

    def _ask(self) -> None:
        self._answer: Answer = []
        self._events: Any = self._cluster.events(self._prompt, **options(self._number, len(self.answers)))


def test_sixteen_interleaved_sessions_are_those_of_each_alone(
    cluster: Cluster, plain_cluster: Cluster, model: Path
) -> None:
    """Common system prompt, own secrets, random cancels, shared blocks that are evicted: tokens and
    log probabilities are those of each alone.
    """
    rng = random.Random(4)
    sessions = [Session(cluster, number, rng) for number in range(NUM_SESSIONS)]
    while running := [session for session in sessions if not session.is_over]:
        rng.choice(running).advance()
    together = cluster.stats()
    assert [session.answers for session in sessions] == [alone(plain_cluster, number) for number in range(NUM_SESSIONS)]
    assert sum(session.num_cancelled for session in sessions) > NUM_SESSIONS
    assert together["prefix_cache"]["hit_tokens"] > len(SYSTEM) * NUM_SESSIONS // 2
    assert together["prefix_cache"]["evicted_blocks"] > 0
    assert (together["prefix_cache"]["evicted_states"] > 0) == (model.name == "qwen3_next")
    assert 20 < together["progress"]["two_groups"]["steps"] < together["progress"]["steps"], "of both kinds"
    requests = cluster.stats()["requests"]
    assert (requests["active"], requests["kv_blocks_free"]) == (0, requests["kv_blocks"])


def test_kv_memory_for_several_whole_contexts(plain_cluster: Cluster) -> None:
    """With `--kv-tokens` of eight contexts, eight sessions that may fill theirs run at once; one session has no more than before."""
    full = {**options(1, 0), "max_tokens": 250}
    streams = [plain_cluster.events(turn_tokens(number, 0)[:4], **full) for number in range(8)]
    for stream in streams:
        next(stream)
    requests = plain_cluster.stats()["requests"]
    assert (requests["running_sequences"], requests["waiting_sequences"]) == (8, 0)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert plain_cluster.stats()["model"]["ctx_tokens"] == 256
