"""The memory plan: one budget over all processes, split into named terms before anything is allocated.

    budget  >=  processes  +  resident weights  +  KV cache  +  scratch  +  expert pools (what is left)  +  allowance

Everything but the pools has a fixed size (see `plan_terms`); the pools take the rest, from the experts of one token in each
layer up to all of them: the total of a plan is what the run needs, not more. What does not fit is refused with the terms,
the one that does not fit, and the smallest budget that would do.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from colibri_mp.backend_choice import with_backend
from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.hub import resolve
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import BackendName, LaunchConfig, format_size, parse_size
from colibri_mp.errors import ConfigError, MemoryPlanError
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.limits import Room, address_space_bytes, tightest_room
from colibri_mp.lossy import with_lossy_options
from colibri_mp.memory import own_bytes, usable_cores
from colibri_mp.models import load_model
from colibri_mp.models.structure import ModelSpec
from colibri_mp.plan_terms import ExpertRoom, Sizes, Term, table_bytes, top_k
from colibri_mp.shm.layout import overhead_bytes
from colibri_mp.shm.policy import LayerDemand, plan_slots
from colibri_mp.shm.segment import free_shm_bytes

ALLOWANCE = 0.02  # of all other terms: allocator slack, page tables, message queues
SYSTEM_SHARE = 0.15  # of the available memory that "auto" leaves to the system and its page cache, at least
_AUTO_CTX_TOKENS = 4096
_LEAST_AUTO_CTX_TOKENS = 512
_AUTO_CTX_SHARE = 0.125  # of the budget: what "auto" spends on KV at most,
_AUTO_CHUNK_SHARE = 0.06  # on the scratch of a step,
_AUTO_WORKER_SHARE = 0.04  # on a second worker
_AUTO_CHUNKS = (512, 256, 128, 64)
_ADDRESS_BYTES, _THREAD_ADDRESS_BYTES = 350_000_000, 75_000_000  # libraries; stack and allocator of a thread


@dataclass(frozen=True)
class WorkerShare:
    """What one worker owns: its MoE layers and the number of slots of each, in the same order.

    Of `pool_bytes` the slabs take `slab_bytes`, and never less than `floor_bytes`. `device_bytes`: experts on a device, beside the pool.
    """

    layers: tuple[int, ...]
    num_slots: tuple[int, ...]
    pool_bytes: int
    slab_bytes: int
    floor_bytes: int
    num_staging: int
    device_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """The split of `budget_bytes`. `notes` are the automatic choices with their reasons."""

    budget_bytes: int
    terms: tuple[Term, ...]
    workers: tuple[WorkerShare, ...]
    ctx_tokens: int
    kv_tokens: int
    num_threads: int
    prefill_chunk: int
    expert_bytes: int
    resident_share: float
    notes: tuple[str, ...]
    backend: BackendName = "cpu"

    @property
    def planned_bytes(self) -> int:
        """Sum of the terms; at most the budget."""
        return sum(term.nbytes for term in self.terms)

    def as_dict(self) -> dict[str, Any]:
        """The plan for `--json`."""
        return {**asdict(self), "planned_bytes": self.planned_bytes}


def plan_for(config: LaunchConfig, progress: Callable[[str], None]) -> Plan:
    """The plan for a configuration, from the headers of its checkpoint and the memory that there is now."""
    checkpoint = Checkpoint.open(resolve(config.model, progress))
    model = with_lossy_options(load_model(checkpoint, predicts=config.draft > 0), config)
    return plan_now(checkpoint, model, with_backend(config, model))


def plan_now(checkpoint: Checkpoint, model: ModelSpec, config: LaunchConfig) -> Plan:
    """The plan for an opened checkpoint; what this process takes already counts as available to the cluster."""
    return make_plan(model, config, tightest_room(), table_bytes(checkpoint), own_bytes(), free_shm_bytes())


def make_plan(
    model: ModelSpec, config: LaunchConfig, room: Room, tables: int = 0, taken: int = 0, free_shm: int | None = None
) -> Plan:
    """Split the budget. `tables` as in `plan_terms`; `taken`: bytes that this process takes, which the budget includes.

    `free_shm`: what is left of shared memory, where it has a limit.

    Raises:
        MemoryPlanError: the budget is too small or more than there is; names the terms and the needed size.
    """
    available = room.free_bytes + taken
    budget_bytes, budget_note = _budget(config, room, available)
    draft = _draft(model, config, tables, budget_bytes)
    if budget_bytes > available:
        raise _more_than_available(draft, budget_bytes, room, available)
    if draft.needed_bytes > budget_bytes:
        raise _too_small(draft, budget_bytes)
    slab_budget = int(budget_bytes / (1 + ALLOWANCE)) - draft.fixed_bytes - draft.pool_table_bytes
    slab_budget, shm_note = _within_shm(draft, slab_budget, free_shm)
    pool_terms, shares = _pools(draft, slab_budget)
    terms = (*draft.terms, *pool_terms)
    terms += (Term("all", f"allowance, {ALLOWANCE:.0%}", int(sum(term.nbytes for term in terms) * ALLOWANCE)),)
    _check_address_space(terms, shares, config, draft.num_threads)
    used_note = _use_note(room, available - sum(term.nbytes for term in terms))
    num_experts = sum(layer.num_experts for layer in model.expert_layers)
    return Plan(
        budget_bytes=budget_bytes,
        terms=terms,
        workers=shares,
        ctx_tokens=draft.ctx_tokens,
        kv_tokens=config.kv_tokens or draft.ctx_tokens,
        num_threads=draft.num_threads,
        prefill_chunk=draft.chunk,
        expert_bytes=max(layer.shape.slab_bytes for layer in model.expert_layers),
        resident_share=sum(sum(share.num_slots) for share in shares) / num_experts,
        notes=tuple(note for note in (budget_note, used_note, shm_note, *draft.notes) if note),
        backend="mlx" if config.backend == "mlx" else "cpu",
    )


def smallest_budget(model: ModelSpec, config: LaunchConfig, tables: int = 0) -> int:
    """The least `--ram`, in bytes, with the settings of `config`; `tables` as in `make_plan`."""
    return _smallest_budget(_draft(model, config, tables, 0))


def split_layers(layers: Sequence[ExpertLayer], num_workers: int) -> list[tuple[ExpertLayer, ...]]:
    """Contiguous groups of layers, one a worker, as equal in expert bytes as cutting at the ideal places allows."""
    cumulative = list(accumulate(layer.num_experts * layer.stored_bytes for layer in layers))
    cuts = [0]
    for worker_id in range(1, num_workers):
        ideal = cumulative[-1] * worker_id / num_workers
        nearest = min(range(len(layers)), key=lambda idx: abs(cumulative[idx] - ideal)) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(layers) - (num_workers - worker_id)))
    return [tuple(layers[start:end]) for start, end in pairwise([*cuts, len(layers)])]


def split_slabs(workers: Sequence[WorkerShare], slab_bytes: int) -> list[int]:
    """What each worker's slabs may take of `slab_bytes` together: its floor, and of the rest its share in the plan."""
    floor = sum(share.floor_bytes for share in workers)
    beyond_floor = sum(share.slab_bytes for share in workers) - floor
    part = max(0.0, (slab_bytes - floor) / beyond_floor) if beyond_floor else 0.0
    return [share.floor_bytes + int((share.slab_bytes - share.floor_bytes) * part) for share in workers]


def sizes_for(model: ModelSpec, config: LaunchConfig, ctx_tokens: int, chunk: int, num_threads: int) -> Sizes:
    """The sizes with the backend of `config`, the kernels unless it says otherwise."""
    kind = Sizes
    if config.backend == "mlx":
        from colibri_mp.mlx_backend.sizes import MlxSizes

        kind = MlxSizes
    return kind(model, config, ctx_tokens, chunk, num_threads)


# -- automatic choices -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """All choices for one budget, and what they cost without the part of the pools that can be left out."""

    model: ModelSpec
    config: LaunchConfig
    tables: int
    ctx_tokens: int
    chunk: int
    num_threads: int
    groups: tuple[tuple[ExpertLayer, ...], ...]
    terms: tuple[Term, ...]
    device_bytes: tuple[int, ...]
    demands: tuple[tuple[LayerDemand, ...], ...]
    notes: tuple[str, ...]

    @property
    def fixed_bytes(self) -> int:
        """The terms beside the pools."""
        return sum(term.nbytes for term in self.terms)

    @property
    def pool_table_bytes(self) -> int:
        """What the pools take beside their slabs, at most."""
        return sum(
            _table_bytes(group, sum(demand.num_experts for demand in group) + self.num_staging * len(group))
            for group in self.demands
        )

    @property
    def num_staging(self) -> int:
        """Slots of each slab size for reads ahead, where there are any."""
        config = self.config
        if config.lookahead in ("off", "measure", "advise"):
            return 0
        return (config.lookahead_width or self.model.router.top_k) * config.lookahead_distance

    @property
    def floor_bytes(self) -> int:
        """The slabs of one token's experts in each layer."""
        return sum(demand.floor * demand.slab_bytes for group in self.demands for demand in group)

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that these choices fit."""
        return int((self.fixed_bytes + self.pool_table_bytes + self.floor_bytes) * (1 + ALLOWANCE)) + 2


def _draft(model: ModelSpec, config: LaunchConfig, tables: int, budget_bytes: int) -> _Draft:
    num_threads, threads_note = _threads(config)
    ctx_tokens, ctx_note = _context(model, config, budget_bytes)
    chunk, chunk_note = _prefill_chunk(model, config, ctx_tokens, num_threads, budget_bytes)
    num_workers, workers_note = _num_workers(model, config, chunk, num_threads, budget_bytes)
    groups = tuple(split_layers(model.expert_layers, num_workers))
    sizes = sizes_for(model, config, ctx_tokens, chunk, num_threads)
    terms = tuple(sizes.terms(groups, tables))
    demands = tuple(tuple(_demand(layer, model, config) for layer in group) for group in groups)
    device_bytes = sizes.device_bytes(groups, _expert_room(terms, demands, budget_bytes))
    return _Draft(
        model=model,
        config=config,
        tables=tables,
        ctx_tokens=ctx_tokens,
        chunk=chunk,
        num_threads=num_threads,
        groups=groups,
        terms=terms + _device_terms(device_bytes),
        device_bytes=device_bytes,
        demands=demands,
        notes=(workers_note, ctx_note, chunk_note, threads_note),
    )


def _expert_room(terms: Sequence[Term], demands: Sequence[Sequence[LayerDemand]], budget_bytes: int) -> ExpertRoom:
    """What the fixed terms leave of a budget."""
    layers = [demand for group in demands for demand in group]
    return ExpertRoom(
        left=int(budget_bytes / (1 + ALLOWANCE)) - sum(term.nbytes for term in terms),
        floor=sum(layer.floor * layer.slab_bytes for layer in layers),
        most=sum(layer.num_experts * layer.slab_bytes for layer in layers),
    )


def _device_terms(device_bytes: Sequence[int]) -> tuple[Term, ...]:
    return tuple(
        Term(f"worker {worker_id}", "experts on the device", nbytes)
        for worker_id, nbytes in enumerate(device_bytes)
        if nbytes
    )


def _budget(config: LaunchConfig, room: Room, available: int) -> tuple[int, str]:
    """`--ram` in bytes. "auto" leaves the system a share, and the pools never begin so close to the marks of `room`."""
    if config.ram != "auto":
        return parse_size(config.ram), ""
    left = max(int(available * SYSTEM_SHARE), room.high_bytes)
    budget = max(0, available - left)
    return budget, (
        f"ram {format_size(budget)}: {format_size(available)} available ({room}; swap is never counted), less "
        f"{format_size(left)} for everything else there ({SYSTEM_SHARE:.0%}, at least {format_size(room.high_bytes)})"
    )


def _use_note(room: Room, left: int) -> str:
    """A budget that leaves too little is legal, but it will not last."""
    if left >= room.high_bytes:
        return ""
    return (
        f"this leaves {format_size(max(0, left))} of {room}: below {format_size(room.low_bytes)} the expert pools shrink "
        "and new requests wait; a lower --ram is faster than one that comes and goes"
    )


def _num_workers(
    model: ModelSpec, config: LaunchConfig, chunk: int, num_threads: int, budget_bytes: int
) -> tuple[int, str]:
    num_layers = len(model.expert_layers)
    if config.num_workers > num_layers:
        raise ConfigError(f"--workers {config.num_workers} is more than the model's {num_layers} layers with experts")
    if config.num_workers:
        return config.num_workers, ""
    sizes = sizes_for(model, config, 0, chunk, num_threads)
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
        sizes = sizes_for(model, config, ctx_tokens, chunk, num_threads)
        cost = sizes.coordinator_scratch() + sizes.logits() + sizes.worker_scratch(model.expert_layers)
        if cost <= budget_bytes * _AUTO_CHUNK_SHARE:
            break
    chunk = min(chunk, ctx_tokens)
    return chunk, f"prefill chunk {chunk} tokens: a step's scratch takes {format_size(cost)} in coordinator and worker"


def _context(model: ModelSpec, config: LaunchConfig, budget_bytes: int) -> tuple[int, str]:
    if config.ctx > model.max_context:
        raise ConfigError(f"--ctx {config.ctx} is more than the model's context of {model.max_context} tokens")
    if 0 < config.kv_tokens < config.ctx:
        raise ConfigError(
            f"--kv-tokens {config.kv_tokens} is less than --ctx {config.ctx}: no session could have its whole context"
        )
    if config.ctx:
        return config.ctx, ""
    per_token = sizes_for(model, config, 0, 1, 1).kv(BLOCK_TOKENS) / BLOCK_TOKENS
    affordable = int(budget_bytes * _AUTO_CTX_SHARE / per_token) // BLOCK_TOKENS * BLOCK_TOKENS
    most = min(model.max_context, config.kv_tokens or model.max_context)
    chosen = min(most, _AUTO_CTX_TOKENS, max(affordable, _LEAST_AUTO_CTX_TOKENS))
    return chosen, (
        f"ctx {chosen} tokens: KV takes {format_size(per_token)} a token, at most {_AUTO_CTX_SHARE:.0%} of the budget; "
        f"the model's limit is {model.max_context}"
    )


def _threads(config: LaunchConfig) -> tuple[int, str]:
    if config.num_threads:
        return config.num_threads, ""
    count, reason = usable_cores()
    return count, f"threads {count}: {reason}"


# -- pools -------------------------------------------------------------------------------------------------------------


def _demand(experts: ExpertLayer, model: ModelSpec, config: LaunchConfig) -> LayerDemand:
    """What a layer asks of the pool; `--slots` caps it, so that a small pool can be tried in a large memory."""
    floor = top_k(model, experts)
    if 0 < config.slots < floor:
        raise ConfigError(f"--slots {config.slots} is less than the {floor} experts that one token needs in each layer")
    capped = min(experts.num_experts, config.slots or experts.num_experts)
    return LayerDemand(capped, experts.shape.slab_bytes, floor)


def _table_bytes(group: Sequence[LayerDemand], num_slots: int) -> int:
    """What a worker's pool takes beside its slabs."""
    return overhead_bytes(len(group), len({demand.slab_bytes for demand in group}), num_slots)


def _within_shm(draft: _Draft, slab_budget: int, free: int | None) -> tuple[int, str]:
    """The slabs must fit /dev/shm: with "auto" they take what it has, a size that was asked for is refused."""
    most = sum(demand.num_experts * demand.slab_bytes for group in draft.demands for demand in group)
    wanted = min(slab_budget, most) + draft.pool_table_bytes
    if free is None or wanted <= free:
        return slab_budget, ""
    fitting = free - draft.pool_table_bytes
    if draft.config.ram == "auto" and fitting >= draft.floor_bytes:
        return fitting, f"expert pools {format_size(fitting)}: /dev/shm has no more free"
    lower = int((draft.fixed_bytes + free) * (1 + ALLOWANCE))
    cure = f" or lower --ram to {format_size(lower)} ({lower} bytes)" if fitting >= draft.floor_bytes else ""
    raise MemoryPlanError(
        f"the expert pools need {format_size(wanted)} of shared memory, /dev/shm has {format_size(free)} free; "
        f"enlarge it (mount -o remount,size=... /dev/shm; in a container --shm-size){cure}"
    )


def _num_staging(draft: _Draft, slab_budget: int) -> int:
    """Slots of each slab size and worker for reads ahead; none where every expert fits, or only the floor does."""
    wanted = sum(demand.num_experts * demand.slab_bytes for group in draft.demands for demand in group)
    everything = sum(layer.num_experts * layer.shape.slab_bytes for group in draft.groups for layer in group)
    left = slab_budget - draft.num_staging * sum(map(_class_bytes, draft.demands))
    return draft.num_staging if draft.floor_bytes <= left and min(slab_budget, wanted) < everything else 0


def _class_bytes(demands: Sequence[LayerDemand]) -> int:
    """One slab of each size."""
    return sum({demand.slab_bytes for demand in demands})


def _pools(draft: _Draft, slab_budget: int) -> tuple[list[Term], tuple[WorkerShare, ...]]:
    """Share `slab_budget` among the layers of all workers, and staging."""
    num_staging = _num_staging(draft, slab_budget)
    slab_budget -= num_staging * sum(map(_class_bytes, draft.demands))
    slots = list(plan_slots([demand for group in draft.demands for demand in group], slab_budget).num_slots)
    terms, shares = [], []
    for worker_id, (group, demands) in enumerate(zip(draft.groups, draft.demands, strict=True)):
        mine, slots = slots[: len(group)], slots[len(group) :]
        slab_bytes = sum(n * demand.slab_bytes for n, demand in zip(mine, demands, strict=True))
        staging_bytes = num_staging * _class_bytes(demands)
        pool_bytes = slab_bytes + _table_bytes(demands, sum(mine) + num_staging * len({d.slab_bytes for d in demands}))
        floor_bytes = sum(demand.floor * demand.slab_bytes for demand in demands)
        terms.append(Term(f"worker {worker_id}", f"expert pool, {sum(mine)} slots", pool_bytes))
        if num_staging:
            terms.append(Term(f"worker {worker_id}", f"staging for reads ahead, {num_staging} slots", staging_bytes))
        layers = tuple(layer.layer for layer in group)
        nbytes = pool_bytes + staging_bytes, slab_bytes + staging_bytes, floor_bytes
        shares.append(WorkerShare(layers, tuple(mine), *nbytes, num_staging, draft.device_bytes[worker_id]))
    return terms, tuple(shares)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _smallest_budget(draft: _Draft) -> int:
    """The least `--ram` for this run. A larger budget may choose more context, which needs more again, but less each time."""
    budget, needed = -1, 0
    while needed > budget:
        budget = needed
        needed = _draft(draft.model, draft.config, draft.tables, budget).needed_bytes
    return budget


def _too_small(draft: _Draft, budget_bytes: int) -> MemoryPlanError:
    needed = _smallest_budget(draft)
    pools = Term(
        "workers", "expert pools, one token's experts in each layer", draft.floor_bytes + draft.pool_table_bytes
    )
    terms = [*draft.terms, pools]
    terms.append(Term("all", f"allowance, {ALLOWANCE:.0%}", int(sum(term.nbytes for term in terms) * ALLOWANCE) + 2))
    sums = accumulate(term.nbytes for term in terms)
    missing = next(term for term, total in zip(terms, sums, strict=True) if total > budget_bytes)
    asked = format_size(budget_bytes) if draft.config.ram != "auto" else f"auto, here {format_size(budget_bytes)},"
    lines = [f"  {format_size(term.nbytes):>9}  {term.process}: {term.name}" for term in terms]
    return MemoryPlanError(
        f"--ram {asked} is too small, this run needs at least {format_size(needed)} ({needed} bytes); "
        f"what does not fit any more is {missing.name} ({missing.process}), in\n"
        + "\n".join(lines)
        + "\nraise --ram, or lower --ctx, --kv-tokens, --prefill-chunk, --io-threads or --workers"
    )


def _more_than_available(draft: _Draft, budget_bytes: int, room: Room, available: int) -> MemoryPlanError:
    needed = _smallest_budget(draft)
    cure = (
        "lower it"
        if needed <= available
        else "free memory, or lower --ctx, --kv-tokens, --prefill-chunk, --io-threads or --workers"
    )
    return MemoryPlanError(
        f"--ram {format_size(budget_bytes)} is more than the {format_size(available)} that are available ({room}); "
        f"this run needs at least {format_size(needed)} ({needed} bytes): {cure}"
    )


def _check_address_space(
    terms: Sequence[Term], shares: Sequence[WorkerShare], config: LaunchConfig, num_threads: int
) -> None:
    """Under `ulimit -v` a process must be able to map all it will; the coordinator maps all pools, as their creator."""
    limit = address_space_bytes()
    if limit is None:
        return
    pools = sum(share.pool_bytes for share in shares)
    needs = [("coordinator", pools, 8 + num_threads)]
    needs += [(f"worker {idx}", 0, 3 + num_threads + config.io_threads) for idx in range(len(shares))]
    for process, mapped, threads in needs:
        own = sum(term.nbytes for term in terms if term.process == process)
        needed = own + mapped + _ADDRESS_BYTES + threads * _THREAD_ADDRESS_BYTES
        if needed > limit:
            raise MemoryPlanError(
                f"{process} needs {format_size(needed)} of address space, `ulimit -v` (RLIMIT_AS) allows "
                f"{format_size(limit)}; raise it, or lower --ram, --ctx or --io-threads"
            )
