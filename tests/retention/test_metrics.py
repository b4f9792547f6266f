from __future__ import annotations

import re
from pathlib import Path

import pytest

from retention.metrics import METRICS, Metrics


def test_counters_add_and_gauges_replace():
    metrics = Metrics()
    metrics.inc("kvq_pins_total")
    metrics.inc("kvq_pins_total", 2)
    metrics.set("kvq_pins", 5)
    metrics.set("kvq_pins", 3)
    metrics.inc("kvq_evictions_total", label="pressure")
    samples = {(s.name, s.label, s.label_value): (s.kind, s.value) for s in metrics.collect()}
    assert samples["kvq_pins_total", "", ""] == ("counter", 3.0)
    assert samples["kvq_pins", "", ""] == ("gauge", 3.0)
    assert samples["kvq_evictions_total", "reason", "pressure"] == ("counter", 1.0)


def test_unlabelled_metrics_are_exported_before_they_happen():
    names = {s.name for s in Metrics().collect()}
    assert names == {name for name, (_, label, _) in METRICS.items() if not label}


def test_a_misspelt_name_is_an_error():
    with pytest.raises(KeyError):
        Metrics().inc("kvq_pin_total")
    with pytest.raises(KeyError):
        Metrics().set("kvq_pin", 1)


def test_every_metric_has_a_prometheus_name_and_is_documented():
    doc = (Path(__file__).parents[2] / "docs" / "retention.md").read_text()
    for name, (kind, _, text) in METRICS.items():
        assert re.fullmatch(r"kvq_[a-z_]+", name) and text
        assert kind in ("counter", "gauge")
        assert f"`{name}`" in doc
