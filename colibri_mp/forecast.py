"""Tokens/s of decode on a machine that is only described: what a token has to read from disk and from memory, over their speeds.

    read_s    = experts a token * bytes of a stored expert * (1 - hit rate) / disk
    memory_s  = (resident weights but the embedding + experts a token * bytes of a slab + KV of a full context) / memory
    tokens/s  = 1 / (read_s + memory_s)          at most 1 / max(read_s, memory_s)

A layer's experts are known only when its router has spoken, so reading and computing mostly take turns: that is the sum. Reads
ahead make them overlap; if all did, the longer one would count alone. No computing, calls or latency of the disk are in it.
"""

from dataclasses import asdict, dataclass
from typing import Any

from colibri_mp.mixers.kinds import kv_bytes
from colibri_mp.models.structure import ModelSpec
from colibri_mp.plan_terms import resident_bytes, top_k
from colibri_mp.planner import Plan

FORMULA = "tokens/s = 1 / (bytes missed / disk + bytes touched / memory)"


@dataclass(frozen=True)
class Machine:
    """Bytes a second of disk and memory. `hit_rate`: share of experts found in memory; None: as if all were used alike."""

    disk: int
    memory: int
    hit_rate: float | None = None


@dataclass(frozen=True)
class Forecast:
    """See the module docstring."""

    hit_rate: float
    disk_bytes_per_token: int
    memory_bytes_per_token: int
    read_s: float
    memory_s: float

    @property
    def tokens_per_s(self) -> float:
        """Where reading and computing take turns."""
        return 1 / (self.read_s + self.memory_s)

    @property
    def most_tokens_per_s(self) -> float:
        """Where they overlap wholly."""
        return 1 / max(self.read_s, self.memory_s)

    @property
    def bound(self) -> str:
        """What takes longer: "disk" or "memory"."""
        return "disk" if self.read_s > self.memory_s else "memory"

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        found = {name: getattr(self, name) for name in ("tokens_per_s", "most_tokens_per_s", "bound")}
        return {**asdict(self), **found}


def forecast(model: ModelSpec, plan: Plan, kv_bits: int, machine: Machine) -> Forecast:
    """What `plan` would give on `machine`."""
    hit_rate = plan.resident_share if machine.hit_rate is None else machine.hit_rate
    if plan.resident_share == 1:
        hit_rate = 1.0
    chosen = [(top_k(model, experts), experts) for experts in model.expert_layers]
    read_bytes = int(sum(count * experts.stored_bytes for count, experts in chosen) * (1 - hit_rate))
    embedding = 0 if model.tied else model.embed.stored_bytes
    touched = resident_bytes(model) - embedding + kv_bytes(model, plan.ctx_tokens, kv_bits)
    touched += sum(count * experts.shape.slab_bytes for count, experts in chosen)
    return Forecast(hit_rate, read_bytes, touched, read_bytes / machine.disk, touched / machine.memory)
