"""What the server knows of its cluster, and what /health makes of that. Pure values; the times are of `time.monotonic`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from colibri_mp.checkpoint.hub import BUILT_IN, resolve
from colibri_mp.tokenizer import Tokenizer

State: TypeAlias = Literal["loading", "serving", "broken", "stopping"]


@dataclass(frozen=True)
class Model:
    """The model that is served; `names` are what clients may call it, the first is its own, "*" takes any.

    `longest_token`: characters that its vocabulary writes the longest token with.
    """

    names: tuple[str, ...]
    fingerprint: str
    ctx_tokens: int
    tokenizer: Tokenizer | None
    longest_token: int
    created: int

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]

    def is_called(self, name: str) -> bool:
        """Whether a client may call it so."""
        return name in self.names or "*" in self.names


def model_name(folder: Path) -> str:
    """What clients call the checkpoint in `folder`: its name, that of its Hugging Face repository, or "demo"."""
    if folder == resolve(BUILT_IN):
        return BUILT_IN
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


@dataclass(frozen=True)
class View:
    """`detail` says what a state means; `status` is what `status --json` printed at `heard_at`.

    `moved_at` is when the engine was last seen to get on, or had nothing to do.
    """

    state: State
    detail: str
    heard_at: float
    moved_at: float
    status: dict[str, Any] = field(default_factory=dict)
    model: Model | None = None

    def health(self, now: float, stall_s: float) -> tuple[str, str]:
        """The state as people are told it, and the reason: a cluster that serves may be stalled."""
        if self.state != "serving":
            return self.state, self.detail
        if now - self.heard_at > stall_s:
            return "stalled", f"the coordinator has not answered for {now - self.heard_at:.0f} s"
        if now - self.moved_at > stall_s:
            return "stalled", f"{self.num_active} requests, and no progress for {now - self.moved_at:.0f} s"
        return "ok", "serving"

    @property
    def num_active(self) -> int:
        """Requests of all clients that the cluster had when it was last heard."""
        return int(self.status.get("requests", {}).get("active", 0))

    def heard(self, status: dict[str, Any], now: float) -> "View":
        """The view after a status has come."""
        has_moved = status.get("progress") != self.status.get("progress") or status["requests"]["active"] == 0
        return View(self.state, self.detail, now, now if has_moved else self.moved_at, status, self.model)
