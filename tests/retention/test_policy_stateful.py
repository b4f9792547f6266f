"""Event orders nobody thought of: the pool's invariants hold after each."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from retention import POLICIES, ProgramKey, ToolCall

CALLS = [(), None, (ToolCall("bash", "ls"),), (ToolCall("read"), ToolCall("bash", "make")), (ToolCall("AskUser"),)]
PROGRAMS = [None, *(ProgramKey(name, tenant) for name in "ab" for tenant in ("", "t"))]


def machine(engine_type, name, seed_settings):
    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.engine = engine_type(name, blocks=24, **seed_settings)
            self.count = 0
            self.chains = {}

        def fresh(self, n):
            self.count += n
            return [("fresh", i) for i in range(self.count - n, self.count)]

        @rule(
            program=st.sampled_from(PROGRAMS),
            new=st.integers(1, 8),
            keep=st.integers(0, 30),
            ttl=st.none() | st.floats(0, 50),
            release=st.booleans(),
            pending=st.booleans(),
            again=st.booleans(),
        )
        def arrive(self, program, new, keep, ttl, release, pending, again):
            contents = [*self.chains.get(program, [("system", 0), ("system", 1)])[:keep], *self.fresh(new)][:20]
            request = f"r{self.count}"
            if again and self.engine.waiting:
                request = next(iter(self.engine.waiting))  # the same request id once more
            self.engine.arrive(request, contents, program, ttl_s=ttl, release=release, tool_pending=pending)
            self.chains[program] = contents

        @rule()
        def step(self):
            self.engine.step()

        @rule(seconds=st.floats(-5, 100))
        def advance(self, seconds):
            self.engine.advance(seconds)  # sometimes backwards

        @precondition(lambda self: self.engine.running)
        @rule(data=st.data(), blocks=st.integers(1, 4))
        def decode(self, data, blocks):
            request = data.draw(st.sampled_from(sorted(self.engine.running)))
            self.engine.grow(request, self.fresh(blocks))

        @precondition(lambda self: self.engine.running)
        @rule(
            data=st.data(),
            calls=st.sampled_from(CALLS),
            how=st.sampled_from(["stop", "length", "abort", "error"]),
            keep=st.none() | st.integers(0, 400),
        )
        def finish(self, data, calls, how, keep):
            request = data.draw(st.sampled_from(sorted(self.engine.running)))
            self.engine.finish(request, calls, how, keep_tokens=keep, prefill_s=0.1)

        @precondition(lambda self: self.engine.running or self.engine.waiting)
        @rule(data=st.data())
        def abort(self, data):
            request = data.draw(st.sampled_from(sorted([*self.engine.running, *self.engine.waiting])))
            self.engine.abort(request)

        @rule(program=st.sampled_from(PROGRAMS[1:]), calls=st.sampled_from(CALLS[2:]))
        def tool_called(self, program, calls):
            self.engine.apply(self.engine.policy.tool_called(program, calls))

        @rule(program=st.sampled_from(PROGRAMS[1:]))
        def release(self, program):
            self.engine.apply(self.engine.policy.release(program))

        @rule()
        def reset(self):
            self.engine.apply(self.engine.policy.reset())

        @rule(request=st.sampled_from(["never seen", ""]))
        def strangers(self, request):
            self.engine.policy.aborted(request)
            assert self.engine.policy.turn_started(request, 0) == ()

        @invariant()
        def books_balance(self):
            self.engine.check()

        def teardown(self):
            """Every lease ends, and nothing is left of requests that ended."""
            for request in [*self.engine.running, *self.engine.waiting]:
                self.engine.abort(request)
            for _ in range(20):
                self.engine.advance(3600.0)
                self.engine.step()
            self.engine.check()
            assert not self.engine.leases and len(self.engine.free) == self.engine.total
            assert not self.engine.policy._requests
            assert len(self.engine.policy._programs) == 0
            assert not self.engine.policy.rule.admission or not self.engine.policy.rule.admission._charges

    return Machine


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_pool_invariants_hold_for_any_order_of_events(name, hard, engine):
    extra = {"hard": hard, "tenant_quota": 0.6, "budget": 0.7} if hard else {}
    run_state_machine_as_test(
        machine(engine.type, name, extra),
        settings=settings(
            max_examples=20,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_leaks_in_a_long_day(name, engine):
    """24 hours, 300 programs of random lives, aborts, bursts: at the end all blocks are free and no book has grown."""
    e = engine(name, blocks=400)
    rng = random.Random(5)
    alive, serial, sizes = {}, 0, []
    for minute in range(24 * 60):
        e.now = 60.0 * minute
        for _ in range(rng.choice([0, 0, 1, 3])):
            serial += 1
            alive[f"p{serial}"] = [(serial, i) for i in range(rng.randrange(5, 40))]
        for program in rng.sample(sorted(alive), min(len(alive), rng.randrange(4))):
            e.advance(rng.random() * 10)
            request = f"{program}/{minute}"
            chain = alive[program]
            e.arrive(request, chain, program)
            if rng.random() < 0.05:
                e.abort(request)
                continue
            e.step()
            if request not in e.running:
                e.abort(request)
                continue
            chain += [(program, len(chain) + i) for i in range(rng.randrange(1, 6))]
            e.grow(request, chain[len(e.running[request][1]) :])
            if rng.random() < 0.05 or request not in e.running:
                e.abort(request)
            else:
                e.finish(request, [(), (ToolCall("bash"),), (ToolCall(f"t{serial}", f"a{minute}"),)][rng.randrange(3)])
            if rng.random() < 0.2:
                del alive[program]
                if rng.random() < 0.5:
                    e.apply(e.policy.release(ProgramKey(program)))
        e.step()
        if minute % 60 == 0:
            e.check()
            policy = e.policy
            sizes.append((len(policy._programs), len(policy.rule.predictor._windows), len(policy.pins._ranks._entries)))
    assert serial > 1000
    assert max(s[0] for s in sizes[12:]) < 4 * max(s[0] for s in sizes[2:12])
    assert max(s[1] for s in sizes) <= e.policy.rule.predictor.max_keys
    assert max(s[2] for s in sizes) <= 2 * e.total + 64
    e.now += 7200.0
    for _ in range(200):
        e.advance(60.0)
        e.step()
    assert not e.leases and len(e.free) == e.total
    assert not e.policy.rule.admission or not e.policy.rule.admission._charges
    assert len(e.policy._programs) == 0 and not e.policy._requests
