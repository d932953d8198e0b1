"""The Python API: `Cluster`, a client of a coordinator process.

    from colibri_mp import Cluster
    with Cluster.launch("models/olmoe", num_workers=2, ram="2GB") as cluster:
        print(cluster.generate("Once upon a time", max_tokens=32).text)

`launch` starts a cluster that ends with this object (or with this process, however it ends); `attach` joins a running one.
Many requests at once go through one connection: `submit` as many as wanted, then take what comes with `next_event`.
A `Cluster` belongs to one thread. Every wait watches the coordinator: its death raises `CoordinatorDied` within 2 s.
"""

import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from colibri_mp import rundir
from colibri_mp.answers import Answer, Answers, Event
from colibri_mp.asking import AnyPrompt, generate_request, prompt_of
from colibri_mp.config import LaunchConfig, from_keywords
from colibri_mp.control_groups import KillCounter
from colibri_mp.errors import ConfigError, CoordinatorDied, ProtocolError, describe_exit
from colibri_mp.handshake import start_coordinator, stop_process
from colibri_mp.messages import (
    Cancel,
    Failed,
    Finished,
    Floats,
    GetStatus,
    Piece,
    PromptLogprobs,
    Restored,
    RestoreSession,
    Saved,
    SaveSession,
    Score,
    Scores,
    Shutdown,
    Status,
    TokenLogprob,
)
from colibri_mp.transport import Link

_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt.

    `finish_reason`: "stop" (end-of-text token or stop string), "length" (max_tokens, or the context is full) or
    "cancelled". `token_ids` leaves out the end-of-text token. `stats`: prompt_tokens, cached_tokens (of the prompt: not computed
    but taken from what earlier requests had computed), completion_tokens, ttft_s, prefill_tok_s, decode_tok_s, seed, cache
    {hits, misses, hit_rate, bytes_read, disk_s, wait_s, ...} of the time it took.
    `logprobs` and `prompt_logprobs`: one for each token, if asked for (None for the first token of a prompt).
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: dict[str, Any]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


class Cluster:
    """A connection to a cluster; see the module docstring. Use `launch` or `attach`."""

    def __init__(self, run_dir: rundir.RunDir, process: subprocess.Popen[bytes] | None, notes: tuple[str, ...]) -> None:
        self.name = run_dir.path.name
        self.notes = notes
        self._process = process
        try:
            self._last_words = run_dir.open_last_words()
        except FileNotFoundError as error:
            raise CoordinatorDied(f"cluster {self.name!r} has ended just now; start it again with `launch`") from error
        self._kills = KillCounter()
        self._link = Link(run_dir.control)
        self._request_ids = itertools.count(1)
        self._answers = Answers(self._link, self._check_coordinator)

    @classmethod
    def launch(
        cls,
        model: str | Path = "demo",
        *,
        progress: Callable[[str], None] | None = None,
        started: Callable[[subprocess.Popen[bytes]], None] | None = None,
        **settings: Any,
    ) -> Self:
        """Start a cluster and wait until it serves; `settings` are those of `LaunchConfig`.

        `started` gets the coordinator's process: another thread that closes its stdin ends the start.

        Raises:
            ColibriError: it cannot start; nothing is left behind.
        """
        config = from_keywords(LaunchConfig, {"model": str(model), **settings})
        process, ready = start_coordinator(config, owned=True, progress=progress or _ignore, started=started or _ignore)
        return cls(_found(ready.name), process, ready.notes)

    @classmethod
    def attach(cls, name: str = "default") -> Self:
        """Join the running cluster `name`.

        Raises:
            ConfigError: there is none.
        """
        return cls(_found(name), None, ())

    # -- use -----------------------------------------------------------------------------------------------------------

    def generate(self, prompt: AnyPrompt, **options: Any) -> Completion:
        """The whole answer to `prompt`: text, token ids, or messages for the chat template. Options as in `stream`."""
        token_ids: list[int] = []
        text: list[str] = []
        logprobs: list[TokenLogprob] = []
        of_prompt: list[TokenLogprob | None] = []
        for event in self.events(prompt, **options):
            match event:
                case PromptLogprobs():
                    of_prompt += event.entries
                case Piece():
                    text.append(event.text)
                    token_ids += event.token_ids
                    logprobs += event.logprobs
                case Finished(finish_reason=reason, stats=stats):
                    text.append(event.text)
                    return Completion(token_ids, "".join(text), reason, stats, logprobs, of_prompt)
        raise ProtocolError("the answer ended without a finish")

    def stream(self, prompt: AnyPrompt, **options: Any) -> Iterator[str]:
        """Yield the answer's text as it is made, whole characters only.

        Args:
            prompt: text, token ids, a list of messages {"role", "content", ...} for the checkpoint's chat template, or a
                `messages.Conversation` with tools and options of the template.
            options: the fields of `messages.Generate` and of `messages.Sampling`: max_tokens (default: what the context holds),
                stop (strings), stop_ids, ignore_eos, temperature, top_p, seed, ... What is left out of the sampling comes from
                the checkpoint's generation_config.json.

        Raises:
            RequestError: a bad option or a prompt that does not fit.
            ColibriError: what ended the answer.
        """
        for event in self.events(prompt, **options):
            if isinstance(event, Piece | Finished) and event.text:
                yield event.text

    def events(self, prompt: AnyPrompt, **options: Any) -> Iterator[Event]:
        """Like `stream`, with token ids, progress if asked for, and, as the last event, the statistics.

        Leaving the loop early cancels.
        """
        request_id = self._begin(prompt, options)
        event: Event | None = None
        try:
            while not isinstance(event, Finished):
                event = self._answers.next_event(request_id)
                yield event
        finally:
            self._answers.forget(request_id)
            if not isinstance(event, Finished) and not self._link.socket.closed:
                self.cancel(request_id)

    # -- many at once --------------------------------------------------------------------------------------------------

    def submit(self, prompt: AnyPrompt, **options: Any) -> int:
        """Begin an answer and return its request id at once; options as in `stream`. What comes of it: `next_event`.

        Raises:
            ConfigError, RequestError: an option or a prompt that cannot be sent. What the cluster refuses comes as `Failed`.
        """
        return self._begin(prompt, options, shared=True)

    def submit_status(self) -> int:
        """Ask for the status and return the request id at once; `next_event` brings `Status`. Its memory is what was read lately."""
        request_id = next(self._request_ids)
        self._answers.expect(request_id, shared=True)
        self._link.send(GetStatus(request_id, reads_memory=False))
        return request_id

    def next_event(
        self, timeout_s: float | None = None, wake_fd: int | None = None
    ) -> tuple[int, Event | Failed | Status] | None:
        """The next event of any submitted request, with its id; the last one of each is `Finished`, `Failed` or `Status`.

        None after `timeout_s` seconds, when the descriptor `wake_fd` is readable and no event has come, or, if neither is
        given, when no submitted request is left.

        Raises:
            ColibriError: the cluster has ended; the error says how.
        """
        return self._answers.next_shared(timeout_s, wake_fd)

    def cancel(self, request_id: int) -> None:
        """Stop a request; it ends with finish reason "cancelled", unless it has ended meanwhile."""
        self._link.send(Cancel(request_id))

    # -- beside answers ------------------------------------------------------------------------------------------------

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> Floats:
        """Teacher-forced logits float32 [T, V], one row a position; `chunk` is the most prompt rows a step."""
        return self.logits_batch([token_ids], chunk)[0]

    def logits_batch(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> list[Floats]:
        """`logits` of several prompts that share the steps as one batch."""
        request_id = next(self._request_ids)
        self._answers.expect(request_id)
        self._link.send(Score(request_id, [[int(token) for token in prompt] for prompt in prompts], chunk))
        found: list[list[Floats]] = [[] for _ in prompts]
        num_left = sum(map(len, prompts)) or 1  # without a token there is an error to be heard
        while num_left:
            part = self._answers.next(request_id, Scores)
            found[part.prompt_idx].append(part.logits)
            num_left -= len(part.logits)
        self._answers.forget(request_id)
        return [np.concatenate(parts) for parts in found]

    def save_session(self, prompt: AnyPrompt, path: str | Path) -> Saved:
        """Write the KV that is cached for the longest prefix of `prompt` to a file (0600); nothing is computed.

        The answer says how many tokens the file covers. The whole of a conversation is `prompt` with its last answer.

        Raises:
            SessionError, WriteError, RequestError: nothing is kept here, the file cannot be written, a bad prompt.
        """
        request = SaveSession(next(self._request_ids), str(Path(path).absolute()), prompt_of(prompt))
        return self._ask(request, Saved)

    def restore_session(self, path: str | Path) -> Restored:
        """Cache the KV of a saved session: the next request that begins with its tokens does not compute them.

        The answer says how many of its tokens there was memory for.

        Raises:
            SessionError: no session file, damaged, or of another model or setting; nothing has changed.
        """
        return self._ask(RestoreSession(next(self._request_ids), str(Path(path).absolute())), Restored)

    def stats(self) -> dict[str, Any]:
        """What the cluster is and does; the dict that `colibri-cluster status --json` prints."""
        return self._ask(GetStatus(next(self._request_ids)), Status).stats

    def stop(self) -> None:
        """End the cluster, also an attached one, and close."""
        self._ask(Shutdown(next(self._request_ids)), Status)
        self.close()

    def wait_until_gone(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Wait until a stopped cluster has ended and cleaned up.

        Raises:
            CoordinatorDied: it is still there after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while rundir.find(self.name) is not None:
            if time.monotonic() > deadline:
                raise CoordinatorDied(
                    f"cluster {self.name!r} has not ended within {timeout_s:.0f} s; see its processes"
                )
            time.sleep(0.02)

    def close(self) -> None:
        """Close the connection; a cluster that was launched here ends. Idempotent."""
        if self._link.socket.closed:
            return
        self._link.close()
        self._last_words.close()
        if self._process is not None:
            stop_process(self._process, _STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _begin(self, prompt: AnyPrompt, options: dict[str, Any], shared: bool = False) -> int:
        request = generate_request(next(self._request_ids), prompt, options)
        self._answers.expect(request.request_id, shared)
        self._link.send(request)
        return request.request_id

    def _ask(self, message: GetStatus | Shutdown | SaveSession | RestoreSession, kind: type[Answer]) -> Answer:
        """Send a request that has one answer, of `kind`, and wait for it."""
        self._answers.expect(message.request_id)
        self._link.send(message)
        answer = self._answers.next(message.request_id, kind)
        self._answers.forget(message.request_id)
        return answer

    def _check_coordinator(self) -> None:
        if (error := rundir.read_last_words(self._last_words)) is not None:
            raise error
        if self._process is not None and (code := self._process.poll()) is not None:
            described = describe_exit(code, self._kills.has_risen())
            raise CoordinatorDied(f"the coordinator of cluster {self.name!r} {described}")
        if self._process is None and rundir.find(self.name) is None:
            raise CoordinatorDied(f"the coordinator of cluster {self.name!r} has ended; start it again with `launch`")


def _found(name: str) -> rundir.RunDir:
    found = rundir.find(name)
    if found is None:
        others = ", ".join(rundir.running()) or "none"
        raise ConfigError(
            f"no cluster named {name!r} is running (running: {others}); start one with `colibri-cluster launch`"
        )
    return found


def _ignore(_news: object) -> None:
    """Nobody wants to know."""
