"""The backends by name, and how each is made for a launch. Nothing else knows their classes."""

from collections.abc import Callable
from contextlib import ExitStack

from colibri_mp.backend import Backend
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import BackendName, LaunchConfig
from colibri_mp.cpu_backend import CpuBackend
from colibri_mp.kernels.paged_cache import num_blocks_for
from colibri_mp.kernels.team import ThreadTeam
from colibri_mp.mixers.kind import StageLimits
from colibri_mp.models.structure import ModelSpec
from colibri_mp.plan_terms import max_logit_rows
from colibri_mp.planner import Plan
from colibri_mp.resident import load_resident

Maker = Callable[[Checkpoint, ModelSpec, Plan, LaunchConfig, ExitStack], Backend]
"""Reads the resident weights; `stack` takes back what must be ended. Raises ReadError."""


def make_backend(
    checkpoint: Checkpoint, model: ModelSpec, plan: Plan, config: LaunchConfig, stack: ExitStack
) -> Backend:
    """The backend of `config`, in which "auto" has been decided. Raises ReadError."""
    assert config.backend != "auto"
    return _MAKERS[config.backend](checkpoint, model, plan, config, stack)


def _cpu(checkpoint: Checkpoint, model: ModelSpec, plan: Plan, config: LaunchConfig, stack: ExitStack) -> Backend:
    team, lone_team = (stack.enter_context(ThreadTeam(count)) for count in (plan.num_threads, 1))
    limits = StageLimits(plan.prefill_chunk, plan.ctx_tokens, plan.num_threads, config.planes, config.kv_bits)
    rows = max_logit_rows(model.vocab_size, plan.prefill_chunk)
    weights = load_resident(checkpoint, model)
    num_blocks = num_blocks_for(plan.kv_tokens)
    return CpuBackend(team, lone_team, model, weights, limits, num_blocks, config.state_slots, rows)


def _mlx(checkpoint: Checkpoint, model: ModelSpec, plan: Plan, config: LaunchConfig, _stack: ExitStack) -> Backend:
    from colibri_mp.mlx_backend.mixer import Choice, Room
    from colibri_mp.mlx_backend.model import MlxModel

    room = Room(num_blocks_for(plan.kv_tokens), config.state_slots, Choice())
    return MlxModel(checkpoint, model, plan.ctx_tokens, room)


_MAKERS: dict[BackendName, Maker] = {"cpu": _cpu, "mlx": _mlx}
