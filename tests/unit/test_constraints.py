"""Masks of constraints, drawn from with random logits: every answer fits, ends where it must, and defects are named."""

import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizer_cases import BACKENDS, write_tokenizer

from colibri_mp.checkpoint.hub import resolve
from colibri_mp.constraints import MOST_COUNT, MOST_TEXT_BYTES, Compiled, Constraints, TokenMask, make_tables
from colibri_mp.errors import Overloaded, RequestError
from colibri_mp.messages import Constraint, Generate, Sampling
from colibri_mp.sampling import Sampler, SamplingParams
from colibri_mp.tokenizer import Tokenizer

EOS = frozenset({0, 2})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Bench:
    """Constraints over the built-in model's tokenizer."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.load(resolve("demo"))
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.done: queue.Queue[Compiled] = queue.Queue()
        self.constraints = Constraints(tokenizer, EOS, self.done.put, max_waiting=2)

    def mask(self, kind: Any, text: str = "") -> TokenMask:
        """The mask of a constraint; raises what is wrong with it."""
        self.constraints.begin(b"a", Generate(1, [1], 5, Sampling(), constraint=Constraint(kind, text)))
        compiled = self.done.get(timeout=60)
        assert self.constraints.take(compiled)
        if isinstance(compiled.result, RequestError):
            raise compiled.result
        return compiled.result

    def write(self, mask: TokenMask, seed: int, vocab: int = 4096, **params: Any) -> tuple[str, bool]:
        """What is drawn from random logits until the end; whether an end-of-text token ended it."""
        random = np.random.default_rng(seed)
        sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": seed, **params}), mask=mask)
        ids: list[int] = []
        while not mask.is_finished:
            token = sampler.next_token(random.standard_normal(vocab).astype(np.float32))
            if token in mask.eos_ids:
                return self.tokenizer.decode(ids), True
            ids.append(token)
            assert len(ids) < 500
        return self.tokenizer.decode(ids), False


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The tables of the vocabulary are made once."""
    made = Bench()
    made.mask("regex", "a")
    yield made
    made.constraints.close()


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.2, "frequency_penalty": 2.0}])
def test_schema(bench: Bench, params: dict[str, Any]) -> None:
    """Whatever the logits and the sampling, the answer is JSON that the schema describes, and ends by itself."""
    for seed in range(4):
        text, _ = bench.write(bench.mask("json_schema", json.dumps(PERSON)), seed, **params)
        found = json.loads(text)
        assert found.keys() == {"name", "age", "tags"}
        assert len(found["name"]) <= 12
        assert type(found["age"]) is int
        assert 0 <= found["age"] <= 120
        assert 1 <= len(found["tags"]) <= 3
        assert set(found["tags"]) <= {"a", "b", "long tag"}


@pytest.mark.parametrize("pattern", [r"[A-Z][a-z]{2,5} [0-9]{3}-[0-9]{4}", r"(yes|no|maybe){1,3}", r"é{2}🦜?", r"x?"])
def test_regex(bench: Bench, pattern: str) -> None:
    """All of the answer matches the pattern, characters of several bytes included."""
    for seed in range(5):
        text, _ = bench.write(bench.mask("regex", pattern), seed)
        assert re.fullmatch(pattern, text), text


def test_grammar(bench: Bench) -> None:
    """A grammar in Lark's form."""
    grammar = 'start: "(" item ("," item)* ")"\nitem: NUMBER | "-" NUMBER\nNUMBER: /[0-9]{1,3}/'
    for seed in range(5):
        text, _ = bench.write(bench.mask("grammar", grammar), seed, logit_bias={bench.tokenizer.encode(")")[0]: 8.0})
        assert re.fullmatch(r"\(-?\d{1,3}(,-?\d{1,3})*\)", text), text


def test_any_object(bench: Bench) -> None:
    """A json_object may be empty; what comes is an object in any case."""
    bias = dict.fromkeys([bench.tokenizer.encode(text)[0] for text in ("}", '"', "]", "1")], 9.0)
    for seed in range(3):
        assert isinstance(json.loads(bench.write(bench.mask("json_object"), seed, logit_bias=bias)[0]), dict)


def test_end_of_text_comes_only_where_it_may(bench: Bench) -> None:
    """End-of-text tokens are allowed exactly where the constraint is satisfied; special tokens never."""
    mask = bench.mask("regex", "ab*")
    assert not mask.allowed()[list(EOS)].any()
    mask.add(bench.tokenizer.encode("a")[0])
    assert mask.allowed()[list(EOS)].all()
    assert not mask.allowed()[1]  # <|im_start|>
    assert not mask.is_finished
    mask = bench.mask("regex", "ab")
    mask.add(bench.tokenizer.encode("ab")[0])
    assert mask.is_finished


def test_logits_wider_than_the_vocabulary(bench: Bench) -> None:
    """Rows that pad a model's vocabulary are never drawn."""
    text, _ = bench.write(bench.mask("regex", "[a-z]{30}"), 1, vocab=4096 + 77)
    assert re.fullmatch("[a-z]{30}", text)
    scores = np.zeros(4096 + 77)
    bench.mask("regex", "[a-z]+").apply(scores)
    assert np.isneginf(scores[4096:]).all()


def test_white_space_has_an_end(bench: Bench) -> None:
    """A model that wants nothing but spaces gets some, and has to go on."""
    space = bench.tokenizer.encode(" ")[0]
    text, _ = bench.write(bench.mask("json_schema", '{"enum": [[1, 2]]}'), 1, logit_bias={space: 50.0})
    assert json.loads(text) == [1, 2]
    assert 1 < text.count(" ") <= 4 * 20


@pytest.mark.parametrize(
    ("kind", "text", "what"),
    [
        ("json_schema", "no json", "no JSON"),
        ("json_schema", "[1]", "Expecting object schema"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"$ref": "#/nowhere"}', "does not exist"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "not present"),
        ("json_schema", '{"type": "object", "unevaluatedProperties": false}', "Unimplemented keys"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "json_schema constraint"),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "JSON"),
        ("json_object", "{}", "has no text"),
        ("regex", "(", "unclosed group"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("regex", "x" * (MOST_TEXT_BYTES + 1), f"at most {MOST_TEXT_BYTES}"),
        ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"', "rules .*at most 1000"),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(1001)}}), "1001 members of 'properties'"),
        ("json_schema", json.dumps({"anyOf": [{"$ref": "#"}] * 1001}), "1001 references in the schema, at most 1000"),
    ],
)  # fmt: skip
def test_defects_are_named(bench: Bench, kind: str, text: str, what: str) -> None:
    """What cannot be compiled, or not within the limits, is the request's error, in the library's words."""
    with pytest.raises(RequestError, match=what):
        bench.mask(kind, text)


@pytest.mark.parametrize("kind", ["demo", *BACKENDS])
def test_tables_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    """Bytes and special tokens that we tell the library are those that it finds itself, for each kind of tokenizer."""
    folder = resolve("demo") if kind == "demo" else write_tokenizer(tmp_path, BACKENDS[kind]())
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    own = make_tables(tokenizer, EOS)
    theirs = LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=sorted(EOS))
    ids = range(tokenizer.vocab_size)
    assert own.vocab_size == theirs.vocab_size == len(ids)
    assert own.eos_tokens == theirs.eos_tokens
    assert [own.is_special_token(i) for i in ids] == [theirs.is_special_token(i) for i in ids]
    assert [own.decode_bytes([i]) for i in ids] == [theirs.decode_bytes([i]) for i in ids]
    text = "hello world é 🦜"
    assert own.tokenize_str(text) == theirs.tokenize_str(text)


def test_a_tokenizer_of_an_unknown_kind(tmp_path: Path) -> None:
    """Where the decoder says nothing of bytes the library is asked, and its refusal is the request's error."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, words))
    assert tokenizer is not None
    assert tokenizer.token_bytes() is None
    with pytest.raises(RequestError, match="not possible with this checkpoint's tokenizer"):
        make_tables(tokenizer, frozenset({2}))


def test_too_much_work_is_refused(bench: Bench) -> None:
    """What takes more work than the limits allow fails, when it is compiled or when it is followed."""
    letter = bench.tokenizer.encode("a")[0]

    def follow() -> None:
        mask = bench.mask("regex", "(.{1,300}[ab]{1,300}){1,300}")
        for _ in range(300):
            mask.add(letter)
            mask.allowed()

    with pytest.raises(RequestError, match=r"regex constraint: .*too many"):
        follow()


def test_as_many_references_as_allowed(bench: Bench) -> None:
    """The longest chains that are let through are compiled, in the thread with the large stack."""
    chain = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(MOST_COUNT - 1)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{MOST_COUNT - 1}": {"enum": [7]}}}
    assert bench.write(bench.mask("json_schema", json.dumps(schema)), 1)[0].strip() == "7"
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(MOST_COUNT - 2))
    grammar = f'start: r0\n{rules}r{MOST_COUNT - 2}: "b"'
    assert bench.write(bench.mask("grammar", grammar), 1)[0] == "b"


def test_waiting_requests_can_be_forgotten(bench: Bench) -> None:
    """A request that is cancelled, or whose client has gone, is not wanted any more when its constraint is ready."""
    request = Generate(1, [1], 5, Sampling(), constraint=Constraint("regex", "a"))
    bench.constraints.begin(b"a", request)
    with pytest.raises(RequestError, match="still running"):
        bench.constraints.begin(b"a", request)
    assert bench.constraints.cancel(b"a", 1) is request
    assert bench.constraints.cancel(b"a", 1) is None
    assert not bench.constraints.take(bench.done.get(timeout=60))
    bench.constraints.begin(b"a", request)
    bench.constraints.begin(b"b", request)
    with pytest.raises(Overloaded, match="2 requests wait"):
        bench.constraints.begin(b"c", request)
    bench.constraints.forget_client(b"a")
    taken = [bench.constraints.take(bench.done.get(timeout=60)) for _ in range(2)]
    assert sorted(taken) == [False, True]


def test_without_a_tokenizer() -> None:
    """A checkpoint without tokenizer.json has no constraints, and says so."""
    with pytest.raises(RequestError, match=r"needs a tokenizer"):
        Constraints(None, EOS, lambda _: None, 1).begin(
            b"a", Generate(1, [1], 5, Sampling(), constraint=Constraint("regex", "a"))
        )
