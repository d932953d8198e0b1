"""The memory plan: one budget over all processes, split into named terms before anything is allocated.

    budget  =  processes  +  resident weights  +  KV cache  +  scratch  +  allowance  +  expert pools (what is left)

Everything but the pools has a fixed size; the pools take the rest, down to the experts of one token in each layer. What
does not fit is refused with the terms and the smallest budget that would do. The terms are what gets allocated: the
objects that allocate report the same sizes (`scratch_bytes`, `nbytes`, `packed_bytes`), and tests hold the sum against
the measured memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig, format_size, parse_size
from colibri_mp.errors import ConfigError, MemoryPlanError
from colibri_mp.kernels import expert
from colibri_mp.kernels.attention import AttentionStage
from colibri_mp.kernels.head import HeadStage
from colibri_mp.kernels.kv_cache import BLOCK_TOKENS, KVCache, num_blocks_for
from colibri_mp.kernels.layout import packed_bytes
from colibri_mp.kernels.rope import RopeTables
from colibri_mp.kernels.router import RouterStage
from colibri_mp.lossy import with_lossy_routing
from colibri_mp.memory import Available, available_memory, usable_cores
from colibri_mp.models import load_model
from colibri_mp.models.structure import DenseSpec, ModelSpec, MoeSpec
from colibri_mp.shm.layout import overhead_bytes
from colibri_mp.shm.policy import LayerDemand, plan_slots
from colibri_mp.shm.segment import free_shm_bytes
from colibri_mp.workers.streamer import scratch_bytes as read_scratch_bytes

# Interpreter and libraries, PSS, measured with one worker on Linux x86-64 (23, 119, 101 and 7.8 MB) and rounded up.
CLIENT_BYTES = 25_000_000
COORDINATOR_BYTES = 125_000_000
WORKER_BYTES = 110_000_000
TRACKER_BYTES = 8_000_000  # multiprocessing's resource tracker

ALLOWANCE = 0.02  # of the budget: allocator slack, page tables, message queues
SYSTEM_SHARE = 0.15  # of the available memory that "auto" leaves to the system and its page cache
LOGITS_BYTES = 16_000_000  # logits of one step are kept below this (see `max_logit_rows`)
_AUTO_CTX_TOKENS = 4096
_LEAST_AUTO_CTX_TOKENS = 512
_AUTO_CTX_SHARE = 0.125  # of the budget: what "auto" spends on KV at most,
_AUTO_CHUNK_SHARE = 0.06  # on the scratch of a step,
_AUTO_WORKER_SHARE = 0.04  # on a second worker
_AUTO_CHUNKS = (512, 256, 128, 64)


@dataclass(frozen=True)
class Term:
    """One line of the plan: `nbytes` that `process` will hold."""

    process: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class WorkerShare:
    """What one worker owns: its MoE layers and the number of slots of each, in the same order."""

    layers: tuple[int, ...]
    num_slots: tuple[int, ...]
    pool_bytes: int


@dataclass(frozen=True)
class Plan:
    """The split of `budget_bytes`. `notes` are the automatic choices with their reasons."""

    budget_bytes: int
    terms: tuple[Term, ...]
    workers: tuple[WorkerShare, ...]
    ctx_tokens: int
    num_threads: int
    prefill_chunk: int
    expert_bytes: int
    resident_share: float
    notes: tuple[str, ...]

    @property
    def planned_bytes(self) -> int:
        """Sum of the terms; at most the budget."""
        return sum(term.nbytes for term in self.terms)

    def as_dict(self) -> dict[str, Any]:
        """The plan for `--json`."""
        return {**asdict(self), "planned_bytes": self.planned_bytes}


def plan_for(config: LaunchConfig, progress: Callable[[str], None]) -> Plan:
    """The plan for a configuration, from the headers of its checkpoint."""
    model = load_model(Checkpoint.open(resolve(config.model, progress)))
    return make_plan(with_lossy_routing(model, config), config, available_memory())


def make_plan(model: ModelSpec, config: LaunchConfig, available: Available, check_shm: bool = True) -> Plan:
    """Split the budget. `check_shm`: this machine's /dev/shm must have room for the pools; off for plans of other machines.

    Raises:
        MemoryPlanError: the budget is too small or more than the system has; names the terms and the needed size.
    """
    budget_bytes, budget_note = _budget(config, available)
    num_threads, threads_note = _threads(config)
    ctx_tokens, ctx_note = _context(model, config, budget_bytes)
    chunk, chunk_note = _prefill_chunk(model, config, ctx_tokens, num_threads, budget_bytes)
    num_workers, workers_note = _num_workers(model, config, chunk, num_threads, budget_bytes)
    groups = split_layers(model.expert_layers, num_workers)
    sizes = _Sizes(model, config, ctx_tokens, chunk, num_threads)
    fixed = sizes.fixed_terms(groups, budget_bytes)
    demands = [[_demand(layer, model, config) for layer in group] for group in groups]
    pool_terms, shares = _pools(demands, groups, fixed, budget_bytes)
    if check_shm:
        _check_shm(sum(share.pool_bytes for share in shares))
    slots = sum(sum(share.num_slots) for share in shares)
    num_experts = sum(layer.num_experts for layer in model.expert_layers)
    return Plan(
        budget_bytes=budget_bytes,
        terms=(*fixed, *pool_terms),
        workers=shares,
        ctx_tokens=ctx_tokens,
        num_threads=num_threads,
        prefill_chunk=chunk,
        expert_bytes=max(layer.shape.slab_bytes for layer in model.expert_layers),
        resident_share=slots / num_experts,
        notes=tuple(note for note in (budget_note, workers_note, ctx_note, chunk_note, threads_note) if note),
    )


def max_logit_rows(vocab_size: int, prefill_chunk: int) -> int:
    """Rows whose logits one step may keep, so that they take at most `LOGITS_BYTES` (one row always may)."""
    return max(1, min(prefill_chunk, LOGITS_BYTES // (4 * vocab_size)))


def split_layers(layers: Sequence[ExpertLayer], num_workers: int) -> list[tuple[ExpertLayer, ...]]:
    """Contiguous groups of layers, one a worker, as equal in expert bytes as cutting at the ideal places allows."""
    cumulative = list(accumulate(layer.num_experts * layer.stored_bytes for layer in layers))
    cuts = [0]
    for worker_id in range(1, num_workers):
        ideal = cumulative[-1] * worker_id / num_workers
        nearest = min(range(len(layers)), key=lambda idx: abs(cumulative[idx] - ideal)) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(layers) - (num_workers - worker_id)))
    return [tuple(layers[start:end]) for start, end in pairwise([*cuts, len(layers)])]


# -- automatic choices -------------------------------------------------------------------------------------------------


def _budget(config: LaunchConfig, available: Available) -> tuple[int, str]:
    if config.ram == "auto":
        budget = int(available.nbytes * (1 - SYSTEM_SHARE))
        return (
            budget,
            f"ram {format_size(budget)}: {1 - SYSTEM_SHARE:.0%} of {format_size(available.nbytes)} {available.reason}",
        )
    budget = parse_size(config.ram)
    if budget > available.nbytes:
        raise MemoryPlanError(
            f"--ram {format_size(budget)} is more than the {format_size(available.nbytes)} {available.reason}; "
            "lower it, or free memory"
        )
    return budget, ""


def _num_workers(
    model: ModelSpec, config: LaunchConfig, chunk: int, num_threads: int, budget_bytes: int
) -> tuple[int, str]:
    num_layers = len(model.expert_layers)
    if config.num_workers > num_layers:
        raise ConfigError(f"--workers {config.num_workers} is more than the model's {num_layers} layers with experts")
    if config.num_workers:
        return config.num_workers, ""
    sizes = _Sizes(model, config, 0, chunk, num_threads)
    cost = sum(term.nbytes for term in sizes.worker_terms(0, model.expert_layers))
    if num_layers < 2 or cost > budget_bytes * _AUTO_WORKER_SHARE:
        return 1, f"workers 1: a second one would take {format_size(cost)} from the expert pools"
    return 2, f"workers 2: each owns half of {num_layers} layers and takes {format_size(cost)} beside its pool"


def _prefill_chunk(
    model: ModelSpec, config: LaunchConfig, ctx_tokens: int, num_threads: int, budget_bytes: int
) -> tuple[int, str]:
    if config.prefill_chunk:
        return config.prefill_chunk, ""
    for chunk in _AUTO_CHUNKS:
        sizes = _Sizes(model, config, ctx_tokens, chunk, num_threads)
        cost = sizes.coordinator_scratch() + sizes.worker_scratch(model.expert_layers)
        if cost <= budget_bytes * _AUTO_CHUNK_SHARE:
            break
    chunk = min(chunk, ctx_tokens)
    return chunk, f"prefill chunk {chunk} tokens: a step's scratch takes {format_size(cost)} in coordinator and worker"


def _context(model: ModelSpec, config: LaunchConfig, budget_bytes: int) -> tuple[int, str]:
    if config.ctx > model.max_context:
        raise ConfigError(f"--ctx {config.ctx} is more than the model's context of {model.max_context} tokens")
    if config.ctx:
        return config.ctx, ""
    per_token = kv_bytes(model, BLOCK_TOKENS) / BLOCK_TOKENS
    affordable = int(budget_bytes * _AUTO_CTX_SHARE / per_token) // BLOCK_TOKENS * BLOCK_TOKENS
    chosen = min(model.max_context, _AUTO_CTX_TOKENS, max(affordable, _LEAST_AUTO_CTX_TOKENS))
    return chosen, (
        f"ctx {chosen} tokens: KV takes {format_size(per_token)} a token, at most {_AUTO_CTX_SHARE:.0%} of the budget; "
        f"the model's limit is {model.max_context}"
    )


def _threads(config: LaunchConfig) -> tuple[int, str]:
    if config.num_threads:
        return config.num_threads, ""
    count, reason = usable_cores()
    return count, f"threads {count}: {reason}"


# -- terms -------------------------------------------------------------------------------------------------------------


def kv_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes of the KV cache for `num_tokens` positions, all layers."""
    spec = model.layers[0].attention
    return KVCache.nbytes(len(model.layers), num_blocks_for(num_tokens), spec.num_kv_heads, spec.head_dim)


def resident_bytes(model: ModelSpec) -> int:
    """Bytes of the packed matrices that the coordinator keeps, dense blocks included."""
    return sum(packed_bytes(matrix.encoding.format, matrix.rows, matrix.cols) for matrix in model.resident_matrices())


@dataclass(frozen=True)
class _Sizes:
    """Bytes of everything but the pools, for one choice of context, rows a step and threads."""

    model: ModelSpec
    config: LaunchConfig
    ctx_tokens: int
    chunk: int
    num_threads: int

    def fixed_terms(self, groups: Sequence[Sequence[ExpertLayer]], budget_bytes: int) -> list[Term]:
        """All terms but the pools."""
        return [
            Term("client", "interpreter and libraries", CLIENT_BYTES),
            Term("coordinator", "interpreter and libraries", COORDINATOR_BYTES + TRACKER_BYTES),
            Term("coordinator", "resident weights", resident_bytes(self.model)),
            Term("coordinator", f"KV cache, {self.ctx_tokens} tokens", kv_bytes(self.model, self.ctx_tokens)),
            Term("coordinator", f"scratch, {self.chunk} rows a step", self.coordinator_scratch()),
            *(term for worker_id, group in enumerate(groups) for term in self.worker_terms(worker_id, group)),
            Term("all", f"allowance, {ALLOWANCE:.0%} of the budget", int(budget_bytes * ALLOWANCE)),
        ]

    def worker_terms(self, worker_id: int, group: Sequence[ExpertLayer]) -> list[Term]:
        """A worker's terms but its pool."""
        name, in_flight = f"worker {worker_id}", self.config.io_threads
        return [
            Term(name, "interpreter and libraries", WORKER_BYTES),
            Term(name, f"scratch, {self.chunk} rows a step", self.worker_scratch(group)),
            Term(name, f"read buffers, {in_flight} in flight", read_scratch_bytes(group, in_flight)),
        ]

    def coordinator_scratch(self) -> int:
        """The stages' buffers, logits, rotary tables, messages."""
        model, rows, planes = self.model, self.chunk, self.config.planes
        dense = {layer.mlp.shape for layer in model.layers if isinstance(layer.mlp, DenseSpec)}
        logit_rows = max_logit_rows(model.vocab_size, rows)
        attention = AttentionStage.scratch_bytes(
            model.layers[0].attention, rows, self.ctx_tokens, self.num_threads, num_forms=_num_forms(model)
        )
        return (
            attention
            + RouterStage.scratch_bytes(model.router, model.hidden, rows)
            + HeadStage.scratch_bytes(model.hidden, model.vocab_size, logit_rows)
            + logit_rows * model.vocab_size * 4  # the copy on its way to the client
            + sum(expert.scratch_bytes(shape, rows, 1, planes, self.num_threads) for shape in dense)
            + RopeTables.nbytes_for(model.rope.rotary_dim, self.ctx_tokens)
            + self._messages()
        )

    def worker_scratch(self, group: Sequence[ExpertLayer]) -> int:
        """One stage for each shape among the worker's layers, and messages."""
        shapes = {layer.shape: _top_k(self.model, layer) for layer in group}
        stages = (
            expert.scratch_bytes(shape, self.chunk, top_k, self.config.planes, self.num_threads)
            for shape, top_k in shapes.items()
        )
        return sum(stages) + self._messages()

    def _messages(self) -> int:
        """A step's activations on their way: sent, received and decoded copies."""
        return 4 * self.chunk * self.model.hidden * 4


def _num_forms(model: ModelSpec) -> int:
    """Group sizes that the projections of one layer's attention mix, plain ones counting as one."""
    tensors = (layer.tensors for layer in model.layers)
    return max(len({matrix.encoding.group_size for matrix in (t.q, t.k, t.v, t.o)}) for t in tensors)


def _top_k(model: ModelSpec, experts: ExpertLayer) -> int:
    mlp = model.layers[experts.layer].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp.router.top_k


def _demand(experts: ExpertLayer, model: ModelSpec, config: LaunchConfig) -> LayerDemand:
    """What a layer asks of the pool; `--slots` caps it, so that a small pool can be tried in a large memory."""
    top_k = _top_k(model, experts)
    if 0 < config.slots < min(top_k, experts.num_experts):
        raise ConfigError(f"--slots {config.slots} is less than the {top_k} experts that one token needs in each layer")
    capped = min(experts.num_experts, config.slots or experts.num_experts)
    return LayerDemand(capped, experts.shape.slab_bytes, min(top_k, experts.num_experts))


def _pools(
    demands: Sequence[Sequence[LayerDemand]],
    groups: Sequence[Sequence[ExpertLayer]],
    fixed: Sequence[Term],
    budget_bytes: int,
) -> tuple[list[Term], tuple[WorkerShare, ...]]:
    """Share what the fixed terms leave among the layers of all workers."""
    flat = [demand for group in demands for demand in group]
    tables = sum(_table_bytes(group, sum(d.num_experts for d in group)) for group in demands)
    left = budget_bytes - sum(term.nbytes for term in fixed) - tables
    floor = sum(demand.floor * demand.slab_bytes for demand in flat)
    if left < floor:
        raise _too_small(fixed, floor + tables, budget_bytes)
    slots = list(plan_slots(flat, left).num_slots)
    terms, shares = [], []
    for worker_id, (group, group_demands) in enumerate(zip(groups, demands, strict=True)):
        mine, slots = slots[: len(group)], slots[len(group) :]
        nbytes = sum(n * demand.slab_bytes for n, demand in zip(mine, group_demands, strict=True))
        nbytes += _table_bytes(group_demands, sum(mine))
        terms.append(Term(f"worker {worker_id}", f"expert pool, {sum(mine)} slots", nbytes))
        shares.append(WorkerShare(tuple(layer.layer for layer in group), tuple(mine), nbytes))
    return terms, tuple(shares)


def _table_bytes(group: Sequence[LayerDemand], num_slots: int) -> int:
    """What a worker's pool takes beside its slabs."""
    return overhead_bytes(len(group), len({demand.slab_bytes for demand in group}), num_slots)


def _too_small(fixed: Sequence[Term], pool_floor: int, budget_bytes: int) -> MemoryPlanError:
    allowance = sum(term.nbytes for term in fixed if term.process == "all")
    needed = int((sum(term.nbytes for term in fixed) - allowance + pool_floor) / (1 - ALLOWANCE)) + 1
    lines = [f"  {format_size(term.nbytes):>9}  {term.process}: {term.name}" for term in fixed]
    lines.append(f"  {format_size(pool_floor):>9}  expert pools, at least one token's experts in each layer")
    return MemoryPlanError(
        f"--ram {format_size(budget_bytes)} is too small, this run needs at least {format_size(needed)} ({needed} bytes):\n"
        + "\n".join(lines)
        + "\nraise --ram, or lower --ctx, --prefill-chunk, --io-threads or --workers"
    )


def _check_shm(pool_bytes: int) -> None:
    free = free_shm_bytes()
    if free is not None and pool_bytes > free:
        raise MemoryPlanError(
            f"the expert pools need {format_size(pool_bytes)} of shared memory, /dev/shm has {format_size(free)} free; "
            "enlarge it (mount -o remount,size=... /dev/shm; in a container --shm-size) or lower --ram"
        )
