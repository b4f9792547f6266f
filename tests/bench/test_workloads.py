"""Workloads: lengths, reuse and tool times of synthetic and recorded programs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bench.workloads import (
    BASH_LOCAL,
    BLOCK_SIZE,
    HUMAN,
    READ_LOCAL,
    THINK,
    Synthetic,
    agent_traces,
    azure_requests,
    chain,
    claude_code_traces,
    closed_loop,
    draw_tool,
    plain_requests,
    poisson,
    redraw_tools,
    repeat,
)


@pytest.mark.parametrize(
    ("times", "median", "p95"), [(BASH_LOCAL, 6.51, 13.5), (READ_LOCAL, 0.013, 0.044), (THINK, 9.0, 139.0)]
)
def test_drawn_tool_times_have_the_measured_quantiles(times, median, p95):
    rng = random.Random(0)
    drawn = sorted(times.sample(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(median, rel=0.1)
    assert drawn[19_000] == pytest.approx(p95, rel=0.1)


def test_every_tool_of_a_mix_is_drawn():
    rng = random.Random(0)
    mix = ((0.5, "a", READ_LOCAL), (0.5, "b", READ_LOCAL))
    assert {draw_tool(mix, rng)[0] for _ in range(100)} == {"a", "b"}


def test_a_synthetic_prompt_extends_the_last_one():
    workload = Synthetic(programs=5, turns=(6,)).build(0)
    for program in workload.programs:
        assert len(program.turns) == 6
        for turn, after in pairwise(program.turns):
            assert after.prompt_tokens > turn.prompt_tokens + turn.output_tokens
            assert len(turn.blocks) == (turn.prompt_tokens + turn.output_tokens) // BLOCK_SIZE
            assert list(after.blocks[: len(turn.blocks)]) == list(turn.blocks)
            assert turn.tool is not None and turn.tool_seconds > 0
        assert program.turns[-1].tool is None


def test_agents_share_the_system_prompt_and_nothing_else():
    a, b = Synthetic(programs=2, system_tokens=640).build(0).programs
    same = [x == y for x, y in zip(a.turns[0].blocks, b.turns[0].blocks)]
    assert same == [True] * 10 + [False] * (len(same) - 10)


def test_a_workload_without_reuse_shares_no_block_between_turns():
    program = Synthetic(programs=1, turns=(4,), reuse=0.0, system_tokens=0).build(0).programs[0]
    blocks = [set(turn.blocks) for turn in program.turns]
    assert all(not a & b for a, b in pairwise(blocks))


def test_tool_frequency_0_waits_for_people_only():
    workload = Synthetic(programs=3, tool_frequency=0.0).build(0)
    assert {t.tool for p in workload.programs for t in p.turns[:-1]} == {HUMAN}


def test_the_seed_decides_everything():
    def key(seed):
        turns = [t for p in Synthetic(programs=10).build(seed).programs for t in p.turns]
        return [(t.prompt_tokens, t.tool_seconds, tuple(t.blocks)) for t in turns]

    assert key(1) == key(1) != key(2)


@pytest.mark.parametrize("bad", [{"tools": "cooking"}, {"tool_frequency": 1.5}, {"reuse": -0.1}])
def test_bad_parameters_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Synthetic(**bad)


def test_chained_blocks_differ_after_the_first_different_token():
    tokens = list(range(5 * BLOCK_SIZE))
    other = [*tokens[: 2 * BLOCK_SIZE], -1, *tokens[2 * BLOCK_SIZE + 1 :]]
    assert [a == b for a, b in zip(chain(tokens), chain(other))] == [True, True, False, False, False]
    assert len(chain(tokens[:-1])) == 4


def test_copies_of_a_program_do_not_share_blocks_but_keep_their_own_reuse():
    programs = Synthetic(programs=1, turns=(3,)).build(0).programs
    a, b = repeat(programs, 2)
    assert not set(a.turns[-1].blocks) & set(b.turns[-1].blocks)
    assert a.turns[1].blocks[: len(a.turns[0].blocks)] == a.turns[0].blocks


def test_arrivals_are_ordered_at_the_asked_rate():
    programs = poisson(Synthetic(programs=400, turns=(1,)).build(0).programs, rate=2.0)
    times = [p.arrival for p in programs]
    assert times == sorted(times) and times[-1] == pytest.approx(200, rel=0.2)
    fillers = plain_requests(400, rate=4.0)
    assert fillers[-1].arrival == pytest.approx(100, rel=0.2) and not any(p.agent for p in fillers)


def test_a_closed_loop_starts_within_the_ramp():
    workload = closed_loop("x", Synthetic(programs=10).build(0).programs, 4, ramp=5.0, seed=0)
    assert workload.concurrency == 4
    assert all(0 <= p.arrival <= 5 for p in workload.programs[:4])


def test_redrawn_tools_scale_and_leave_the_last_turn_alone():
    programs = Synthetic(programs=3).build(0).programs
    short, long = (redraw_tools(programs, "coding", scale, 1) for scale in (1.0, 10.0))
    for a, b in zip(short, long):
        assert [t.tool_seconds * 10 for t in a.turns] == pytest.approx([t.tool_seconds for t in b.turns])
        assert a.turns[-1].tool is None


# Recorded data.


def split_words(text):
    return [hash(word) % 50_000 for word in text.split(" ")]


def test_miniswe_keeps_its_prefix_and_magagent_mostly_does_not(shared_data):
    def kept(name):
        shares = []
        for program in agent_traces(shared_data / "agent-traces" / name, split_words):
            for turn, after in pairwise(program.turns):
                same = sum(a == b for a, b in zip(turn.blocks, after.blocks))
                shares.append(same / max(1, len(turn.blocks)))
        return sorted(shares)[len(shares) // 10]

    assert kept("miniswe") == 1.0
    assert kept("magagent") == 0.0


def test_claude_code_traces_have_their_recorded_lengths_and_waits(shared_data):
    programs = claude_code_traces(shared_data / "claude-code-traces")
    assert len(programs) > 20
    for program in programs:
        assert all(len(t.blocks) <= t.prompt_tokens // BLOCK_SIZE for t in program.turns)
        assert program.turns[-1].tool is None
    assert {t.tool for p in programs for t in p.turns} == {HUMAN, "tool", None}


def test_azure_arrivals_have_the_asked_mean_rate(shared_data):
    requests = azure_requests(shared_data / "azure-llm" / "AzureLLMInferenceTrace_code.csv", 500, rate=5.0)
    assert len(requests) == 500 and requests[-1].arrival == pytest.approx(100.0)
    assert requests == azure_requests(shared_data / "azure-llm" / "AzureLLMInferenceTrace_code.csv", 500, rate=5.0)


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="jsonl"):
        agent_traces(tmp_path, split_words)
    with pytest.raises(FileNotFoundError, match="json"):
        claude_code_traces(tmp_path)
