"""Memory sizes to simulate: what the planner would give each traced layer for `--ram`, or a number of slots outright."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_mp.checkpoint.hub import resolve
from colibri_mp.checkpoint.source import Checkpoint
from colibri_mp.config import LaunchConfig, format_size, from_keywords, parse_size
from colibri_mp.errors import ConfigError, MemoryPlanError, TraceError
from colibri_mp.trace import TraceHeader


@dataclass(frozen=True)
class Size:
    """Slots of each traced layer, in the order of the trace. `refusal`: the planner says that it cannot run, and why."""

    name: str
    num_slots: tuple[int, ...]
    ram_bytes: int | None = None
    refusal: str = ""


def sizes_by_slots(header: TraceHeader, counts: Sequence[int]) -> list[Size]:
    """The same number of slots in every layer, at most its experts."""
    least = max(layer.floor for layer in header.layers)
    for count in counts:
        if count < least:
            raise ConfigError(f"--slots {count} is less than the {least} experts that one token needs in each layer")
    return [Size(f"{count} slots", tuple(min(count, layer.num_experts) for layer in header.layers)) for count in counts]


def default_sizes(header: TraceHeader) -> list[Size]:
    """One token's experts, and an eighth, a quarter, a half, three quarters and all of them."""
    floor = max(layer.floor for layer in header.layers)
    largest = max(layer.num_experts for layer in header.layers)
    counts = {floor, *(max(floor, largest * eighths // 8) for eighths in (1, 2, 4, 6, 8))}
    return sizes_by_slots(header, sorted(counts))


def sizes_by_memory(header: TraceHeader, budgets: Sequence[str], model: str) -> list[Size]:
    """What a launch with the traced settings would make of each `--ram`, on a machine that has that much.

    `model`: where the checkpoint is now; "" for where it was. A budget that is refused gives a size that says so.

    Raises:
        ConfigError: not a size, or not the checkpoint of the trace.
    """
    wanted = [parse_size(budget) for budget in budgets]
    checkpoint = _checkpoint(header, model)
    return [_planned(header, checkpoint, ram_bytes) for ram_bytes in wanted]


def _checkpoint(header: TraceHeader, model: str) -> Checkpoint:
    if not model and not Path(header.model).exists():
        raise ConfigError(
            f"the checkpoint of the trace, {header.model}, is not there: give --model, or --slots for --ram"
        )
    checkpoint = Checkpoint.open(resolve(model or header.model))
    if checkpoint.fingerprint != header.fingerprint:
        raise ConfigError(
            f"{checkpoint.path} is not the checkpoint of the trace ({header.model}), or has changed since"
        )
    return checkpoint


def _planned(header: TraceHeader, checkpoint: Checkpoint, ram_bytes: int) -> Size:
    # Here, since the planner asks the kernels for their sizes, and importing these takes half a second.
    from colibri_mp.limits import Room
    from colibri_mp.lossy import with_lossy_options
    from colibri_mp.models import load_model
    from colibri_mp.plan_terms import table_bytes
    from colibri_mp.planner import make_plan

    try:
        settings = {**header.settings, "ram": ram_bytes, "slots": 0, "trace": ""}
        config = from_keywords(LaunchConfig, settings)
        model = with_lossy_options(load_model(checkpoint, predicts=config.draft > 0), config)
        plan = make_plan(model, config, Room("a machine", ram_bytes, ram_bytes), table_bytes(checkpoint))
    except MemoryPlanError as error:
        return Size(format_size(ram_bytes), (), ram_bytes, str(error).splitlines()[0].rstrip(":"))
    except ConfigError as error:
        raise TraceError(f"the settings of the traced run do not suit this program: {error}") from error
    by_layer = {
        layer: count for share in plan.workers for layer, count in zip(share.layers, share.num_slots, strict=True)
    }
    return Size(format_size(ram_bytes), tuple(by_layer[layer.layer] for layer in header.layers), ram_bytes)
