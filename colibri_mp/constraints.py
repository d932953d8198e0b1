"""Constrained decoding: which tokens a JSON schema, a regular expression or a grammar allows next, told by `llguidance`.

A constraint is compiled in a thread of its own, since that may take a second and more: the tables of the vocabulary (once, at the
first constraint) and the grammar. Masks are computed between two steps of the model; that takes some 50 us, and what would take
long runs into the limits below and fails the request.

References that follow each other, and rules that name each other, are worked through recursively by the library, in native code:
their number is limited, and the thread has a stack for several times as many. Time grows by the square of an object's members. See https://github.com/guidance-ai/llguidance.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_mp.errors import Overloaded, RequestError
from colibri_mp.messages import Constraint, Generate
from colibri_mp.sampling import Scores
from colibri_mp.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_TEXT_BYTES = 256 * 1024
MOST_COUNT = 1000
"""References of a schema, members of one of its objects, rules of a grammar."""
_STACK_BYTES = 64 << 20  # address space; pages are used as the recursion reaches them
_MOST_INITIAL_WORK, _MOST_WORK, _MOST_STATES = 500_000, 50_000, 20_000  # in the library's units: some ms a step, 40 MB
_JSON = {
    "whitespace_pattern": r"[ \t\r\n]{1,20}"
}  # a model that has nothing to say could go on with white space for ever


@dataclass(frozen=True)
class Compiled:
    """A request whose constraint has been compiled: its mask, or why there is none."""

    client: bytes
    request: Generate
    result: "TokenMask | RequestError"


class Constraints:
    """Requests that wait for their constraint. `on_compiled` is called in another thread; give it to `take` in the own one."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        on_compiled: Callable[[Compiled], None],
        max_waiting: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._on_compiled = on_compiled
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[bytes, int], Generate] = {}
        self._tables: LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, client: bytes, request: Generate) -> None:
        """Compile the constraint of a request.

        Raises:
            RequestError: what can be told at once: no tokenizer, too large, an id in use.
            Overloaded: too many wait.
        """
        assert request.constraint is not None
        if self._tokenizer is None:
            raise RequestError("a constraint needs a tokenizer and this checkpoint has no tokenizer.json")
        if (client, request.request_id) in self._waiting:
            raise RequestError(f"request {request.request_id} of this client is still running; use another id")
        check_size(request.constraint)
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests wait for their constraint to be compiled; try again in a moment"
            )
        self._waiting[client, request.request_id] = request
        if self._thread is None:
            self._thread = _thread_with_stack()
        self._thread.submit(self._work, self._tokenizer, request.constraint, client, request)

    def take(self, compiled: Compiled) -> bool:
        """The request does not wait any more; returns whether it is still wanted."""
        key = compiled.client, compiled.request.request_id
        is_wanted = self._waiting.get(key) is compiled.request
        if is_wanted:
            del self._waiting[key]
        return is_wanted

    def cancel(self, client: bytes, request_id: int) -> Generate | None:
        """Forget a request; returns it if it was waiting."""
        return self._waiting.pop((client, request_id), None)

    def forget_client(self, client: bytes) -> None:
        """Forget all requests of a client."""
        for key in [key for key in self._waiting if key[0] == client]:
            del self._waiting[key]

    def close(self) -> None:
        """End the thread, after the constraint that is being compiled."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _work(self, tokenizer: Tokenizer, constraint: Constraint, client: bytes, request: Generate) -> None:
        result: TokenMask | RequestError
        try:
            result = self._compile(tokenizer, constraint)
        except RequestError as error:
            result = error
        self._on_compiled(Compiled(client, request, result))

    def _compile(self, tokenizer: Tokenizer, constraint: Constraint) -> "TokenMask":
        from llguidance import LLMatcher, LLParserLimits

        if self._tables is None:
            self._tables = make_tables(tokenizer, self._eos_ids)
        try:
            grammar = _grammar(constraint)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{constraint.kind} constraint: {error}") from error
        limits = LLParserLimits(
            initial_lexer_fuel=_MOST_INITIAL_WORK,
            step_lexer_fuel=_MOST_WORK,
            max_lexer_states=_MOST_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tables, grammar, log_level=0, limits=limits)
        mask = TokenMask(matcher, frozenset(self._tables.eos_tokens), self._tables.vocab_size, constraint.kind)
        mask.allowed()  # some defects show only here
        return mask


class TokenMask:
    """What a constraint allows in one answer; follows the tokens that are drawn. An `Adjustment` of the sampler."""

    def __init__(self, matcher: "LLMatcher", eos_ids: frozenset[int], vocab_size: int, kind: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._kind = kind
        self.eos_ids = eos_ids

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow any more."""
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which tokens of the tokenizer's vocabulary may come next, [V]; end-of-text tokens among them where it may end.

        Raises:
            RequestError: the constraint is wrong, or needs more work than its limits allow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestError(f"{self._kind} constraint: {self._reason()}")
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def apply(self, scores: Scores) -> None:
        """Make everything else impossible, logits beyond the tokenizer's vocabulary too."""
        allowed = self.allowed()[: scores.size]
        scores[: allowed.size][~allowed] = -np.inf
        scores[allowed.size :] = -np.inf

    def add(self, token: int) -> None:
        """A token has been drawn.

        Raises:
            RequestError: following it needs more work than the limits allow.
        """
        if not self._matcher.consume_token(token):
            raise RequestError(f"{self._kind} constraint: {self._reason()}")

    def _reason(self) -> str:
        return self._matcher.get_error().removesuffix("<non-verbose/>").strip()


def check_size(constraint: Constraint) -> None:
    """Refuse a constraint that is too large to be compiled in a reasonable time and depth.

    Raises:
        RequestError: with the limit, or because a schema is no JSON.
    """
    size = len(constraint.text.encode())
    if size > MOST_TEXT_BYTES:
        raise RequestError(f"the {constraint.kind} constraint has {size} bytes, at most {MOST_TEXT_BYTES} are compiled")
    match constraint.kind:
        case "json_object" if constraint.text:
            raise RequestError("a json_object constraint has no text; use json_schema to say more")
        case "json_schema":
            _check_schema(constraint.text)
        case "grammar":
            _check_count(constraint.text.count(":"), "rules (colons) in the grammar")


def _check_schema(text: str) -> None:
    try:
        objects = list(_objects(json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema constraint: the schema is no JSON that can be used: {error}") from error
    _check_count(sum(("$ref" in item) + ("$dynamicRef" in item) for _, item in objects), "references in the schema")
    for name, item in objects:
        if name not in ("$defs", "definitions"):
            _check_count(len(item), f"members of {name!r} in the schema")


def _check_count(count: int, what: str) -> None:
    if count > MOST_COUNT:
        raise RequestError(f"{count} {what}, at most {MOST_COUNT} are compiled")


def _objects(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a JSON value, with the name that it stands under."""
    pending = [("", value)]
    while pending:
        name, item = pending.pop()
        if isinstance(item, dict):
            yield name, item
            pending += item.items()
        elif isinstance(item, list):
            pending += ((name, part) for part in item)


def _grammar(constraint: Constraint) -> str:
    """The constraint in the library's own form. Raises `ValueError` for what is not even text of its kind."""
    from llguidance import LLMatcher

    match constraint.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.text, defaults=_JSON)  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(constraint.text)


class _Vocabulary:
    """What the library asks of a tokenizer (`llguidance.TokenizerWrapper`)."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, known: Mapping[int, bytes], eos_id: int) -> None:
        ids = range(tokenizer.vocab_size)
        self.tokens = [known.get(token, b"<%d>" % token) for token in ids]
        self.special_token_ids = [*tokenizer.special_ids, *(token for token in ids if token not in known)]
        self.eos_token_id = eos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(whole, add_special_tokens=False)

    @property
    def adds_nothing(self) -> bool:
        """Whether the tokens of a text are that text, so that they may stand in the middle of another one."""
        return b"".join(self.tokens[token] for token in self("word, word")) == b"word, word"


def make_tables(tokenizer: Tokenizer, eos_ids: frozenset[int]) -> "LLTokenizer":
    """The library's view of the vocabulary.

    It uses our tokenizer where that is simple enough; its own, made from tokenizer.json, takes several times the memory and time.

    Raises:
        RequestError: the library does not know this kind of tokenizer.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(token for token in eos_ids if token < tokenizer.vocab_size)
    known = tokenizer.token_bytes()
    try:
        if known and ends and (vocabulary := _Vocabulary(tokenizer, known, ends[0])).adds_nothing:
            return LLTokenizer(TokenizerWrapper(vocabulary), tokenizer.vocab_size, ends, slices=[])
        return LLTokenizer(tokenizer.to_json(), tokenizer.vocab_size, ends or None, slices=[])
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(f"constraints are not possible with this checkpoint's tokenizer: {error}") from error


def _thread_with_stack() -> ThreadPoolExecutor:
    """One thread with a stack of `_STACK_BYTES`."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="constraints")
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(int)  # starts it
    finally:
        threading.stack_size(before)
    return executor
