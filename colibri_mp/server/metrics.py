"""What /metrics says, in Prometheus' text format: counted here, and the cluster's own figures as they were last heard."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from colibri_mp.server.view import View

_FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_NEXT_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/health")


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        named: dict[str, Any] = {"namespace": "colibri", "registry": self._registry}
        self._requests = Counter("http_requests", "Requests by endpoint and outcome", ["endpoint", "outcome"], **named)
        self._prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **named)
        self._cached_tokens = Counter(
            "cached_prompt_tokens", "Tokens of prompts that had been computed before", **named
        )
        self._new_tokens = Counter("generated_tokens", "Tokens generated", **named)
        self._first = Histogram(
            "time_to_first_token_seconds", "From request to first token", buckets=_FIRST_TOKEN_S, **named
        )
        self._next = Histogram("inter_token_seconds", "From token to token", buckets=_NEXT_TOKEN_S, **named)

    def watch(self, view: Callable[[], View], num_turns: Callable[[], int]) -> None:
        """Show the cluster's figures too."""
        self._registry.register(_ClusterFigures(view, num_turns))

    def request(self, path: str, outcome: str) -> None:
        """A request has ended."""
        self._requests.labels(path if path in _ENDPOINTS else "other", outcome).inc()

    def first_token(self, seconds: float) -> None:
        """An answer has begun."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """An answer has gone on."""
        self._next.observe(seconds)

    def finished(self, stats: dict[str, Any]) -> None:
        """An answer has ended."""
        self._prompt_tokens.inc(stats["prompt_tokens"])
        self._cached_tokens.inc(stats.get("cached_tokens", 0))
        self._new_tokens.inc(stats["completion_tokens"])

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _ClusterFigures(Collector):
    def __init__(self, view: Callable[[], View], num_turns: Callable[[], int]) -> None:
        self._view = view
        self._num_turns = num_turns

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        states = GaugeMetricFamily("colibri_state", "1 for the state that the cluster is in", labels=["state"])
        states.add_metric([view.state], 1)
        yield states
        yield _gauge("http_requests_in_flight", "Requests under way", self._num_turns())
        if view.status:
            yield from _figures(view.status)


def _figures(status: dict[str, Any]) -> Iterator[Metric]:
    requests, cache, memory = status["requests"], status["cache"], status["memory"]
    yield _gauge("sequences_running", "Sequences that are computed", requests["running_sequences"])
    yield _gauge("sequences_waiting", "Sequences that wait for KV memory", requests["waiting_sequences"])
    yield _gauge("kv_blocks", "Blocks of KV memory", requests["kv_blocks"])
    yield _gauge("kv_blocks_free", "Free blocks of KV memory", requests["kv_blocks_free"])
    yield _count("engine_steps", "Steps computed", status["progress"]["steps"])
    yield _count("engine_tokens", "Rows computed", status["progress"]["tokens"])
    yield _count("expert_hits", "Experts found in memory", cache["hits"])
    yield _count("expert_misses", "Experts read when they were needed", cache["misses"])
    yield _count("expert_promoted", "Experts read ahead", cache["promoted"])
    yield _count("expert_read_bytes", "Bytes read of experts", cache["bytes_read"])
    yield _gauge("expert_hit_ratio", "Share of experts found in memory", cache["hit_rate"])
    if drafting := status.get("drafting"):
        yield _count("drafted_tokens", "Tokens guessed and computed", drafting["proposed_tokens"])
        yield _count("accepted_tokens", "Tokens guessed right", drafting["accepted_tokens"])
        yield _gauge("drafting_saved_seconds", "Time that guessing has saved, below 0: lost", drafting["saved_s"])
    yield _gauge("memory_budget_bytes", "Memory that everything may take", memory["budget_bytes"])
    yield _gauge("memory_used_bytes", "Memory that everything takes", memory["used_bytes"])
    yield _gauge("memory_peak_bytes", "Most memory that everything has taken", memory["peak_bytes"])
    yield _by_process(memory["by_process"])
    yield _gauge("pool_bytes", "Size of the expert pools", sum(worker["pool_bytes"] for worker in status["workers"]))
    yield _gauge(
        "pool_used_bytes", "Bytes of the pools in use", sum(worker["pool_used_bytes"] for worker in status["workers"])
    )


def _by_process(readings: dict[str, int]) -> Metric:
    family = GaugeMetricFamily("colibri_process_memory_bytes", "Memory of each process", labels=["process"])
    for process, num_bytes in readings.items():
        family.add_metric([process], num_bytes)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"colibri_{name}", text, value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"colibri_{name}", text, value)
