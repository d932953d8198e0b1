"""The built-in model, as a user has it: text of the kinds asked for, chat, stops, and the reference engines' tokens."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from colibri_mp import Cluster
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.errors import RequestError
from colibri_mp.memory import process_bytes
from colibri_mp.messages import Conversation, Finished, Progress

GOLDEN = Path(__file__).parents[1] / "golden"
REFERENCE = json.loads((GOLDEN / "demo_model.json").read_text())
MOST_BYTES = 16_000_000
KINDS = {
    "Once upon a time": ("the", "and"),
    "And the king said": ("the", "and"),
    "def fibonacci(": ("self", "return", "):", '"""', "=", "_"),
    "En el principio": ("de", "la", "y", "que"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The built-in model in a quarter of its experts: reading goes on all the time."""
    with Cluster.launch("demo", num_workers=2, num_threads=2, ctx=512, slots=8) as running:
        yield running


def test_it_is_small() -> None:
    """The whole folder, tokenizer and card included, takes at most 16 MB."""
    assert sum(path.stat().st_size for path in resolve("demo").rglob("*") if path.is_file()) <= MOST_BYTES


def test_same_greedy_tokens_as_the_reference_engines(cluster: Cluster) -> None:
    """Every prompt on which transformers and mlx_lm agree gets the same tokens here; they agree on nearly all."""
    agreed = [case for case in REFERENCE["cases"] if case["token_ids"]["transformers"] == case["token_ids"]["mlx"]]
    assert len(agreed) >= max(6, len(REFERENCE["cases"]) - 1)
    for case in agreed:
        done = cluster.generate(case["prompt_ids"], max_tokens=REFERENCE["num_tokens"], temperature=0.0)
        wanted = case["token_ids"]["transformers"]
        assert done.token_ids == wanted, case["name"]
        assert done.finish_reason == ("stop" if case["is_ended"] else "length"), case["name"]


def test_references_are_of_this_checkpoint() -> None:
    """The golden files were made with the checkpoint that is shipped."""
    weights = resolve("demo") / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == REFERENCE["fingerprint"]


def test_same_logits_as_transformers(cluster: Cluster) -> None:
    """Teacher-forced logits agree with the dequantised model in transformers (float32)."""
    golden = np.load(GOLDEN / "demo_model_logits.npz")
    logits = cluster.logits(golden["prompt_ids"].tolist())
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("prompt", KINDS)
def test_text_of_the_kind_asked_for(cluster: Cluster, prompt: str) -> None:
    """A plain prompt is continued with words that its kind of text is made of, in most of four tries."""
    texts = [cluster.generate(prompt, max_tokens=96, temperature=0.7, top_p=0.95, seed=seed).text for seed in range(4)]
    fitting = [text for text in texts if sum(word in text for word in KINDS[prompt]) >= 2]
    assert len(fitting) >= 3, texts


def test_chat_answers_end_by_themselves(cluster: Cluster) -> None:
    """Definitions stop at the end-of-text token well before the context does."""
    reasons = []
    for word in ("river", "horse", "courage", "to sing"):
        question = [{"role": "user", "content": f"Define: {word}"}]
        done = cluster.generate(question, max_tokens=300, temperature=0.7, seed=3)
        reasons.append(done.finish_reason)
        assert done.text.startswith(("(", "1.")), done.text
    assert reasons.count("stop") >= 3


@pytest.mark.parametrize(
    ("conversation", "what"),
    [
        (Conversation([{"content": "a"}]), "needs a role"),
        (Conversation([{"role": 7, "content": "a"}]), "needs a role"),
        (Conversation([{"role": "user"}]), "refuses these messages"),
        (Conversation([{"role": "user", "content": "a"}], template_options={"messages": []}), "cannot set messages"),
    ],
)
def test_conversations_that_make_no_prompt(cluster: Cluster, conversation: Conversation, what: str) -> None:
    """What the template cannot use is an error of the request."""
    with pytest.raises(RequestError, match=what):
        cluster.generate(conversation)


def test_stop_strings_end_before_themselves(cluster: Cluster) -> None:
    """The text ends before the stop string, in the stream as well, whatever the pieces."""
    free = cluster.generate("And the king said", max_tokens=64, temperature=0.0, ignore_eos=True).text
    stop = free[20:23]
    pieces = list(cluster.stream("And the king said", max_tokens=64, temperature=0.0, ignore_eos=True, stop=stop))
    assert "".join(pieces) == free[: free.index(stop)]
    *_, end = cluster.events("And the king said", max_tokens=64, temperature=0.0, ignore_eos=True, stop=stop)
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.stopped_by) == ("stop", stop)


def test_streamed_characters_are_whole(cluster: Cluster) -> None:
    """Characters of several bytes never come in halves, also where the model writes nonsense."""
    text = ""
    for event in cluster.events("año niño corazón ¿", max_tokens=120, temperature=2.0, seed=4, ignore_eos=True):
        assert not isinstance(event, Progress)
        text += event.text
        if not isinstance(event, Finished):
            assert not event.text.endswith("\ufffd")
    assert len(text) > 50


def test_memory_stays_within_the_budget() -> None:
    """All processes together keep to a budget near the least that works, while every layer evicts."""
    with Cluster.launch("demo", ram="305MB", num_workers=1, ctx=256) as cluster:
        cluster.generate("Once upon a time", max_tokens=200, temperature=0.0, ignore_eos=True)
        memory = cluster.stats()["memory"]
        pids = [cluster.stats()["pid"], *(worker["pid"] for worker in cluster.stats()["workers"])]
        now = sum(process_bytes(pid) for pid in pids)
    assert memory["budget_bytes"] == 305_000_000
    assert 0 < now <= memory["budget_bytes"]
