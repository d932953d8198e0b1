"""The plan of a model of which there is only a config.json, for people."""

from rich.console import Console
from rich.table import Table

from colibri_mp.config import format_size
from colibri_mp.config_plan import ConfigPlan, ModelFacts, SizedPlan
from colibri_mp.forecast import FORMULA
from colibri_mp.report import print_plan


def print_config_plan(made: ConfigPlan) -> None:
    """Facts, then the one plan that was asked for, or a line for each size; the smallest size last."""
    console = Console(highlight=False)
    for line in _facts(made.facts, made):
        console.print(line)
    if len(made.sizes) == 1:
        print_plan(made.sizes[0].plan)
    _print_sizes(console, made)
    console.print(f"smallest --ram: {format_size(made.smallest_ram_bytes)} ({made.smallest_ram_bytes} bytes)")


def _facts(facts: ModelFacts, made: ConfigPlan) -> list[str]:
    stored = made.stored
    predicting = beside = ""
    if facts.num_predictors:
        predicting = f" ({facts.num_predictor_experts} of them where further tokens are predicted)"
    if facts.predictor_code_bytes:
        beside = f"; to predict further tokens, {format_size(facts.predictor_code_bytes)} more"
    return [
        f"{facts.model_type}: {facts.num_layers} layers, {facts.num_expert_layers} with experts; "
        f"{facts.num_experts} experts{predicting}; a token uses {facts.experts_per_token}",
        f"stored   experts {stored.experts.describe()}; attention, shared and dense {stored.resident.describe()}; "
        f"embedding and head {stored.ends.describe()}",
        f"expert   {format_size(facts.expert_code_bytes)} of weights and {format_size(facts.expert_extra_bytes)} of scales; "
        f"in memory {format_size(facts.slab_bytes)}",
        f"resident {format_size(facts.resident_code_bytes)} of weights (routers, in bf16, {format_size(facts.router_code_bytes)}) "
        f"and {format_size(facts.resident_extra_bytes)} of scales; in memory {format_size(facts.resident_bytes)}{beside}",
    ]


def _print_sizes(console: Console, made: ConfigPlan) -> None:
    table = Table("--ram", "slots", "held", "ctx", "hits", "missed", "bound by", "tokens/s")
    for size in made.sizes:
        speed = size.forecast
        table.add_row(
            format_size(size.plan.budget_bytes), _slots(size), f"{size.plan.resident_share:.1%}",
            str(size.plan.ctx_tokens), f"{speed.hit_rate:.1%}", format_size(speed.disk_bytes_per_token), speed.bound,
            f"{speed.tokens_per_s:.2f}-{speed.most_tokens_per_s:.2f}",
        )  # fmt: skip
    console.print(table)
    machine = made.machine
    console.print(
        "slots: of each layer with experts; held: experts in memory; missed: bytes that a token reads from disk"
    )
    console.print(
        f"{FORMULA}, with {format_size(machine.disk)}/s and {format_size(machine.memory)}/s; if the two overlapped, at most "
        "as by the slower one"
    )


def _slots(size: SizedPlan) -> str:
    return str(size.least_slots) if size.least_slots == size.most_slots else f"{size.least_slots}-{size.most_slots}"
