"""What the coordinator does so that experts are in memory before they are asked for: learned usage, pins, lookahead.

    launch        earlier runs' usage ─▶ Eviction ─▶ what the workers' pools take each expert for
                                      └▶ Keep ─▶ the workers read the most used when nobody waits, some as pins
    each layer    while a worker computes: count the route, score what was predicted for it, predict the next layers ─▶ Hint
    each turn     save the usage; each `--repin` tokens: give cold pins to hot experts

None of it changes a result, and nothing waits for it.
"""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mp.backend import Backend
from colibri_mp.config import LaunchConfig
from colibri_mp.lookahead import Lookahead
from colibri_mp.messages import Floats, Ints, PoolReport, StepCounters, Wish
from colibri_mp.models.structure import ModelSpec, MoeSpec
from colibri_mp.planner import Plan
from colibri_mp.scheduler import Rows
from colibri_mp.shm.policy import HALF_LIFE_TOKENS, Eviction
from colibri_mp.shm.view import PoolView
from colibri_mp.supervisor import Supervisor
from colibri_mp.trial import Trial
from colibri_mp.usage import LayerRoom, Usage, choose_swaps, preferred, prior_weights, usage_path

_log = logging.getLogger(__name__)
_SUMS = ("issued", "promoted", "late", "dropped", "failed", "wasted_bytes", "missed_dropped", "missed_unpredicted")


def open_usage(model: ModelSpec, setting: str, fingerprint: str) -> Usage:
    """The usage of earlier runs, as `--usage` says.

    Raises:
        ConfigError: its file is not one of this model.
    """
    num_experts = {experts.layer: experts.num_experts for experts in model.expert_layers}
    return Usage(num_experts, usage_path(setting, fingerprint))


def choose_eviction(config: LaunchConfig, model: ModelSpec, usage: Usage) -> Eviction:
    """The policy that was asked for, with what earlier runs have learned."""
    if config.policy == "lru":
        return Eviction("lru")
    return Eviction("lrfu", prior=prior_weights(usage.before, model.router.top_k, HALF_LIFE_TOKENS))


class Tiers:
    """See the module docstring. One thread calls it, but for `describe`."""

    def __init__(
        self, config: LaunchConfig, model: ModelSpec, plan: Plan, usage: Usage, backend: Backend, supervisor: Supervisor
    ) -> None:  # fmt: skip
        self.usage = usage
        self.lookahead = self._make_lookahead(config, model, plan, backend, supervisor)
        self.pools: list[PoolView] = []
        self._config, self._plan, self._supervisor = config, plan, supervisor
        self._floor = model.router.top_k
        self._is_prefill: NDArray[np.bool_] | None = None
        self._step = self._num_reads = 0
        self._num_tokens = self._repinned_at = self.num_swaps = 0
        self._save_error = ""

    @staticmethod
    def _make_lookahead(
        config: LaunchConfig, model: ModelSpec, plan: Plan, backend: Backend, supervisor: Supervisor
    ) -> Lookahead | None:  # fmt: skip
        """None where nothing would come of it: switched off, or no staging, as where every expert is in memory."""
        has_staging = any(share.num_staging for share in plan.workers)
        has_use = {"off": False, "measure": True, "advise": plan.resident_share < 1}.get(config.lookahead, has_staging)
        if not has_use:
            return None
        send = supervisor.hint if config.lookahead != "measure" else None
        width = min(config.lookahead_width or model.router.top_k, model.router.num_eligible)
        trial = Trial() if config.lookahead == "auto" else None
        has_router = [isinstance(layer.mlp, MoeSpec) for layer in model.layers[: model.depth]]
        return Lookahead(backend.predictor(width), has_router, width, config.lookahead_distance, send, trial)

    # -- launch --------------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Have the workers read what earlier runs used most; says so in a note, "" if nothing is known."""
        slots = {
            layer: LayerRoom(num_slots, self._floor)
            for share in self._plan.workers
            for layer, num_slots in zip(share.layers, share.num_slots, strict=True)
        }
        wishes = preferred(self.usage.before, slots, self._config.pins if self._plan.resident_share < 1 else 0.0)
        if not wishes:
            return ""
        self._supervisor.keep(wishes)
        num_pins = sum(wish.is_pinned for wish in wishes)
        note = f"learned usage: reading the {len(wishes)} experts used most in the background"
        return f"{note}, {num_pins} of them as pins" if num_pins else note

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start_step(self, step: int, rows: list[Rows]) -> None:
        """A step begins."""
        self._step = step
        self._num_reads = 0
        self._num_tokens += len(rows)
        self._set_rows(rows)
        if self.lookahead is not None:
            self.lookahead.start_step(step)

    def resume_step(self, step: int, rows: list[Rows]) -> None:
        """An interrupted step goes on, with these of its rows."""
        self._step = step
        self._set_rows(rows)

    def _set_rows(self, rows: list[Rows]) -> None:
        is_prefill = [part.is_prefill for part in rows]
        counts = [part.count for part in rows]
        self._is_prefill = np.repeat(is_prefill, counts) if any(is_prefill) else None

    def end_step(self, seconds: float, num_rows: int) -> None:
        """The step took so long."""
        if self.lookahead is not None and self._is_prefill is None:
            self.lookahead.end_step(seconds, num_rows, self._num_reads)

    def look(self, layer: int, x: Floats, ids: Ints) -> None:
        """The batch of a layer is on its way: x [T, D] is the residual stream after attention, ids [T, K] the true route."""
        self.usage.note(layer, ids, self._is_prefill)
        if self.lookahead is not None:
            self.lookahead.check(self._step, layer, ids)
            self.lookahead.predict(self._step, layer, x)

    def layer_ended(self, counters: StepCounters) -> None:
        """What a layer of the step needed."""
        self._num_reads += counters.misses + counters.promoted

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turn_ended(self) -> None:
        """An answer is complete: save what was learned, and repin if it is time."""
        self.save()
        if self._config.repin and self._num_tokens - self._repinned_at >= self._config.repin:
            self._repinned_at = self._num_tokens
            self._repin()

    def save(self) -> None:
        """Add the counts to the user's file; one that cannot be written is said once, and the run goes on."""
        try:
            self.usage.save()
        except OSError as error:
            if not self._save_error:
                _log.warning("learned usage cannot be saved in %s: %s", self.usage.path, error.strerror)
            self._save_error = str(error.strerror)

    def _repin(self) -> None:
        self.usage.count()
        tables = {layer: pool for pool in self.pools for layer in pool.layers}
        swaps = choose_swaps(
            self.usage.heat, lambda layer: tables[layer].pinned(layer), lambda layer: tables[layer].resident(layer)
        )
        self.usage.cool()
        self.num_swaps += len(swaps)
        self._supervisor.keep(
            [Wish(swap.layer, swap.hot, True) for swap in swaps], [(swap.layer, swap.cold) for swap in swaps]
        )

    # -- reports -------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What `status` says of pins, reads ahead and predictions."""
        reports = [worker.report or PoolReport(worker.config.worker_id) for worker in self._supervisor.workers]
        refusals = sorted({report.lock_refusal for report in reports if report.lock_refusal})
        return {
            "usage": str(self.usage.path or "off"),
            "usage_error": self._save_error,
            "pins": sum(report.num_pinned for report in reports),
            "locked_bytes": sum(report.locked_bytes for report in reports),
            "lock_refusal": "; ".join(refusals),
            "swaps": self.num_swaps,
            "waiting": sum(report.num_waiting for report in reports),
            "refusal": "; ".join(sorted({report.refusal for report in reports if report.refusal})),
            "staging_slots": sum(share.num_staging for share in self._plan.workers),
            "reads_ahead": {name: sum(getattr(report, name) for report in reports) for name in _SUMS},
            "lookahead": {"mode": self._config.lookahead, **(self.lookahead.describe() if self.lookahead else {})},
        }
