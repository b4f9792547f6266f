"""Counters and gauges, named and labelled as Prometheus wants them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# name: (kind, label or "", help)
METRICS = {
    "kvq_pins": ("gauge", "", "live leases"),
    "kvq_pinned_blocks": ("gauge", "", "blocks retained by leases"),
    "kvq_budget_blocks": ("gauge", "", "blocks that leases may hold"),
    "kvq_programs": ("gauge", "", "programs known"),
    "kvq_expected_blocks": ("gauge", "", "blocks that programs under way are expected to need, for admission"),
    "kvq_memory_price": ("gauge", "", "price of a block, seconds of waiting per block-second"),
    "kvq_guardrail_off": ("gauge", "", "1 while the guardrail has retention switched off"),
    "kvq_pins_total": ("counter", "", "leases granted"),
    "kvq_reuse_total": ("counter", "", "leases a returning program found"),
    "kvq_reused_tokens_total": ("counter", "", "cached tokens of turns that found their lease"),
    "kvq_misses_total": ("counter", "", "returns of programs whose lease had ended, or never was"),
    "kvq_evictions_total": ("counter", "reason", "leases, or parts, given up before they were due"),
    "kvq_evicted_blocks_total": ("counter", "reason", "blocks of those"),
    "kvq_expired_total": ("counter", "", "leases that ran out"),
    "kvq_leaked_total": ("counter", "", "leases the reaper took from requests that never started or ended"),
    "kvq_rejected_total": ("counter", "reason", "finished turns that were not retained"),
    "kvq_ttl_error_seconds_sum": ("counter", "", "sum of |wait - predicted wait| over returns"),
    "kvq_ttl_error_seconds_count": ("counter", "", "returns in that sum"),
    "kvq_pinned_block_seconds_total": ("counter", "", "blocks times seconds held by leases that ended"),
    "kvq_drift_total": ("counter", "", "returns whose prompt left the retained prefix early"),
    "kvq_guardrail_trips_total": ("counter", "", "times the guardrail switched retention off"),
    "kvq_clock_backwards_total": ("counter", "", "readings of the clock that went backwards"),
    "kvq_events_dropped_total": ("counter", "", "events lost to a full buffer or disk"),
}


class Sample(NamedTuple):
    name: str
    kind: str
    label: str
    label_value: str
    value: float


class Metrics:
    """`inc` and `set` for the names above; anything else is a KeyError."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {(n, ""): 0.0 for n, (_, label, _) in METRICS.items() if not label}

    def inc(self, name: str, by: float = 1.0, label: str = "") -> None:
        METRICS[name]
        self._values[name, label] = self._values.get((name, label), 0.0) + by

    def set(self, name: str, value: float) -> None:
        METRICS[name]
        self._values[name, ""] = value

    def get(self, name: str, label: str = "") -> float:
        return self._values.get((name, label), 0.0)

    def collect(self) -> Iterator[Sample]:
        for (name, label_value), value in sorted(self._values.items()):
            kind, label, _ = METRICS[name]
            yield Sample(name, kind, label, label_value, value)
