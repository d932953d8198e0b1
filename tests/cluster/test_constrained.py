"""Constrained answers of the built-in model, through all processes, beside others that must not notice."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from colibri_mp import Cluster
from colibri_mp.errors import RequestError
from colibri_mp.messages import Constraint, Failed, Finished, Piece

SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 20}, "is_verb": {"type": "boolean"}},
        "required": ["word", "is_verb"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The built-in model, all of it in memory."""
    with Cluster.launch("demo", num_workers=1, num_threads=2, ctx=512) as running:
        yield running


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what one of the schemas says."""
    if schema is SCHEMAS[0]:
        return value in schema["enum"]
    if schema is SCHEMAS[1]:
        return 2 <= len(value) <= 4 and all(type(item) is int and 1 <= item <= 9 for item in value)
    return value.keys() == {"word", "is_verb"} and len(value["word"]) <= 20 and type(value["is_verb"]) is bool


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas(cluster: Cluster, schema: dict[str, Any]) -> None:
    """Greedy and with several seeds, in a chat and as plain text, the answer is JSON of the schema and stops."""
    constraint = Constraint("json_schema", json.dumps(schema))
    chat = [{"role": "user", "content": "Define: river"}]
    for prompt, sampling in itertools.product(
        (chat, "Once"), ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.5, "seed": 2})
    ):
        done = cluster.generate(prompt, constraint=constraint, max_tokens=300, **sampling)
        assert done.finish_reason == "stop"
        assert fits(json.loads(done.text), schema), done.text


def test_same_seed_same_answer(cluster: Cluster) -> None:
    """A constraint leaves the seed in charge; all of the answer matches a regular expression."""
    options: dict[str, Any] = {"constraint": Constraint("regex", "[a-z]{3,9}( [a-z]{3,9}){4}"), "temperature": 1.2}
    texts = [cluster.generate("The", seed=seed, **options).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(re.fullmatch("[a-z]{3,9}( [a-z]{3,9}){4}", text) for text in texts)


def test_free_answers_are_not_changed_by_constrained_ones(cluster: Cluster) -> None:
    """Answers without a constraint are the same beside others that have one, and come while these are compiled."""
    free = {"max_tokens": 40, "temperature": 0.9, "seed": 5, "ignore_eos": True}
    alone = cluster.generate("And the king said", **free)
    free_id = cluster.submit("And the king said", **free)
    others = [cluster.submit("Once", constraint=Constraint("regex", f"[a-z ]{{{n}}}"), seed=n) for n in (20, 30)]
    found: dict[int, list[int]] = {free_id: []} | {other: [] for other in others}
    ends = {}
    while (event := cluster.next_event()) is not None:
        request_id, message = event
        assert not isinstance(message, Failed), message
        if isinstance(message, Piece):
            found[request_id] += message.token_ids
        if isinstance(message, Finished):
            ends[request_id] = message.finish_reason
    assert found[free_id] == alone.token_ids
    assert ends == {free_id: "length", others[0]: "stop", others[1]: "stop"}


def test_bad_constraints_are_answered(cluster: Cluster) -> None:
    """A defect is the answer, whether it is seen at once or when compiled; the cluster goes on."""
    for constraint, what in (
        (Constraint("json_schema", "{"), "no JSON"),
        (Constraint("regex", "("), "unclosed group"),
    ):
        with pytest.raises(RequestError, match=what):
            cluster.generate("Once", constraint=constraint)
    with pytest.raises(RequestError, match=r"cannot be sent.*yaml"):
        cluster.generate("Once", constraint=Constraint("yaml", "a"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="top_p"):
        cluster.generate("Once", constraint=Constraint("regex", "a"), top_p=7.0)
    assert cluster.generate("Once", constraint=Constraint("regex", "ab"), temperature=0.0).text == "ab"


def test_cancelled_before_it_began(cluster: Cluster) -> None:
    """A request that is cancelled while its constraint is compiled ends like any other, and nothing is left of it."""
    request_id = cluster.submit("Once", constraint=Constraint("json_schema", json.dumps(SCHEMAS[2])))
    cluster.cancel(request_id)
    ends = []
    while (event := cluster.next_event()) is not None:
        ends.append(event[1])
    assert isinstance(ends[-1], Finished)
    assert ends[-1].finish_reason in ("cancelled", "stop")
    assert cluster.stats()["requests"]["active"] == 0
