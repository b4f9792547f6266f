"""The agents demo and the engine study, driven with an engine that only counts."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench import agents_demo, engine_study


class Characters:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


SHAPE = agents_demo.Shape(agents=3, turns=3, first_prompt=4000, tool_result=80, output=2, pause=4, others=2)


class Engine:
    """Finishes the oldest request at each step. The prompt of a program that was seen before is cached."""

    def __init__(self) -> None:
        self.queue: list[tuple[str, Any, Any]] = []
        self.order: list[str] = []
        self.seen: dict[str, list[int]] = {}

    def add_request(self, request_id: str, prompt: Any, sampling: Any) -> None:
        self.queue.append((request_id, prompt["prompt_token_ids"], sampling))

    def has_unfinished_requests(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[Any]:
        request_id, prompt, sampling = self.queue.pop(0)
        self.order.append(request_id)
        program = (sampling.extra_args or {}).get("kvq_program_id")
        before = self.seen.get(program, [])
        assert prompt[: len(before)] == before  # each prompt continues the last one and its output
        output = [7] * sampling.max_tokens
        if program:
            self.seen[program] = prompt + output
        answer = SimpleNamespace(token_ids=output)
        return [
            SimpleNamespace(
                request_id=request_id, finished=True, outputs=[answer], num_cached_tokens=len(before) or None
            )
        ]


def play(name: str) -> tuple[agents_demo.Outcome, Engine]:
    engine = Engine()
    agents, others = agents_demo.material(Characters(), SHAPE)
    told: list[None] = []
    outcome = agents_demo.play(
        SimpleNamespace(llm_engine=engine), name, agents, others, SHAPE, lambda: told.append(None)
    )
    assert len(told) == SHAPE.agents * SHAPE.turns
    return outcome, engine


def test_agents_have_prompts_of_their_own_and_of_the_size_that_was_asked_for():
    agents, others = agents_demo.material(Characters(), SHAPE)
    assert [len(agent.prompt) for agent in agents] == [SHAPE.first_prompt] * 3
    assert all(len(result) == SHAPE.tool_result for agent in agents for result in agent.results)
    first, second = next(others), next(others)
    assert len(first) == SHAPE.other_prompt and first[:40] != second[:40]


def test_every_agent_has_its_turns_and_the_order_does_not_depend_on_time():
    pytest.importorskip("vllm")
    outcome, engine = play("one")
    assert sorted((turn.agent, turn.turn) for turn in outcome.turns) == [
        (f"agent-{a}", t) for a in (1, 2, 3) for t in range(3)
    ]
    assert len(outcome.returns) == 6 and all(turn.cached_tokens for turn in outcome.returns)
    # Between two turns of an agent, at least `pause` requests of others end.
    places = [engine.order.index(f"agent-1.{turn}") for turn in range(3)]
    for start, end in pairwise(places):
        assert sum(name.startswith("other") for name in engine.order[start:end]) >= SHAPE.pause
    assert play("two")[1].order == engine.order


def test_the_table_names_both_ways_and_counts_equal_answers():
    pytest.importorskip("vllm")
    outcomes = [play("stock")[0], play("kept")[0]]
    outcomes[1].counters = {
        "kvq_pins_total": 6.0,
        "kvq_reuse_total": 6.0,
        "kvq_evictions_total": {"reason=pressure": 2.0},
    }
    row = agents_demo.summary(outcomes[1])
    assert (row["pins"], row["reuses"], row["evictions"]) == (6, 6, 2)
    assert row["prefill_tokens"] == 6 * SHAPE.tool_result
    out = StringIO()
    agents_demo.print_table(outcomes, SHAPE, Console(file=out, width=80))
    text = out.getvalue()
    assert "stock" in text and "kept" in text and "6, 6, 2" in text and "9 of 9" in text and "…" not in text


def test_quantiles_are_values_that_were_seen():
    assert agents_demo.quantile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert agents_demo.quantile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert agents_demo.quantile([5.0], 0.5) == 5.0


def test_requests_that_still_wait_when_a_cell_is_cut_count_with_their_wait():
    turns = [
        engine_study.Turn(0, 0, 100, due=0.0, first_token=0.5, finished=1.0),
        engine_study.Turn(0, 1, 200, due=2.0, first_token=2.25, finished=2.5, cached_tokens=150),
        engine_study.Turn(1, 1, 200, due=4.0),
    ]
    row = engine_study.summarize(turns, seconds=10.0)
    back = row["return"]
    assert (back["requests"], back["finished"], back["cut"]) == (2, 1, 1)
    assert (back["p50_s"], back["p95_s"], back["cached"]) == (0.25, 6.0, 0.375)
    assert row["first"]["p95_s"] == 0.5 and row["started_agents"] == 2
    assert engine_study.summarize([], 1.0)["return"]["p95_s"] is None
    assert "cut 1" in engine_study.line({"scenario": "agents", "arm": "prefix", "rate": 4.0, **row})


def test_every_cell_of_a_scenario_is_measured_once():
    engine = SimpleNamespace(settings=engine_study.SMALL)
    names = [name for name, _ in engine_study.cells(engine, "all")]
    rates = len(engine_study.SMALL.windows)
    assert len(names) == len(set(names)) == 4 + 1 + 3 * rates
    assert [name for name, _ in engine_study.cells(engine, "overhead")] == ["overhead"]
