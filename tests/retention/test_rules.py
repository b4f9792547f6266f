from __future__ import annotations

import math

import pytest

from retention.cost import PrefillCost
from retention.pins import Lease
from retention.policy import make_policy
from retention.programs import Program, ProgramKey
from retention.rules import RULES, TRTLLM, Continuum, Fixed, Rule, Value
from retention.toolcalls import ToolCall
from retention.ttl import Survival

BASH, READ = ToolCall("bash"), ToolCall("read")


def lease(name="p", tokens=1600, blocks=100, calls=(BASH,), at=0.0, **kw):
    return Lease(ProgramKey(name), tokens=tokens, blocks=blocks, calls=calls, finished_at=at, **kw)


def linear(seconds_per_token):
    return PrefillCost(prior=(0.0, seconds_per_token, 0.0))


def test_lru_retains_nothing_and_serves_in_order_of_arrival():
    rule = RULES["lru"]()
    assert rule.ttl(lease(), 0.0) == 0.0
    assert rule.order(None, False, 1.0) < rule.order(Program(ProgramKey("a"), 0.0), True, 2.0)


def test_fixed_keeps_every_turn_as_long():
    rule = Fixed(ttl_s=3.0)
    assert rule.ttl(lease(calls=()), 0.0) == rule.ttl(lease(calls=None), 0.0) == 3.0


def test_ema_learns_from_returns_only():
    rule = RULES["ema"](ttl_s=2.0, alpha=1.0, safety=1.5, off=["read"])
    assert rule.ttl(lease(), 0.0) == 2.0
    rule.predictor.observe([BASH], 4.0)
    assert rule.ttl(lease(), 0.0) == 6.0
    assert rule.ttl(lease(calls=(READ,)), 0.0) == 0.0


def test_continuum_cold_start_by_hand():
    # Exp(1 s): argmax of (1 - e^-t) B - t is ln B; B is the prefill alone, 5 s.
    rule = Continuum()
    rule.cost = linear(5.0 / 1600)
    assert rule.ttl(lease(), 0.0) == pytest.approx(math.log(5.0))
    rule.cost = linear(0.9 / 1600)
    assert rule.ttl(lease(), 0.0) == 0.0


def test_continuum_maximises_its_published_gain():
    rule = Continuum(samples=4)
    rule.cost = linear(10.0 / 1600)
    for seconds in (1.0, 2.0, 3.0, 4.0, 20.0):
        rule.returned([BASH], seconds)
    # F * 10 - tau: 0.2*10-1 = 1, 4-2 = 2, 6-3 = 3, 8-4 = 4, 10-20 = -10.
    assert rule.ttl(lease(), 0.0) == 4.0
    assert rule.ttl(lease(calls=(READ,)), 0.0) == 4.0  # unknown tool: all tools
    assert rule.ttl(lease(calls=()), 0.0) == 0.0
    # T = 15 and eta = 1: benefit 25, 0.2*25 = 5-1, ..., 25-20 = 5 < 20-4 = 16
    rule.queued(10.0, retained=False)
    rule.queued(20.0, retained=False)
    rule.queued(99.0, retained=True)
    assert rule.ttl(lease(), 0.0) == 4.0
    rule.queued(300.0, retained=False)  # T = 110, benefit 120: 120-20 = 100 > 96-4 = 92
    assert rule.ttl(lease(), 0.0) == 20.0


def test_continuum_eta_is_the_negative_correlation_of_turns_done_and_left():
    rule = Continuum()
    assert rule.eta == 1.0
    rule.ended(3)  # (1, 2), (2, 1), (3, 0): perfectly anti-correlated
    assert rule.eta == pytest.approx(1.0)
    rule.ended(1)  # (1, 0)
    xs, ys = [1, 2, 3, 1], [2, 1, 0, 0]
    mx, my = sum(xs) / 4, sum(ys) / 4
    cov = sum((x - mx) * (y - my) for x, y in zip(xs, ys))
    corr = cov / math.sqrt(sum((x - mx) ** 2 for x in xs) * sum((y - my) ** 2 for y in ys))
    assert rule.eta == pytest.approx(-corr)


def test_continuum_by_hand_with_queueing_eta_and_a_quadratic_reload():
    rule = Continuum(samples=3)
    rule.cost = PrefillCost(prior=(2e-6, 1e-3, 0.5))  # 1000 tokens: 2 + 1 + 0.5 = 3.5 s
    for seconds in (1.0, 1.0, 4.0, 8.0):
        rule.returned([BASH], seconds)
    for seconds in (2.0, 6.0):  # T = 4
        rule.queued(seconds, retained=False)
    rule.ended(2)  # (1, 1), (2, 0)
    rule.ended(2)
    rule.ended(4)  # (1, 3), (2, 2), (3, 1), (4, 0)
    # n = 8, sum k = 16, sum N-k = 8, kk = 40, yy = 16, ky = 12: (8*12 - 16*8) / sqrt((320-256) * (128-64)) = -0.5
    assert rule.eta == pytest.approx(0.5)
    # B = 4 * 0.5 + 3.5 = 5.5: F(1) B - 1 = 1.75, F(4) B - 4 = 0.125, F(8) B - 8 = -2.5
    assert rule.ttl(lease(tokens=1000), 0.0) == 1.0
    # 3000 tokens reload in 18 + 3 + 0.5 = 21.5 s, B = 23.5: 10.75, 13.625, 15.5
    assert rule.ttl(lease(tokens=3000), 0.0) == 8.0


def test_continuum_keeps_nothing_when_the_order_of_turns_makes_waiting_pay():
    """eta may be negative: programs that have done more turns have more left. Then queueing speaks against a pin."""
    rule = Continuum(samples=1)
    rule.cost = linear(3.0 / 1600)
    for seconds in (1.0, 1.0):
        rule.returned([BASH], seconds)
    assert rule.ttl(lease(), 0.0) == 1.0  # 3 - 1
    rule.queued(10.0, retained=False)
    rule._sums = [2.0, 3.0, 3.0, 5.0, 5.0, 5.0]  # (1, 1), (2, 2): correlation 1
    assert rule.eta == -1.0
    assert rule.ttl(lease(), 0.0) == 0.0  # B = -10 + 3


def test_continuum_gives_up_the_latest_program_and_serves_the_earliest_retained_one():
    rule = Continuum()
    old, new = lease(first_arrival=1.0), lease(first_arrival=2.0)
    assert rule.rank(new, 5.0) < rule.rank(old, 5.0)
    first, second = Program(ProgramKey("a"), 1.0), Program(ProgramKey("b"), 2.0)
    queue = [rule.order(p, r, 9.0) for p, r in ((second, False), (first, False), (second, True), (None, False))]
    assert sorted(queue) == [queue[2], queue[1], queue[0], queue[3]]


def test_continuum_memory_is_bounded():
    rule = Continuum(window=50)
    for i in range(1000):
        rule.returned([ToolCall(f"t{i}")], float(i))
        rule.returned([BASH], float(i))
        rule.queued(1.0, retained=False)
    assert len(rule._tools) <= 50 and len(rule._all.ordered) == 50 and len(rule._waits) == 50
    assert rule._all.ordered == sorted(rule._all.ordered) and rule._all.ordered[-1] == 999.0


def test_trtllm_drains_the_lowest_level_and_lru_inside_it():
    rule = TRTLLM(priority=70, duration_s=5.0)
    assert rule.ttl(lease(), 0.0) == 5.0
    assert rule.ttl(lease(calls=()), 0.0) == 0.0  # everyone's level
    assert rule.ttl(lease(calls=(), priority=36 / 35), 0.0) == 5.0
    low, high, early = lease(priority=40 / 35), lease(priority=90 / 35), lease(priority=90 / 35)
    low.created, high.created, early.created = 1.0, 9.0, 3.0
    assert sorted([high, low, early], key=lambda x: rule.rank(x, 10.0)) == [low, early, high]


def value_rule(waits, seconds_per_token=1e-3):
    rule = Value(slack=1.0)
    rule.cost = linear(seconds_per_token)
    rule.predictor.curve = lambda calls: Survival.fit([(w, True) for w in waits])
    return rule


def test_value_ttl_by_hand():
    rule = value_rule([1.0, 2.0, 10.0])
    item = lease(tokens=2000, blocks=100)  # saves 2 s
    assert rule.ttl(item, 0.0) == 10.0  # memory is free
    # Four wait: 5 * 2 = 10 s saved. Price 0.01 * 100 blocks = 1 a second.
    # P: 1/4, 1/2, 3/4; held: 1, 1.75, 5.75. gains 1.5, 3.25, 1.75.
    rule.price.per_block, rule.price.weight = 0.01, 5.0
    assert rule.ttl(item, 0.0) == 2.0
    rule.price.per_block = 0.03  # 2.5 - 3, 5 - 5.25, 7.5 - 17.25
    assert rule.ttl(item, 0.0) == 0.0
    assert rule.ttl(lease(tokens=2000, blocks=100, priority=2.0), 0.0) == 2.0  # 5 - 3, 10 - 5.25, 15 - 17.25


def test_value_keeps_its_slack_when_it_decides_again():
    """A tool that always takes 1 s has 1.1 s, also when the lease is looked at again at 1 s."""
    rule = value_rule([1.0] * 8)
    rule._slack = 1.1
    rule.price.per_block, rule.price.weight = 0.01, 5.0
    item = lease(tokens=2000, blocks=100)
    for now in (0.0, 0.5, 1.0, 1.05):
        assert now + rule.ttl(item, now) == pytest.approx(1.1)
    assert rule.ttl(item, 1.2) == 0.0


@pytest.mark.parametrize("wait", [10.0, 95.0, 100.0])
def test_value_keeps_a_long_wait_to_the_bound(wait):
    """Memory is free, the wait is below max_ttl_s: whenever it is looked at, the lease lasts as long as was said."""
    rule = value_rule([wait] * 8)
    rule._slack, rule._max_ttl_s = 1.1, 100.0
    end = min(100.0, 1.1 * wait)
    for now in (0.0, 0.5 * wait, 0.9 * wait, wait - 1e-6):
        assert now + rule.ttl(lease(), now) == pytest.approx(end)


def test_value_decides_again_while_the_tool_runs():
    rule = value_rule([1.0, 2.0, 10.0])
    rule.price.per_block, rule.price.weight = 0.01, 5.0
    item = lease(tokens=2000, blocks=100)
    assert rule.ttl(item, 0.0) == 2.0
    assert rule.ttl(item, 2.5) == 0.0  # half of the rest returns in 7.5 s: 5 - 7.5
    assert rule.ttl(item, 6.0) == 4.0  # and now in 4: 5 - 4
    assert rule.ttl(item, 11.0) == 0.0


def test_value_density_by_hand():
    rule = value_rule([1.0, 2.0, 10.0])
    item = lease(tokens=2000, blocks=100)
    item.deadline = 2.0
    # P = 1/2, saved 2 s, held 1.75 s on average, 100 blocks
    assert rule.rank(item, 0.0) == pytest.approx((0.5 * 2.0 / (100 * 1.75),))
    assert rule.rank(item, 2.0) == (0.0,)


def test_value_density_by_hand_with_shared_blocks_priority_and_a_tool_that_runs():
    rule = Value()
    rule.cost = PrefillCost(prior=(1e-6, 1e-3, 0.7))  # d is paid anyway
    rule.predictor.curve = lambda calls: Survival([1.0, 2.0, 10.0], [0.25, 0.5, 0.75])
    item = lease(tokens=2000, blocks=100, shared=25, priority=2.0)
    item.deadline = 10.0
    # 500 tokens are shared: 4 + 2 - (0.25 + 0.5) = 5.25 s saved, 75 blocks charged.
    # E[min(D, 10)] = 1 + 0.75 + 0.5 * 8 = 5.75
    assert rule.rank(item, 0.0) == pytest.approx((0.75 * 5.25 * 2 / 75 / 5.75,))
    # After 4 s: P = (0.75 - 0.5) / 0.5, held 6 s in any case
    assert rule.rank(item, 4.0) == pytest.approx((0.5 * 5.25 * 2 / 75 / 6.0,))
    # Its program waits: nothing to hope for and nothing to hold, 5.25 s for 75 blocks
    item.waiting = 1
    assert rule.rank(item, 4.0) == pytest.approx((5.25 * 2 / 75,))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"tokens": 2000}, {"tokens": 1000}),
        ({"blocks": 50}, {"blocks": 100}),
        ({"priority": 2.0}, {"priority": 1.0}),
        ({"shared": 0, "tokens": 1600}, {"shared": 50, "tokens": 800}),
    ],
)
def test_value_density_grows_with_what_is_saved_and_falls_with_what_is_held(better, worse):
    rule = value_rule([1.0, 2.0])
    a, b = lease(**better), lease(**worse)
    a.deadline = b.deadline = 2.0
    assert rule.rank(a, 0.0) > rule.rank(b, 0.0)


def test_value_prefers_the_tool_that_returns_soon():
    rule = Value()
    for _ in range(10):
        rule.predictor.observe([READ], 0.1)
        rule.predictor.observe([BASH], 60.0)
    soon, late = lease(calls=(READ,)), lease(calls=(BASH,))
    for item in (soon, late):
        item.deadline = rule.ttl(item, 0.0)
    assert rule.rank(soon, 0.0) > rule.rank(late, 0.0)


def test_value_ttl_is_bounded_over_the_whole_wait():
    rule = value_rule([50.0, 5000.0])
    rule._max_ttl_s = 100.0
    assert rule.ttl(lease(), 0.0) == 50.0
    assert rule.ttl(lease(), 99.0) == 0.0


def test_the_base_rule_has_all_hooks():
    rule = Rule()
    rule.returned(None, 1.0)
    rule.queued(1.0, False)
    rule.ended(3)
    assert rule.ttl(lease(), 0.0) == 0.0


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("value", {"max_ttl_s": -1.0}),
        ("value", {"slack": 0.5}),
        ("value", {"hold_s": math.inf}),
        ("value", {"ahead_s": -1.0}),
        ("trtllm", {"priority": 101}),
        ("trtllm", {"duration_s": -1.0}),
        ("continuum", {"samples": 0}),
        ("fixed", {"ttl_s": -1.0}),
        ("ema", {"alpha": 2.0}),
    ],
)
def test_bad_settings_are_refused(name, bad):
    with pytest.raises(ValueError, match="must be"):
        RULES[name](**bad)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fixed", {"ttl_s": "x"}),
        ("fixed", {"ttl_s": math.nan}),
        ("fixed", {"ttl_s": True}),
        ("fixed", {"ttl_s": 10**400}),
        ("value", {"max_ttl_s": "600"}),
        ("value", {"overcommit": None}),
        ("value", {"window": 2.5}),
        ("value", {"samples": True}),
        ("trtllm", {"duration_s": math.inf}),
        ("continuum", {"samples": 20.0}),
        ("ema", {"off": "bash"}),
        ("ema", {"off": [1]}),
    ],
)
def test_settings_of_wrong_type_are_refused_at_once(name, bad):
    (setting,) = bad
    with pytest.raises(ValueError, match=f"^{setting} must be "):
        make_policy(name, total_blocks=100, **bad)


def test_settings_that_json_can_write_are_taken():
    make_policy("ema", total_blocks=100, off=["bash"], ttl_s=2, alpha=0.5)
    make_policy("value", total_blocks=100, max_ttl_s=600, overcommit=0)
