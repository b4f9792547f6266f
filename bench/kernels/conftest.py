"""Options, fixtures and the printed table of ``pytest bench/kernels``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import measure, peers, report
from bench.kernels.measure import Shape
from bench.kernels.report import GPU, State
from kvq.kernels.timing import capture, in_processes

STATE = pytest.StashKey[State]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvq")
    group.addoption("--kvq-out", metavar="DIR", help="where kernels.json and kernels.csv are written")
    group.addoption(
        "--kvq-shape", metavar="BATCH,CONTEXT,HEADS,KV_HEADS,HEAD_DIM,PAGE", action="append", default=[],
        help="measure this shape instead of the usual ones (repeatable)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STATE] = State()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"shape", "variant"} <= set(metafunc.fixturenames):
        shapes: tuple[Shape, ...] = measure.SHAPES if GPU else measure.SMALL
        if given := metafunc.config.getoption("--kvq-shape"):
            numbers = (map(int, text.split(",")) for text in given)
            shapes = tuple(measure.uniform(batch, context, **_names(rest)) for batch, context, *rest in numbers)
        rows = measure.rows(shapes, small=not GPU)
        metafunc.parametrize(("shape", "variant"), rows, ids=[f"{s}-{v.name}".replace(" ", "_") for s, v in rows])


def _names(rest: list[int]) -> dict[str, int]:
    return dict(zip(("heads", "kv_heads", "head_dim", "page_size"), rest))


@pytest.fixture(scope="session")
def state(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> State:
    """The run's state; on a GPU, kernels are compiled side by side and the read bandwidth is measured first."""
    state = pytestconfig.stash[STATE]
    if GPU:
        params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        rows = [(p["shape"], p["variant"]) for p in params if "variant" in p]
        jobs: list[tuple[Callable[..., None], tuple[Any, ...]]]
        jobs = [(measure.compile_row, job) for job in measure.compile_jobs(rows)]
        jobs += [(peers.compile_peer, job) for job in peers.compile_jobs([shape for shape, _ in rows])]
        in_processes(jobs, max(1, (os.cpu_count() or 1) - 1))
        state.bandwidth = measure.read_bandwidth()
        torch.cuda.empty_cache()
    return state


@pytest.fixture
def time_us(benchmark: Any) -> Callable[[Sequence[Callable[[], Any]]], float]:
    """Median microseconds of one of ``calls``: graph replays on a GPU (measure.CLOCK), one call elsewhere."""

    def run(calls: Sequence[Callable[[], Any]]) -> float:
        if not GPU:
            benchmark.pedantic(calls[0], rounds=3, warmup_rounds=1)
            return benchmark.stats.stats.median * 1e6
        graph, count = capture(calls)
        benchmark.extra_info["calls_a_round"] = count
        benchmark.pedantic(measure.CLOCK.run, args=(graph,), rounds=9, warmup_rounds=1)
        return benchmark.stats.stats.median * 1e6 / count

    return run


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    state = config.stash[STATE]
    if not (state.rows or state.writes or state.prefills):
        return
    report.compare(state.rows)
    terminalreporter.section("kvq kernels")
    for line in report.lines(state):
        terminalreporter.write_line(line)
    if folder := config.getoption("--kvq-out"):
        report.save(Path(folder), state)
