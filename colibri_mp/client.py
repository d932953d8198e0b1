"""The Python API: `Cluster`, a client of a coordinator process.

    from colibri_mp import Cluster
    with Cluster.launch("models/olmoe", num_workers=2, ram="2GB") as cluster:
        print(cluster.generate("Once upon a time", max_tokens=32).text)

`launch` starts a cluster that ends with this object (or with this process, however it ends); `attach` joins a running one.
A `Cluster` belongs to one thread. Every wait watches the coordinator: its death raises `CoordinatorDied` within 2 s.
"""

import itertools
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from colibri_mp import rundir
from colibri_mp.config import LaunchConfig, from_keywords
from colibri_mp.control_groups import KillCounter
from colibri_mp.errors import ConfigError, CoordinatorDied, ProtocolError, RequestError, describe_exit, from_wire
from colibri_mp.handshake import start_coordinator, stop_process
from colibri_mp.messages import (
    Cancel,
    ChatMessage,
    Conversation,
    Failed,
    Finished,
    Floats,
    Generate,
    GetStatus,
    Message,
    Piece,
    Prompt,
    Sampling,
    Score,
    Scores,
    Shutdown,
    Status,
)
from colibri_mp.transport import Link

_CHECK_S = 0.5  # how often a waiting client looks whether the coordinator lives
_STOP_TIMEOUT_S = 15.0


AnyPrompt: TypeAlias = Prompt | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or messages {"role", "content"} for the chat template."""


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt.

    `finish_reason`: "stop" (end-of-text token or stop string), "length" (max_tokens, or the context is full) or
    "cancelled". `token_ids` leaves out the end-of-text token. `stats`: prompt_tokens, cached_tokens (of the prompt: not computed
    but taken from what earlier requests had computed), completion_tokens, ttft_s, prefill_tok_s, decode_tok_s, seed, cache
    {hits, misses, hit_rate, bytes_read, disk_s, wait_s, ...} of the time it took.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: dict[str, Any]


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
        self._inbox: defaultdict[int, deque[Message]] = defaultdict(deque)

    @classmethod
    def launch(
        cls, model: str | Path = "demo", *, progress: Callable[[str], None] | None = None, **settings: Any
    ) -> Self:
        """Start a cluster and wait until it serves; `settings` are those of `LaunchConfig`.

        Raises:
            ColibriError: it cannot start; nothing is left behind.
        """
        config = from_keywords(LaunchConfig, {"model": str(model), **settings})
        process, ready = start_coordinator(config, owned=True, progress=progress or _ignore)
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
        for message in self._generate(prompt, **options):
            text.append(message.text)
            if isinstance(message, Piece):
                token_ids += message.token_ids
            else:
                return Completion(token_ids, "".join(text), message.finish_reason, message.stats)
        raise ProtocolError("the answer ended without a finish")

    def stream(self, prompt: AnyPrompt, **options: Any) -> Iterator[str]:
        """Yield the answer's text as it is made, whole characters only.

        Args:
            prompt: text, token ids, or a list of {"role", "content"} for the checkpoint's chat template.
            options: max_tokens (default: what the context holds), temperature, top_p, top_k, min_p, repetition_penalty,
                seed, stop (strings), ignore_eos. What is left out comes from the checkpoint's generation_config.json.

        Raises:
            RequestError: a bad option or a prompt that does not fit.
            ColibriError: what ended the answer.
        """
        for message in self._generate(prompt, **options):
            if message.text:
                yield message.text

    def events(self, prompt: AnyPrompt, **options: Any) -> Iterator[Piece | Finished]:
        """Like `stream`, with token ids and, as the last event, the statistics. Leaving the loop early cancels."""
        yield from self._generate(prompt, **options)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> Floats:
        """Teacher-forced logits float32 [T, V], one row a position; `chunk` is the most prompt rows a step."""
        return self.logits_batch([token_ids], chunk)[0]

    def logits_batch(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> list[Floats]:
        """`logits` of several prompts that share the steps as one batch."""
        request_id = next(self._request_ids)
        self._link.send(Score(request_id, [[int(token) for token in prompt] for prompt in prompts], chunk))
        found: list[list[Floats]] = [[] for _ in prompts]
        num_left = sum(map(len, prompts)) or 1  # without a token there is an error to be heard
        while num_left:
            match self._next(request_id):
                case Scores(prompt_idx=idx, logits=logits):
                    found[idx].append(logits)
                    num_left -= len(logits)
                case other:
                    raise ProtocolError(f"{type(other).__name__} in answer to a score request")
        del self._inbox[request_id]
        return [np.concatenate(parts) for parts in found]

    def stats(self) -> dict[str, Any]:
        """What the cluster is and does; the dict that `colibri-cluster status --json` prints."""
        return self._ask_status(GetStatus(next(self._request_ids)))

    def stop(self) -> None:
        """End the cluster, also an attached one, and close."""
        self._ask_status(Shutdown(next(self._request_ids)))
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

    def _generate(
        self, prompt: AnyPrompt, *, max_tokens: int | None = None, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, **sampling: Any,
    ) -> Iterator[Piece | Finished]:  # fmt: skip
        request_id = next(self._request_ids)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._link.send(Generate(request_id, _prompt(prompt), max_tokens, _sampling(sampling), stops, ignore_eos))
        message: Message | None = None
        try:
            while not isinstance(message, Finished):
                message = self._next(request_id)
                if not isinstance(message, Piece | Finished):
                    raise ProtocolError(f"{type(message).__name__} in answer to a generate request")
                yield message
        finally:
            self._inbox.pop(request_id, None)
            if not isinstance(message, Finished) and not self._link.socket.closed:
                self._link.send(Cancel(request_id))

    def _ask_status(self, message: GetStatus | Shutdown) -> dict[str, Any]:
        self._link.send(message)
        answer = self._next(message.request_id)
        self._inbox.pop(message.request_id, None)
        if not isinstance(answer, Status):
            raise ProtocolError(f"{type(answer).__name__} in answer to a status request")
        return answer.stats

    def _next(self, request_id: int) -> Message:
        """The next message of a request; those of other requests are kept for them. `Failed` raises its error."""
        while not self._inbox[request_id]:
            message = self._link.receive(_CHECK_S)
            if message is None:
                self._check_coordinator()
                continue
            owner = getattr(message, "request_id", None)
            if owner is None:
                raise ProtocolError(f"{type(message).__name__} sent to a client")
            self._inbox[owner].append(message)
        message = self._inbox[request_id].popleft()
        if isinstance(message, Failed):
            self._inbox.pop(request_id, None)
            raise from_wire(message.kind, message.message)
        return message

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


def _prompt(prompt: AnyPrompt) -> Prompt:
    """The prompt as it travels: a list of dicts is a conversation, any other sequence token ids."""
    if isinstance(prompt, str | Conversation):
        return prompt
    messages = [item for item in prompt if isinstance(item, dict)]
    if messages and len(messages) == len(prompt):
        return Conversation(tuple(_chat_message(item) for item in messages))
    if messages or not all(isinstance(item, int | np.integer) for item in prompt):
        raise RequestError("a prompt is a text, a list of token ids, or a list of {'role', 'content'} messages")
    return [int(item) for item in prompt if not isinstance(item, dict)]


def _chat_message(message: dict[str, str]) -> ChatMessage:
    if message.keys() != {"role", "content"}:
        raise RequestError(f"a message has the keys role and content, not {sorted(message)}")
    return ChatMessage(**message)


def _sampling(options: dict[str, Any]) -> Sampling:
    known = Sampling.__struct_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are max_tokens, stop, ignore_eos, {', '.join(known)}")
    return Sampling(**options)


def _ignore(_text: str) -> None:
    """No progress wanted."""
