"""One HTTP request's answers under way: what the engine says of each choice, in order of arrival, in the event loop's thread."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from colibri_mp.asking import AnyPrompt
from colibri_mp.errors import ColibriError
from colibri_mp.messages import Finished, Piece, Progress, PromptLogprobs
from colibri_mp.server.errors import HttpError, from_colibri
from colibri_mp.server.metrics import Metrics

Event: TypeAlias = Progress | PromptLogprobs | Piece | Finished


@dataclass(frozen=True)
class Question:
    """What the engine is asked for one choice: arguments of `Cluster.submit`."""

    prompt: AnyPrompt
    options: dict[str, Any]

    def seeded(self, seed: int | None) -> "Question":
        """The same question with a seed."""
        return self if seed is None else Question(self.prompt, {**self.options, "seed": seed})


@dataclass(eq=False)
class Turn:
    """`questions` of one request, in order of their choices. `cancel` ends what is under way."""

    id: str
    questions: list[Question]
    metrics: Metrics
    cancel: Callable[[], None] = lambda: None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _inbox: deque[tuple[int, Event | HttpError]] = field(default_factory=deque)
    _clocks: dict[int, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What the ids of a request and of its answer have in common."""
        return key_of(self.id)

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def deliver(self, choice: int, event: Event | ColibriError) -> None:
        """Called in the event loop for whatever comes."""
        if isinstance(event, ColibriError):
            self._inbox.append((choice, from_colibri(event)))
        else:
            self._measure(choice, event)
            self._inbox.append((choice, event))
        self._arrived.set()

    async def accepted(self, timeout_s: float) -> None:
        """Wait for the first sign of the engine, at most `timeout_s`: a refusal then still has a status of its own.

        Raises:
            HttpError: the engine's refusal.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return
        for _, event in self._inbox:
            if isinstance(event, HttpError):
                raise event

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """What comes, until every choice has finished.

        Raises:
            HttpError: what ended a choice; the others may still be under way.
        """
        num_left = len(self.questions)
        while num_left:
            choice, event = await self._next()
            if isinstance(event, HttpError):
                raise event
            if isinstance(event, Finished):
                num_left -= 1
                self._check_cancelled(event)
            yield choice, event

    async def _next(self) -> tuple[int, Event | HttpError]:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def _check_cancelled(self, event: Finished) -> None:
        if event.finish_reason == "cancelled":
            raise HttpError(409, "the request was cancelled", code="cancelled")

    def _measure(self, choice: int, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Piece():
                before = self._clocks.get(choice)
                if before is None:
                    self.metrics.first_token(now - self._started)
                else:
                    self.metrics.next_token(now - before)
                self._clocks[choice] = now
            case Finished():
                self.metrics.finished(event.stats)


def key_of(turn_id: str) -> str:
    """The part of an id behind its prefix ("req_", "chatcmpl-", ...)."""
    return turn_id.replace("-", "_").rpartition("_")[2]
