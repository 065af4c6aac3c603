"""Prometheus metrics: what `/metrics` exposes. Names and units are listed in docs/metrics.md, made from
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import luce_core
from luce_core.contracts import GenerationChannel, RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

GAUGES = {
    "running": ("luce_running_requests", "Requests that are being prefilled or decoded"),
    "waiting": ("luce_waiting_requests", "Requests that wait for a slot or for memory"),
    "alive": ("luce_engine_up", "1 while the engine answers"),
    "cache_used_blocks": ("luce_cache_used_blocks", "Cache blocks that sequences hold"),
    "cache_cached_blocks": ("luce_cache_cached_blocks", "Cache blocks kept for prefixes to come"),
    "cache_free_blocks": ("luce_cache_free_blocks", "Cache blocks without content"),
    "cache_cached_bytes": ("luce_cache_cached_bytes", "Bytes kept for prefixes to come"),
    "cache_swap_bytes": ("luce_cache_swap_bytes", "Host memory that holds state of sequences that gave way"),
}
COUNTERS = {
    "steps": ("luce_steps", "Steps of the engine"),
    "preempted": ("luce_preemptions", "Sequences that gave their memory back and were queued again"),
    "retained": ("luce_retained_sequences", "Those of them whose state was kept until they came back"),
    "late": ("luce_late_requests", "Requests whose deadline passed"),
    "restarts": ("luce_engine_restarts", "Times the engine was started again"),
    "failed_steps": ("luce_failed_steps", "Steps that raised"),
    "cache_evictions": ("luce_cache_evictions", "Cached blocks and snapshots that were dropped"),
}


class EngineCollector:
    """Reads the channel when somebody scrapes; the engine does nothing for it."""

    def __init__(self, channel: GenerationChannel) -> None:
        self.channel = channel

    def collect(self) -> Iterator[Metric]:
        """One family per figure the engine gives; one that is being started gives few."""
        stats = self.channel.stats()
        for key, (name, text) in GAUGES.items():
            if key in stats:
                yield GaugeMetricFamily(name, text, value=stats[key])
        for key, (name, text) in COUNTERS.items():
            if key in stats:
                yield CounterMetricFamily(name, text, value=stats[key])


class Metrics:
    """The metrics of one server. `observe` is an observer of finished requests."""

    def __init__(self, channel: GenerationChannel, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(channel))

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, text, registry=self.registry, buckets=buckets)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.requests = counter("luce_requests", "Finished requests", ("api", "reason"))
        self.prompt_tokens = counter("luce_prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("luce_cached_tokens", "Tokens of prompts that came from the cache")
        self.completion_tokens = counter("luce_completion_tokens", "Tokens of answers")
        self.drafted = counter("luce_drafted_tokens", "Candidate tokens that were verified")
        self.accepted = counter("luce_accepted_tokens", "Candidate tokens that became text")
        self.queue = histogram("luce_queue_seconds", "From arrival to admission")
        self.ttft = histogram("luce_time_to_first_token_seconds", "From arrival to the first token")
        self.prefill = histogram("luce_prefill_seconds", "From admission to the first token")
        self.token = histogram("luce_token_seconds", "Mean time between tokens of an answer", TOKEN_SECONDS)
        info = GaugeMetricFamily("luce_info", "Always 1", labels=("model", "version"))
        info.add_metric((model, luce_core.__version__), 1)
        self.registry.register(_Fixed(info))

    def observe(self, record: RequestRecord) -> None:
        """Count a finished request."""
        usage, timings = record.done.usage, record.done.timings
        self.requests.labels(record.api, record.done.reason).inc()
        self.prompt_tokens.inc(usage["prompt_tokens"])
        self.cached_tokens.inc(usage["cached_tokens"])
        self.completion_tokens.inc(usage["completion_tokens"])
        self.drafted.inc(usage["drafted_tokens"])
        self.accepted.inc(usage["accepted_tokens"])
        self.queue.observe(timings["queue_ms"] / 1e3)
        if usage["completion_tokens"]:
            self.ttft.observe(timings["ttft_ms"] / 1e3)
            self.prefill.observe(timings["prefill_ms"] / 1e3)
        if usage["completion_tokens"] > 1:
            self.token.observe(timings["decode_ms"] / 1e3 / (usage["completion_tokens"] - 1))

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)


class _Fixed:
    """A family that never changes."""

    def __init__(self, family: Metric) -> None:
        self.family = family

    def collect(self) -> Iterator[Metric]:
        yield self.family


def families() -> list[tuple[str, str, str]]:
    """(name, type, help) of everything `/metrics` exposes, for the docs."""

    class Silent:
        def stats(self) -> Mapping[str, float]:
            return dict.fromkeys((*GAUGES, *COUNTERS), 0.0)

    registry = Metrics(cast("GenerationChannel", Silent()), "model").registry
    return sorted(
        (family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation)
        for family in registry.collect()
    )
