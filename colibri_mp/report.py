"""Plan and status as tables for people."""

from typing import Any

from rich.console import Console
from rich.table import Table

from colibri_mp.config import format_size
from colibri_mp.planner import Plan

_NUM_SLOWEST = 3


def print_plan(plan: Plan) -> None:
    """The terms of a plan, and what they buy."""
    table = Table(title=f"memory plan for {format_size(plan.budget_bytes)}", title_justify="left")
    table.add_column("process")
    table.add_column("for")
    table.add_column("bytes", justify="right")
    for term in sorted(plan.terms, key=lambda term: term.process):
        table.add_row(term.process, term.name, format_size(term.nbytes))
    table.add_section()
    table.add_row("sum", "", format_size(plan.planned_bytes))
    console = Console()
    console.print(table)
    console.print(
        f"experts in memory: {plan.resident_share:.1%}, slabs of {format_size(plan.expert_bytes)}", highlight=False
    )
    for note in plan.notes:
        console.print(note, highlight=False)


def _digest(phases: dict[str, Any]) -> str:
    """Where the time of the steps went, in which layers, and how many experts were needed for it."""
    if not phases["steps"]:
        return "time     no step yet"
    total_s = phases["total_s"]
    shares = sorted(phases["seconds"].items(), key=lambda phase: -phase[1])
    slowest = sorted(phases["layers"], key=lambda layer: -layer["total_s"])[:_NUM_SLOWEST]
    unions = ", ".join(f"{_rows(entry)}: {entry['mean']:.1f}" for entry in phases["unions"])
    return (
        f"time     {total_s:.1f} s in {phases['steps']} steps: "
        + ", ".join(f"{name.replace('_', ' ')} {seconds / total_s:.0%}" for name, seconds in shares)
        + "\n         slowest layers: "
        + ", ".join(f"{layer['layer']} ({layer['total_s'] / total_s:.1%})" for layer in slowest)
        + f"\nexperts  {phases['experts_per_token']:.2f} a token; distinct ones of a layer, by rows of a step: {unions}"
    )


def _rows(entry: dict[str, Any]) -> str:
    least, most = entry["least_rows"], entry["most_rows"]
    return str(least) if least == most else f"{least}-{most}"


def _reads_ahead(tiers: dict[str, Any]) -> str:
    """Pins, and what was read before it was asked for; "" if there is neither."""
    lines = []
    if tiers["pins"]:
        refusal = f" (not more: {tiers['lock_refusal']})" if tiers["lock_refusal"] else ""
        lines.append(
            f"pins     {tiers['pins']} experts, {format_size(tiers['locked_bytes'])} locked in memory{refusal}"
        )
    reads, lookahead = tiers["reads_ahead"], tiers["lookahead"]
    if reads["issued"]:
        state = "on" if lookahead["is_on"] else "off: it does not pay here"
        lines.append(
            f"ahead    {reads['issued']} experts read ahead, {reads['promoted']} of them asked for ({reads['late']} while still "
            f"being read), {format_size(reads['wasted_bytes'])} for nothing; now {state}"
        )
    return "\n".join(lines)


def _drafting(drafting: dict[str, Any] | None) -> str:
    """What guessing tokens has brought; "" if none were guessed."""
    if not drafting or not drafting["steps"]:
        return ""
    paid = "saved" if drafting["saved_s"] >= 0 else "lost"
    return (
        f"guesses  {drafting['accepted_tokens']} of {drafting['proposed_tokens']} tokens guessed by {drafting['source']} were right, "
        f"{drafting['accepted_per_step']:.2f} a step; a row costs {drafting['row_cost']:.2f} of a token, "
        f"{paid} {abs(drafting['saved_s']):.1f} s"
    )


def print_status(stats: dict[str, Any]) -> None:
    """What `status` shows without `--json`."""
    model, cache, memory, requests = stats["model"], stats["cache"], stats["memory"], stats["requests"]
    for_what = f" for {requests['waiting_for']}" if requests["waiting_for"] else ""
    console = Console(highlight=False)
    console.print(
        f"cluster {stats['name']!r} (pid {stats['pid']}) is {stats['state']}, up {stats['uptime_s']:.0f} s\n"
        f"model    {model['path']} ({model['model_type']}, {model['num_layers']} layers)\n"
        f"requests {requests['active']} active, {requests['waiting']} waiting{for_what}; "
        f"{requests['kv_blocks_free']} of {requests['kv_blocks']} KV blocks free\n"
        f"cache    {cache['hit_rate']:.1%} of {cache['hits'] + cache['misses'] + cache['promoted']:.0f} experts from memory, "
        f"{format_size(cache['bytes_read'])} read\n"
        f"memory   {format_size(memory['used_bytes'])} used, {format_size(memory['peak_bytes'])} at most, "
        f"of {format_size(memory['budget_bytes'])}\n"
        f"{_digest(stats['phases'])}"
    )
    if ahead := _reads_ahead(stats["tiers"]):
        console.print(ahead)
    if guesses := _drafting(stats["drafting"]):
        console.print(guesses)
    if stats["lossy"]:
        console.print(f"lossy    {', '.join(stats['lossy'])}")
    pressure = memory["pressure"]
    if not pressure["admits_requests"] or pressure["slab_limit_bytes"] < pressure["slab_full_bytes"]:
        requests_now = "are admitted" if pressure["admits_requests"] else "wait"
        console.print(
            f"pressure expert pools kept within {format_size(pressure['slab_limit_bytes'])} of "
            f"{format_size(pressure['slab_full_bytes'])}, new requests {requests_now}: {pressure['changes'][-1]['reason']}"
        )
    table = Table("worker", "pid", "layers", "slots", "hits", "misses", "read")
    for worker in stats["workers"]:
        table.add_row(
            str(worker["worker_id"]), str(worker["pid"]), worker["layers"], str(worker["num_slots"]),
            str(worker["hits"]), str(worker["misses"]), format_size(worker["bytes_read"]),
        )  # fmt: skip
    console.print(table)
