"""The simulation as a table for people."""

from rich import box
from rich.console import Console
from rich.table import Table

from colibri_mp.config import format_size
from colibri_mp.simulate.grid import AsRun, Cell, Simulation
from colibri_mp.simulate.prediction import FORMULA, Costs
from colibri_mp.trace import Trace


def print_simulation(trace: Trace, simulation: Simulation) -> None:
    """The run as it was, the costs, and a row for each memory size and policy."""
    console = Console(highlight=False)
    header, as_run = trace.header, simulation.as_run
    console.print(
        f"trace    {header.model_type}, {len(header.layers)} layers of {header.layers[0].num_experts} experts, "
        f"top {header.top_k}; {header.started}, --ram {format_size(header.budget_bytes)}\n"
        f"as run   {_describe_run(as_run)}\n"
        f"costs    {_describe_costs(simulation.costs)}\n"
        f"         {FORMULA}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("memory", "pools", "experts", "policy", "hit rate", "decode", "read/token", "tokens/s"):
        table.add_column(name, justify="left" if name in ("memory", "policy") else "right", no_wrap=True)
    size = ""
    for cell in simulation.cells:
        if size and cell.size != size:
            table.add_section()
        table.add_row(*_place(cell, is_new=cell.size != size), cell.policy, *_figures(cell))
        size = cell.size
    console.print(table)
    for line in (*(f"{name}: {refusal}" for name, refusal in simulation.refused), *simulation.notes):
        console.print(line, soft_wrap=True)


def _describe_run(as_run: AsRun) -> str:
    asked = as_run.measured_hits + as_run.measured_misses
    agreement = (
        "the simulation agrees in every step"
        if as_run.is_exact
        else f"NOT so in the simulation: {as_run.simulated_misses} misses, {as_run.simulated_evictions} evictions"
    )
    speed = f", {as_run.decode_tok_s:.1f} tokens/s" if as_run.decode_tok_s else ""
    return (
        f"{as_run.resident_share:.1%} of the experts in memory: {as_run.measured_hits} of {asked} hit, "
        f"{as_run.measured_evictions} evictions ({agreement}); {as_run.decode_tokens} tokens of decode{speed}"
    )


def _describe_costs(costs: Costs) -> str:
    disk = (
        f"latency {costs.latency_s * 1e6:.0f} us, bandwidth {format_size(costs.bandwidth)}/s ({costs.num_reads} reads)"
        if costs.bandwidth
        else "the disk is not known"
    )
    return f"busy {costs.busy_s * 1e3:.2f} ms, {disk}"


def _place(cell: Cell, is_new: bool) -> tuple[str, str, str]:
    """The memory size, in its first row only."""
    return (cell.size, format_size(cell.pool_bytes), f"{cell.resident_share:.1%}") if is_new else ("", "", "")


def _figures(cell: Cell) -> tuple[str, ...]:
    read, speed, rate = cell.decode_bytes_per_token, cell.tokens_per_s, cell.decode_hit_rate
    return (
        f"{cell.hit_rate:.1%}",
        "-" if rate is None else f"{rate:.1%}",
        "-" if read is None else format_size(read),
        "-" if speed is None else f"{speed:.1f}",
    )
