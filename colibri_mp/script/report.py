"""The report of a script: figures of each turn, session and launch, as nested dicts for JSON.

What is shared by sessions that run at the same time cannot be told apart: the cache counters of a turn are those of the whole
cluster while the turn ran. Those of a launch are exact.
"""

from typing import Any

from colibri_mp.script.definition import Script
from colibri_mp.script.figures import Times, cache_between, cache_counts, speed, spread
from colibri_mp.script.launches import Launch
from colibri_mp.script.play import Play, TurnResult


def report(script: Script, launches: list[dict[str, Any]], interrupted: bool) -> dict[str, Any]:
    """The whole report; `launches` are those of `launch_report`."""
    return {
        "script": script.path,
        "name": script.name,
        "seed": script.seed,
        "concurrency": script.concurrency,
        "interrupted": interrupted,
        "failed": sum(launch["total"]["failed"] + launch["total"]["stopped"] for launch in launches),
        "launches": launches,
    }


def launch_report(launch: Launch, transcript_path: str, same_as_first: bool | None) -> dict[str, Any]:
    """Figures of a launch. `same_as_first`: whether its transcript is that of the first launch."""
    memory = launch.after.get("memory") or launch.before.get("memory") or {}
    return {
        "launch": launch.number,
        "error": launch.error or None,
        "start_s": launch.start_s,
        "wall_s": launch.wall_s,
        "total": _total(launch),
        "memory": {name: memory.get(name) for name in ("budget_bytes", "peak_bytes", "by_process")},
        "transcript": transcript_path,
        "same_as_first": same_as_first,
        "sessions": [_session(play) for play in launch.plays],
    }


def _total(launch: Launch) -> dict[str, Any]:
    results = [result for play in launch.plays for result in play.results]
    figures = _figures(results)
    cache = cache_between(launch.before["cache"], launch.after["cache"]) if launch.after else cache_counts()
    states = [play.state for play in launch.plays]
    return {
        "sessions": len(states),
        **{state: states.count(state) for state in ("done", "failed", "stopped")},
        "requests": len([result for result in results if not result.is_skipped]),
        **figures,
        "tok_s": figures["completion_tokens"] / launch.wall_s if launch.wall_s else None,
        "cache": cache,
    }


def _session(play: Play) -> dict[str, Any]:
    caches = [result.stats["cache"] for result in play.results if result.stats]
    return {
        "session": play.session.name,
        "repeat": play.repeat,
        "state": play.state,
        "error": play.error or None,
        **_figures(play.results),
        "cache": cache_counts(*caches),
        "turns": [_turn(result) for result in play.results],
    }


def _figures(results: list[TurnResult]) -> dict[str, Any]:
    """What is counted alike of a session and of a launch."""
    times = [result.times for result in results if result.times is not None]
    first_s = [one.first_s for one in times if one.first_s is not None]
    return {
        "prompt_tokens": _sum(results, "prompt_tokens"),
        "cached_tokens": _sum(results, "cached_tokens"),
        "completion_tokens": sum(len(result.token_ids) for result in results),
        "ttft_s": spread(first_s, 50, 99),
        "decode_tok_s": speed(times),
        "inter_token_s": spread([gap for one in times for gap in one.gaps_s], 50, 99),
        "refused": sum(one.num_refused for one in times),
    }


def _sum(results: list[TurnResult], name: str) -> int:
    return sum(result.stats.get(name, 0) for result in results)


def _turn(result: TurnResult) -> dict[str, Any]:
    if result.is_skipped:
        return {"turn": result.turn, "skipped": True}
    times, stats = result.times or Times(0.0), result.stats
    return {
        "turn": result.turn,
        "finish_reason": result.finish_reason or None,
        "error": result.error or None,
        "prompt_tokens": stats.get("prompt_tokens"),
        "cached_tokens": stats.get("cached_tokens"),
        "completion_tokens": len(result.token_ids),
        "queue_s": stats.get("queue_s"),
        "ttft_s": times.first_s,
        "decode_tok_s": speed([times]),
        "cache": cache_counts(stats["cache"]) if stats else None,
    }
