"""kvq's numbers in Prometheus' format, and the HTTP server that shows them."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from bench.top import totals  # noqa: E402
from integration import exporter  # noqa: E402
from retention.metrics import METRICS  # noqa: E402

NUMBERS: dict[str, Any] = {
    "kvq_enabled": 1.0,
    "kvq_pins": 3.0,
    "kvq_reuse_total": 5.0,
    "kvq_evictions_total": {"reason=pressure": 2.0, "reason=budget": 1.0},
    "kvq_ttl_error_seconds_sum": 7.5,
    "kvq_ttl_error_seconds_count": 4.0,
}


class Connection:
    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    def call(self, op: str) -> dict[str, Any]:
        self.asked += 1
        if self.error:
            raise self.error
        return NUMBERS if op == "metrics" else {"programs": [{"program": "a"}]}

    async def acall(self, op: str) -> dict[str, Any]:
        return self.call(op)


def text_of(snapshot: exporter.Snapshot) -> str:
    registry = prometheus_client.CollectorRegistry()
    registry.register(exporter.Collector(snapshot))
    return prometheus_client.generate_latest(registry).decode()


def test_every_metric_has_its_type_and_value():
    snapshot = exporter.Snapshot(Connection(), programs=False)
    assert text_of(snapshot) == ""  # nothing is known yet
    snapshot.refresh()
    page = text_of(snapshot).splitlines()
    for line in (
        "# TYPE kvq_pins gauge",
        "kvq_pins 3.0",
        "# TYPE kvq_reuse_total counter",
        "kvq_reuse_total 5.0",
        'kvq_evictions_total{reason="pressure"} 2.0',
        'kvq_evictions_total{reason="budget"} 1.0',
        "# TYPE kvq_ttl_error_seconds summary",
        "kvq_ttl_error_seconds_sum 7.5",
        "kvq_ttl_error_seconds_count 4.0",
        "kvq_misses_total 0.0",
        "kvq_enabled 1.0",
        "kvq_faults_total 0.0",
    ):
        assert line in page
    shown = {line.split()[2] for line in page if line.startswith("# TYPE")}
    missing = {name for name in METRICS if name not in shown and name.rpartition("_")[0] not in shown}
    assert not missing


def test_the_engine_is_asked_at_most_once_an_interval_and_old_numbers_stay(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(exporter.time, "monotonic", lambda: now[0])
    connection = Connection()
    snapshot = exporter.Snapshot(connection, programs=True)
    for _ in range(5):
        snapshot.refresh()
    assert connection.asked == 2  # metrics and programs
    connection.error = RuntimeError("engine is gone")
    now[0] += 2.0
    snapshot.refresh()
    assert snapshot.metrics == NUMBERS and snapshot.programs == [{"program": "a"}] and snapshot.age_s == 2.0
    asked = connection.asked
    now[0] += 2.0
    snapshot.refresh()
    assert connection.asked == asked  # an engine that does not answer is left alone for a minute


def test_an_asynchronous_engine_is_polled_in_its_loop():
    snapshot = exporter.Snapshot(Connection(), programs=False)
    snapshot.poll()  # no loop runs: nothing happens
    assert snapshot.metrics == {}

    async def serve() -> None:
        snapshot.poll()
        snapshot.poll()
        await asyncio.sleep(0.01)
        assert snapshot.metrics == NUMBERS
        snapshot.close()
        await asyncio.sleep(0.01)

    asyncio.run(serve())


def test_an_engine_that_is_stepped_by_hand_is_asked_while_it_steps(monkeypatch):
    pytest.importorskip("vllm")
    connection = Connection()
    monkeypatch.setattr("integration.client.connect", lambda engine: connection)
    monkeypatch.setattr(exporter, "REFRESH_S", 0.0)
    engine = SimpleNamespace(step=lambda: "stepped")
    step = engine.step
    served = exporter.serve(engine, port=0)
    try:
        assert totals(_get(f"{served.url}/metrics").splitlines())["kvq_evictions_total"] == 3
        assert json.loads(_get(f"{served.url}/programs"))["programs"] == [{"program": "a"}]
        asked = connection.asked
        assert engine.step() == "stepped" and connection.asked > asked
        with pytest.raises(urllib.error.HTTPError):
            _get(f"{served.url}/else")
    finally:
        served.close()
    assert getattr(engine, "step", step) is step


def test_the_dashboard_shows_metrics_that_exist():
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-kvq.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    known = set(METRICS) | {"kvq_enabled", "kvq_faults_total"}
    named = {word for word in queries.replace("(", " ").replace("{", " ").split() if word.startswith("kvq_")}
    assert named and named <= known
    for name in (
        "kvq_pins",
        "kvq_pinned_blocks",
        "kvq_reuse_total",
        "kvq_evictions_total",
        "kvq_ttl_error_seconds_sum",
    ):
        assert name in named
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.read().decode()
