"""The loop: schedule, forward, sample, reply. One `step()` advances every running request.

The engine owns requests and their progress; it knows nothing of sockets (it emits messages through a callable) and
nothing of processes (`Model.forward` does). A `ColibriError` of a step fails the requests in it and no others.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

from colibri_mp.constraints import TokenMask
from colibri_mp.drafting import Drafting
from colibri_mp.errors import ColibriError, Overloaded, RequestError
from colibri_mp.logprobs import check_num_top, prompt_logprobs, token_logprob
from colibri_mp.messages import (
    Conversation,
    Failed,
    Finished,
    Floats,
    Generate,
    Message,
    Piece,
    Progress,
    Prompt,
    PromptLogprobs,
    Score,
    Scores,
)
from colibri_mp.overlap import GROUP_STEPS, NUM_GROUPS, Overlap
from colibri_mp.sampling import Sampler, resolve
from colibri_mp.scheduler import GroupEnded, GroupLook, Look, Rows, Scheduler, Sequence
from colibri_mp.stopping import StopStrings
from colibri_mp.tokenizer import StreamDecoder, Tokenizer

Emit = Callable[[bytes, Message], None]


class Model(Protocol):
    """What the engine needs of the coordinator."""

    max_context: int
    vocab_size: int
    max_logit_rows: int
    can_be_joined: bool
    """Whether `look` may call `forward` for other rows, and `forward_groups` may be called."""

    @property
    def fetch_wait_s(self) -> float:
        """Seconds that steps have waited for experts to be read, since the start."""

    def forward(self, rows: list[Rows], look: Look) -> Floats:
        """Logits float32 [R, V] of the last `num_logits` rows of each part that is left at the end, in order."""

    def forward_groups(self, groups: list[list[Rows]], look: GroupLook, ended: GroupEnded) -> None:
        """Steps of several groups of rows, under way at once, until `ended` gives none of them another one.

        `ended` gets the logits as `forward` returns them, of the rows that `look` left last. One group's error is not the others'.
        """

    def cache_counters(self) -> dict[str, float]:
        """Monotonic totals: hits, misses, bytes_read, disk_s."""


@dataclass(eq=False)
class Generation:
    """A `Generate` under way."""

    client: bytes
    request: Generate
    sequence: Sequence
    sampler: Sampler
    decoder: StreamDecoder | None
    stops: StopStrings
    stop_ids: frozenset[int]
    num_prompt: int
    max_tokens: int
    counters_before: dict[str, float]
    mask: TokenMask | None = None
    started: float = field(default_factory=time.perf_counter)
    queue_s: float | None = None  # until it was admitted
    first_token_s: float | None = None
    num_drafted: int = 0  # tokens that were guessed and computed,
    num_accepted: int = 0  # and those of them that were right

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.sequence.token_ids) - self.num_prompt


@dataclass(eq=False)
class Scoring:
    """A `Score` under way: one sequence a prompt. Logits go out as they are made: a prompt's may be larger than memory."""

    client: bytes
    request: Score
    sequences: list[Sequence]
    num_left: int


class Engine:
    """Requests of all clients over one model."""

    def __init__(
        self, model: Model, scheduler: Scheduler, tokenizer: Tokenizer | None, defaults: dict[str, Any],
        eos_ids: frozenset[int], emit: Emit, max_waiting: int | None = None, drafting: Drafting | None = None,
        overlap: Overlap | None = None,
    ) -> None:  # fmt: skip
        """`max_waiting`: requests that may wait to be admitted; one more is refused. None: no limit. `drafting`: None is plain decoding.
        `overlap`: None is one group."""
        self.model = model
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.eos_ids = eos_ids
        self.max_waiting = max_waiting
        self.drafting = drafting
        self.num_refused = 0
        self.overlap = overlap or Overlap()
        self._emit = emit
        self._waiting: set[Generation | Scoring] = set()  # those not admitted yet, or not noted as such
        self._requests: dict[tuple[bytes, int], Generation | Scoring] = {}
        self._owners: dict[int, Generation | Scoring] = {}  # by id() of the sequence
        self._rows: list[Rows] = []  # of the step under way, as far as they are wanted
        self._has_dropped = False  # since the last look at these
        self.num_steps = self.num_tokens = 0
        self._newcomers: list[Sequence] = []  # that came during the step under way
        self._has_been_joined = False  # whether that step has been interrupted for newcomers
        self.num_joined = 0  # requests begun in the middle of a step
        self.num_dropped_rows = 0  # taken out of steps between two layers

    # -- requests in ---------------------------------------------------------------------------------------------------

    def submit(self, client: bytes, request: Generate | Score, mask: TokenMask | None = None) -> None:
        """Begin a request; a bad one is answered with `Failed` at once. `mask`: its constraint, compiled."""
        try:
            if (client, request.request_id) in self._requests:
                raise RequestError(f"request {request.request_id} of this client is still running; use another id")
            self._check_queue()
            job: Generation | Scoring
            if isinstance(request, Generate):
                job = self._generation(client, request, mask)
            else:
                job = self._scoring(client, request)
            for sequence in _sequences(job):
                self.scheduler.allocator.check(sequence.projected_tokens)
        except ColibriError as error:
            self._emit(client, Failed(request.request_id, error.kind, str(error)))
            return
        self._requests[client, request.request_id] = job
        self._waiting.add(job)
        for sequence in _sequences(job):
            self._owners[id(sequence)] = job
            if self.drafting is not None and isinstance(request, Generate):
                self.drafting.begin(sequence, self.drafting.most if request.draft is None else request.draft)
            self.scheduler.add(sequence)
            if self._rows:
                self._newcomers.append(sequence)

    def cancel(self, client: bytes, request_id: int) -> None:
        """End a request early; nothing happens if it has ended."""
        job = self._requests.get((client, request_id))
        if isinstance(job, Generation):
            self._finish(job, "cancelled")
        elif job is not None:
            self._drop(job)
            self._emit(client, Failed(request_id, "request", "cancelled"))

    def forget_client(self, client: bytes) -> None:
        """Drop all requests of a client that has gone."""
        for (owner, _), job in list(self._requests.items()):
            if owner == client:
                self._drop(job)

    def fail_all(self, error: ColibriError) -> None:
        """Answer every request with `error`."""
        for job in list(self._requests.values()):
            self._fail(job, error)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet, as of the last step or submission."""
        return len(self._waiting)

    @property
    def waits_for(self) -> str:
        """Why requests wait, in words; "" if none does."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        if not self._waiting:
            return ""
        if not scheduler.admits:
            return "memory, which is short: requests are admitted when the system has enough again"
        if not scheduler.states.can_begin(None):
            return (
                f"a state of recurrent layers: all {scheduler.states.slots.num_slots} slots are in use (--state-slots)"
            )
        return (
            f"KV memory: {allocator.num_free} of {allocator.num_blocks} blocks of {allocator.block_tokens} tokens are free, "
            f"{len(scheduler.running)} sequences run"
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._requests

    @property
    def can_step(self) -> bool:
        """Whether `step` would compute something; requests that wait to be admitted need none."""
        return self.scheduler.has_work

    @property
    def num_requests(self) -> int:
        """Requests under way, waiting ones included."""
        return len(self._requests)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, listen: Callable[[], None] = lambda: None) -> None:
        """Advance every scheduled request by one step.

        `listen` is called between two layers and may call `submit`, `cancel` and `forget_client`: rows that nobody wants any
        more are not computed further.

        Raises:
            WorkerDied: the cluster cannot go on (other errors fail the requests of this step only).
        """
        self._newcomers.clear()
        self._has_been_joined = False
        started_s = time.perf_counter()
        if self.drafting is not None and not self.drafting.propose(self.scheduler.running):
            started_s = time.perf_counter()  # guesses that there are count as part of their step
        rows = self.scheduler.schedule()
        if self._waiting:
            self._note_starts()
        if not rows:
            return
        may_split = self._may_split(rows)
        if may_split and self.overlap.is_on:
            self._compute_groups(rows, listen)
            return
        waited_s = self.model.fetch_wait_s if may_split else 0.0
        self._compute(rows, started_s, listen)
        if may_split:
            self.overlap.note(time.perf_counter() - started_s, self.model.fetch_wait_s - waited_s, len(rows))

    def _compute(self, rows: list[Rows], started_s: float, listen: Callable[[], None]) -> None:
        """One step for all."""
        self._rows = rows
        try:
            logits = self.model.forward(rows, lambda: self._still_wanted(listen))
        except ColibriError as error:
            self._step_failed(self._rows, error)
            return
        step_s = time.perf_counter() - started_s
        rows, self._rows = self._rows, []
        num_accepted = self._computed(rows, logits)
        if self.drafting is not None and not self._has_been_joined:
            self.drafting.step_ended(rows, step_s, num_accepted)

    def _may_split(self, rows: list[Rows]) -> bool:
        """Whether these are the next tokens of several sequences, nothing guessed, and nothing else is to be computed."""
        has_all = len(rows) == len(self.scheduler.running) >= NUM_GROUPS
        return has_all and self.drafting is None and self.model.can_be_joined and all(part.count == 1 for part in rows)

    def _compute_groups(self, rows: list[Rows], listen: Callable[[], None]) -> None:
        """Some steps of each group, until there is something else to do: a request has come, a sequence has ended."""
        groups = [rows[idx::NUM_GROUPS] for idx in range(NUM_GROUPS)]
        num_left = [GROUP_STEPS] * NUM_GROUPS
        self._rows, self._has_dropped, num_tokens = rows, False, self.num_tokens
        started_s, waited_s = time.perf_counter(), self.model.fetch_wait_s

        def look(idx: int) -> list[Rows] | None:
            listen()
            left = [part for part in groups[idx] if id(part.sequence) in self._owners]
            if len(left) == len(groups[idx]):
                return None
            self.num_dropped_rows += len(groups[idx]) - len(left)
            groups[idx] = left
            return left

        def ended(idx: int, outcome: Floats | ColibriError) -> list[list[Rows]]:
            wanted = [id(part.sequence) in self._owners for part in groups[idx]]  # others may have been cancelled since
            rows, groups[idx] = list(compress(groups[idx], wanted)), []
            if isinstance(outcome, ColibriError):
                self._step_failed(rows, outcome)
                return []
            self._computed(rows, outcome[wanted])
            self.overlap.num_steps += 1
            num_left[idx] -= 1
            if not num_left[idx] or self._newcomers or self._has_dropped:
                return []
            groups[idx] = self.scheduler.schedule_again(rows)
            return [groups[idx]]

        self.model.forward_groups([*groups], look, ended)
        self._rows = []
        num_steps = (self.num_tokens - num_tokens) / len(rows)
        if num_steps:
            seconds, wait_s = time.perf_counter() - started_s, self.model.fetch_wait_s - waited_s
            self.overlap.note(seconds, wait_s, len(rows), num_steps)

    def _computed(self, rows: list[Rows], logits: Floats) -> int:
        """Take in what a forward pass has given: the next tokens, logits that were asked for. Returns how many guesses were right."""
        self.scheduler.advance(rows)
        self.num_steps += 1
        self.num_tokens += sum(part.count for part in rows)
        num_accepted = 0
        for part, part_logits in list(_split(rows, logits)):  # before tokens are appended: that changes `num_logits`
            job = self._owners.get(id(part.sequence))
            if isinstance(job, Generation):
                num_accepted += self._continue(job, part, part_logits)
            elif isinstance(job, Scoring):
                self._collect(job, part, part_logits)
        self.scheduler.settle(rows)
        return num_accepted

    def _compute_newcomers(self) -> None:
        """A pass of its own for short prompts, so that their first tokens do not wait for the rest of a long step."""
        newcomers = [sequence for sequence in self._newcomers if id(sequence) in self._owners]
        self._newcomers.clear()
        is_long = sum(part.count for part in self._rows) >= self.scheduler.max_rows // 2
        if not is_long or self._has_been_joined or not self.model.can_be_joined:
            return
        rows = self.scheduler.schedule_newcomers(newcomers)
        if not rows:
            return
        self._has_been_joined = True
        self._note_starts()
        try:
            logits = self.model.forward(rows, lambda: None)
        except ColibriError as error:
            self._step_failed(rows, error)
            return
        self.num_joined += len(rows)
        self._computed(rows, logits)

    def _step_failed(self, rows: list[Rows], error: ColibriError) -> None:
        """Fail the requests of a step, and no others; the death of a worker is everybody's affair."""
        if error.kind == "worker_died":
            raise error
        for failed in {id(job): job for job in (self._owners[id(part.sequence)] for part in rows)}.values():
            self._fail(failed, error)

    def _check_queue(self) -> None:
        """Whether one more may wait; those that fit by now are admitted first.

        Raises:
            Overloaded: as many wait as may.
        """
        if self.max_waiting is None or len(self._waiting) < self.max_waiting:
            return
        self.scheduler.admit()
        self._note_starts()
        if len(self._waiting) >= self.max_waiting:
            self.num_refused += 1
            raise Overloaded(
                f"as many requests wait already as --queue {self.max_waiting} allows ({self.waits_for}); try again in a moment, "
                "ask for fewer max_tokens, or launch with a larger --kv-tokens or --queue"
            )

    def _note_starts(self) -> None:
        """Requests that have been admitted do not wait any more."""
        for job in [job for job in self._waiting if not any(sequence.is_waiting for sequence in _sequences(job))]:
            self._waiting.remove(job)
            if isinstance(job, Generation):
                job.queue_s = time.perf_counter() - job.started

    def _still_wanted(self, listen: Callable[[], None]) -> list[Rows] | None:
        """See `Look`. Short requests that have come are computed at once, in the middle of a long step."""
        listen()
        if self._newcomers:
            self._compute_newcomers()
        if not self._has_dropped:
            return None
        self._has_dropped = False
        left = [part for part in self._rows if id(part.sequence) in self._owners]
        num_dropped = sum(part.count for part in self._rows) - sum(part.count for part in left)
        self.num_dropped_rows += num_dropped
        self._rows = left
        return left if num_dropped else None

    def _continue(self, job: Generation, part: Rows, logits: Floats) -> int:
        """Rows of a request have been computed; logits of all of them, of the last, or of none, as it asked for.

        Returns how many guesses among them were right.
        """
        request = job.request
        if request.prompt_logprobs is not None and part.start < job.num_prompt:
            entries = prompt_logprobs(logits, job.sequence.token_ids, part.start, request.prompt_logprobs)
            if entries:
                first = part.start + 1 if part.start else 0
                self._emit(job.client, PromptLogprobs(request.request_id, first, entries))
        if part.reaches_end:
            return self._next_tokens(job, part, logits[len(logits) - 1 - len(part.draft) :])
        if request.progress:
            self._emit(job.client, Progress(request.request_id, part.start + part.count, job.num_prompt))
        return 0

    def _next_tokens(self, job: Generation, part: Rows, logits: Floats) -> int:
        """Draw from the last known row, and on from each guess that was drawn, logits [1 + guesses, V]; how many these were."""
        job.num_drafted += len(part.draft)
        before = job.num_accepted
        for row, guess in zip(logits, (*part.draft, None), strict=True):
            try:
                token = self._next_token(job, row)
            except RequestError as error:
                self._fail(job, error)
                break
            if guess is None or token != guess:
                break
            job.num_accepted += 1
            if id(job.sequence) not in self._owners:
                break
            self.scheduler.accept(job.sequence)
        num_accepted = job.num_accepted - before
        if part.draft and self.drafting is not None:
            self.drafting.verified(job.sequence, len(part.draft), num_accepted)
        return num_accepted

    def _next_token(self, job: Generation, logits: Floats) -> int | None:
        """Draw a token and send it; None if the answer has ended before one that is part of it."""
        if job.max_tokens == 0:
            self._finish(job, "length")
            return None
        token = job.sampler.next_token(logits)
        if job.first_token_s is None:
            job.first_token_s = time.perf_counter() - job.started
        if token in job.stop_ids:
            self._finish(job, "stop", token if token in job.request.stop_ids else None)
            return None
        job.sequence.token_ids.append(token)
        text = job.stops.push(job.decoder.push(token)) if job.decoder else ""
        num_top = job.request.logprobs
        logprobs = [] if num_top is None else [token_logprob(logits, token, num_top)]
        self._emit(job.client, Piece(job.request.request_id, [token], text, logprobs))
        if job.stops.found is not None:
            self._finish(job, "stop", job.stops.found)
        elif job.mask is not None and job.mask.is_finished:
            self._finish(job, "stop")
        elif job.num_generated >= job.max_tokens:
            self._finish(job, "length")
        return token

    def _collect(self, job: Scoring, part: Rows, logits: Floats) -> None:
        idx = job.sequences.index(part.sequence)
        self._emit(job.client, Scores(job.request.request_id, idx, logits.copy()))
        if not part.reaches_end:
            return
        self._release(part.sequence)
        job.num_left -= 1
        if job.num_left == 0:
            del self._requests[job.client, job.request.request_id]

    # -- endings -------------------------------------------------------------------------------------------------------

    def _finish(self, job: Generation, reason: str, stopped_by: str | int | None = None) -> None:
        rest = (
            ""
            if job.stops.found is not None or job.decoder is None
            else job.stops.push(job.decoder.finish()) + job.stops.finish()
        )
        self._drop(job)
        self._emit(job.client, Finished(job.request.request_id, reason, rest, self._stats(job), stopped_by))

    def _fail(self, job: Generation | Scoring, error: ColibriError) -> None:
        self._drop(job)
        self._emit(job.client, Failed(job.request.request_id, error.kind, str(error)))

    def _drop(self, job: Generation | Scoring) -> None:
        for sequence in _sequences(job):
            self._release(sequence)
        self._waiting.discard(job)
        self._requests.pop((job.client, job.request.request_id), None)

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._owners.pop(id(sequence), None)
        if self.drafting is not None:
            self.drafting.forget(sequence)
        self._has_dropped = True

    def _stats(self, job: Generation) -> dict[str, Any]:
        total_s = time.perf_counter() - job.started
        first_s = job.first_token_s if job.first_token_s is not None else total_s
        decode_s = total_s - first_s
        after = self.model.cache_counters()
        cache = {name: after[name] - job.counters_before[name] for name in after}
        asked = cache["hits"] + cache["misses"] + cache["promoted"]
        return {
            "prompt_tokens": job.num_prompt,
            "cached_tokens": job.sequence.num_taken,
            "completion_tokens": job.num_generated,
            "drafted_tokens": job.num_drafted,
            "accepted_tokens": job.num_accepted,
            "queue_s": job.queue_s if job.queue_s is not None else total_s,
            "ttft_s": first_s,
            "prefill_tok_s": (job.num_prompt - job.sequence.num_taken) / first_s if first_s > 0 else 0.0,
            "decode_tok_s": (job.num_generated - 1) / decode_s if decode_s > 0 and job.num_generated > 1 else 0.0,
            "seed": job.sampler.params.seed,
            "cache": {**cache, "hit_rate": cache["hits"] / asked if asked else 0.0},
        }

    # -- making jobs ---------------------------------------------------------------------------------------------------

    def _generation(self, client: bytes, request: Generate, mask: TokenMask | None) -> Generation:
        assert (request.constraint is None) == (mask is None)
        prompt_ids = self.prompt_ids(request.prompt)
        wants_prompt = request.prompt_logprobs is not None
        max_tokens = self._max_tokens(len(prompt_ids), request.max_tokens, least=0 if wants_prompt else 1)
        params = resolve(request.sampling, self.defaults, secrets.randbits(63))
        if request.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer and this checkpoint has none; give token ids to stop at (stop_ids)"
            )
        self._check_vocabulary(request.stop_ids, "stop_ids: ")
        self._check_vocabulary(params.logit_bias, "logit_bias: ")
        check_num_top("logprobs", request.logprobs)
        check_num_top("prompt_logprobs", request.prompt_logprobs)
        self._check_draft(request.draft)
        chunk = min(self.scheduler.max_rows, self.model.max_logit_rows) if wants_prompt else self.scheduler.max_rows
        sequence = Sequence(prompt_ids, len(prompt_ids) + max_tokens, chunk, all_logits=wants_prompt)
        return Generation(
            client, request, sequence, Sampler(params, prompt_ids, mask),
            self.tokenizer.stream(after=prompt_ids) if self.tokenizer else None, StopStrings(request.stop),
            self._stop_ids(request, mask), len(prompt_ids), max_tokens, self.model.cache_counters(), mask,
        )  # fmt: skip

    def _check_draft(self, asked: int | None) -> None:
        most = self.drafting.most if self.drafting is not None else 0
        if asked is not None and not 0 <= asked <= most:
            raise RequestError(f"draft must be from 0 to {most}, not {asked}: launch with a larger --draft")

    def _stop_ids(self, request: Generate, mask: TokenMask | None) -> frozenset[int]:
        """The tokens that end an answer; a constraint has its own and lets them come only where it is satisfied."""
        own = frozenset(request.stop_ids)
        if mask is not None:
            return own | mask.eos_ids
        return own if request.ignore_eos else own | self.eos_ids

    def _scoring(self, client: bytes, request: Score) -> Scoring:
        if not request.prompts:
            raise RequestError("no prompt to score")
        if request.chunk is not None and request.chunk < 1:
            raise RequestError(f"chunk must be at least 1, not {request.chunk}")
        chunk = min(request.chunk or self.scheduler.max_rows, self.model.max_logit_rows // len(request.prompts) or 1)
        sequences = []
        for prompt in request.prompts:
            self._check_ids(prompt)
            sequences.append(Sequence(list(prompt), len(prompt), chunk, all_logits=True))
        return Scoring(client, request, sequences, len(sequences))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises `RequestError`: it has none, or it is not of this model."""
        if isinstance(prompt, list):
            ids = list(prompt)
        elif self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json: give token ids (--prompt-ids 1,2,3)")
        elif isinstance(prompt, Conversation):
            ids = _encode_chat(self.tokenizer, prompt)
        else:
            ids = self.tokenizer.encode(prompt)
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty")
        self._check_vocabulary(ids)
        if len(ids) > self.model.max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context holds {self.model.max_context}; "
                "shorten it or launch with a larger --ctx (the model's own limit is in `plan`)"
            )

    def _check_vocabulary(self, ids: Iterable[int], where: str = "") -> None:
        for token in ids:
            if not 0 <= token < self.model.vocab_size:
                raise RequestError(f"{where}token id {token} is outside the vocabulary 0..{self.model.vocab_size - 1}")

    def _max_tokens(self, num_prompt: int, asked: int | None, least: int) -> int:
        """`asked`, clamped to what the context still holds; at least `least`."""
        if asked is not None and asked < least:
            raise RequestError(f"max_tokens must be at least {least}, not {asked}")
        room = self.model.max_context - num_prompt
        if room < (least if asked == least else 1):
            raise RequestError(
                f"the prompt fills the context of {self.model.max_context} tokens, there is no room to generate; "
                "shorten it or launch with a larger --ctx"
            )
        return room if asked is None else min(asked, room)


def _encode_chat(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    if not all(isinstance(message.get("role"), str) for message in conversation.messages):
        raise RequestError("each message of a conversation needs a role, such as 'user'")
    taken = {"messages", "tools", "add_generation_prompt"} & conversation.template_options.keys()
    if taken:
        raise RequestError(f"template_options cannot set {', '.join(sorted(taken))}: a conversation has a field for it")
    return tokenizer.encode_chat(
        conversation.messages,
        tools=conversation.tools,
        add_generation_prompt=conversation.add_generation_prompt,
        **conversation.template_options,
    )


def _sequences(job: Generation | Scoring) -> list[Sequence]:
    return [job.sequence] if isinstance(job, Generation) else job.sequences


def _split(rows: list[Rows], logits: Floats) -> Iterator[tuple[Rows, Floats]]:
    """Each part with its own `num_logits` rows of `logits`."""
    start = 0
    for part in rows:
        yield part, logits[start : start + part.num_logits]
        start += part.num_logits
