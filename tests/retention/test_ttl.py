"""Formulas of the predictor against values worked out by hand."""

from __future__ import annotations

import json
import math
import random

import pytest

from retention.toolcalls import ToolCall
from retention.ttl import PRIORS, Survival, TTLPredictor

BASH, READ = ToolCall("bash"), ToolCall("read")


def test_kaplan_meier_by_hand():
    # 3 returns at 1, 2, 4 and one wait censored at 3, plus the imaginary one that never ends: at risk 5, 4, 3, 2.
    # S(1) = 4/5, S(2) = 4/5 * 3/4 = 3/5, censored at 3 leaves 2 at risk, S(4) = 3/5 * 1/2 = 3/10.
    curve = Survival.fit([(1.0, True), (3.0, False), (4.0, True), (2.0, True)])
    assert curve.times == (1.0, 2.0, 4.0)
    assert curve.cdf == pytest.approx((1 / 5, 2 / 5, 7 / 10))
    # E[min(D, t)] is the area under S: 1; 1 + 4/5; 1 + 4/5 + 2 * 3/5.
    assert curve.held == pytest.approx((1.0, 1.8, 3.0))


def test_ties_count_returns_before_censoring():
    # Two returns and one censored at 2: at risk 4, S(2) = 2/4.
    curve = Survival.fit([(2.0, False), (2.0, True), (2.0, True)])
    assert curve.cdf == pytest.approx((0.5,))


def test_residual_life_conditions_on_the_time_already_waited():
    curve = Survival.fit([(1.0, True), (2.0, True), (4.0, True)])  # S = 3/4, 2/4, 1/4
    p, held = curve.within(2.0, elapsed=2.0)
    assert p == pytest.approx((3 / 4 - 2 / 4) / (2 / 4))
    assert held == pytest.approx(2.0)
    assert curve.within(1.0, elapsed=5.0) == pytest.approx((0.0, 1.0))


def test_best_ttl_by_hand():
    # S = 3/4 after 1, 1/2 after 2, 1/4 after 10. benefit 8, rate 1:
    # gain(1) = 2 - 1 = 1; gain(2) = 4 - (1 + 3/4) = 2.25; gain(10) = 6 - (1.75 + 8/2) = 0.25.
    curve = Survival.fit([(1.0, True), (2.0, True), (10.0, True)])
    assert curve.best_ttl(8.0, 1.0) == pytest.approx((2.0, 2.25))
    # Nothing to pay for memory: as long as anyone may return.
    assert curve.best_ttl(8.0, 0.0) == pytest.approx((10.0, 6.0))
    # Too dear for any return.
    assert curve.best_ttl(1.0, 1.0) == (0.0, 0.0)
    # 3 seconds on, half of what is left returns at 10, 7 s away: (1/4)/(1/2) * 16 - 7 = 1.
    assert curve.best_ttl(16.0, 1.0, elapsed=3.0) == pytest.approx((7.0, 1.0))
    assert curve.best_ttl(16.0, 1.0, elapsed=3.0, cap=6.0) == (0.0, 0.0)


def test_best_ttl_is_the_maximum_over_all_times():
    rng = random.Random(0)
    for _ in range(20):
        waits = [(rng.expovariate(0.2), rng.random() < 0.8) for _ in range(40)]
        curve = Survival.fit(waits)
        benefit, rate, elapsed = rng.uniform(1, 20), rng.uniform(0, 2), rng.uniform(0, 5)
        ttl, gain = curve.best_ttl(benefit, rate, elapsed)

        def value(t, curve=curve, benefit=benefit, rate=rate, elapsed=elapsed):
            p, held = curve.within(t, elapsed)
            return p * benefit - rate * held

        assert gain == pytest.approx(max([0.0, *(value(i / 100) for i in range(4000))]), abs=0.05)
        assert gain == pytest.approx(value(ttl + 1e-9), abs=1e-6)


def test_censored_waits_lower_the_chance_of_return():
    returns_only, with_lost = TTLPredictor(), TTLPredictor()
    for i in range(20):
        returns_only.observe([BASH], 1.0 + i / 10)
        with_lost.observe([BASH], 1.0 + i / 10)
        with_lost.censor([BASH], 60.0)
    p_all, _ = returns_only.curve([BASH]).within(60.0)
    p_half, _ = with_lost.curve([BASH]).within(60.0)
    assert p_all == pytest.approx(20 / 21)
    assert p_half == pytest.approx(20 / 41)


def test_a_tool_that_never_returns_is_not_kept():
    predictor = TTLPredictor()
    for _ in range(10):
        predictor.censor([BASH], 300.0)
    assert predictor.ttl([BASH], benefit=100.0) == 0.0


def test_a_censored_wait_is_completed_by_its_return():
    predictor = TTLPredictor(min_samples=1)
    record = predictor.censor([BASH], 5.0)
    assert predictor.curve([BASH]).times == ()
    predictor.observe([BASH], 7.0, record)
    assert predictor.curve([BASH]).times == (7.0,)
    assert predictor.curve([BASH]).cdf == (0.5,)  # one wait and the imaginary one, not two and the imaginary one


def test_back_off_from_arguments_to_prior():
    predictor = TTLPredictor(min_samples=4)
    pytest_call, ls_call, edit_call = ToolCall("bash", "pytest"), ToolCall("bash", "ls"), ToolCall("edit")
    assert predictor.curve([pytest_call]) is PRIORS["tool"]
    for _ in range(4):
        predictor.observe([pytest_call], 30.0)
    assert predictor.curve([pytest_call]).times == (30.0,)
    assert predictor.curve([ls_call]).times == (30.0,)  # bash as a whole
    assert predictor.curve([ToolCall("run_shell")]).times == (30.0,)  # its kind
    assert predictor.curve([edit_call]).times == (30.0,)  # all tools
    for _ in range(4):
        predictor.observe([ls_call], 0.1)
    assert predictor.curve([pytest_call]).times == (30.0,)
    assert predictor.curve([ls_call]).times == (0.1,)
    assert predictor.curve([BASH]).times == (0.1, 30.0)


def test_waits_on_a_person_have_their_own_class():
    predictor = TTLPredictor(min_samples=4)
    for _ in range(50):
        predictor.observe([READ], 0.01)
    for calls in ((), [ToolCall("AskUserQuestion")]):
        assert predictor.curve(calls) is PRIORS["person"]
    for _ in range(4):
        predictor.observe((), 300.0)
    assert predictor.curve(()).times == (300.0,)
    assert predictor.curve([READ]).times == (0.01,)
    assert predictor.curve([ToolCall("edit")]).times == (0.01,)


def test_parallel_calls_take_as_long_as_the_slowest():
    predictor = TTLPredictor(min_samples=3)
    for seconds in (1.0, 2.0, 3.0):
        predictor.observe([READ], seconds)
        predictor.observe([BASH], 10 * seconds)
    # F = F_read * F_bash; every one of bash's steps comes after all of read's (3/4).
    curve = predictor.curve([READ, BASH])
    assert curve.at(5.0)[0] == 0.0
    assert curve.at(10.0)[0] == pytest.approx(3 / 4 * 1 / 4)
    assert curve.at(30.0)[0] == pytest.approx(3 / 4 * 3 / 4)
    for _ in range(3):
        predictor.observe([BASH, READ], 12.0)  # known together now, in whatever order
    assert predictor.curve([READ, BASH]).times == (12.0,)
    assert predictor.curve([BASH]).times == (10.0, 20.0, 30.0)


def test_a_tool_that_gets_slower_is_relearned():
    predictor = TTLPredictor(window=32)
    for _ in range(100):
        predictor.observe([BASH], 1.0)
    for _ in range(40):
        predictor.observe([BASH], 9.0)
    assert predictor.curve([BASH]).median() == 9.0


def test_fixed_mode():
    predictor = TTLPredictor("fixed", fixed_s=2.0, off=["slow"])
    predictor.observe([BASH], 50.0)
    assert predictor.ttl([BASH]) == 2.0
    assert predictor.ttl([BASH], elapsed=1.5) == 0.5
    assert predictor.ttl([ToolCall("slow")]) == 0.0


def test_ema_mode_by_hand():
    predictor = TTLPredictor("ema", fixed_s=2.0, alpha=0.5, safety=2.0)
    assert predictor.ttl([BASH]) == 2.0
    predictor.observe([BASH], 4.0)
    predictor.observe([BASH], 8.0)  # 4 + 0.5 * (8 - 4) = 6
    assert predictor.ttl([BASH]) == 12.0
    assert predictor.ttl([BASH, READ]) == 12.0
    assert predictor.ttl([BASH], cap=10.0) == 10.0
    assert predictor.ttl(()) == 2.0


def test_what_was_learned_survives_a_restart():
    predictor = TTLPredictor()
    rng = random.Random(1)
    for _ in range(60):
        predictor.observe([ToolCall("bash", rng.choice(["ls", "make"]))], rng.expovariate(1.0))
        predictor.censor([READ], rng.random())
    again = TTLPredictor()
    again.load(json.loads(json.dumps(predictor.state())))
    assert again.state() == predictor.state()
    restored = Survival.fit([(s, bool(returned)) for s, returned in predictor.state()["waits"]["call:bash:ls"]])
    assert again.curve([ToolCall("bash", "ls")]).cdf == restored.cdf


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 2}, {"version": 1, "waits": {"tool:x": [[-1, 1]]}, "means": {}}, {"version": 1, "waits": 3}, []],
)
def test_a_foreign_state_is_refused(state):
    predictor = TTLPredictor()
    predictor.observe([BASH], 1.0)
    before = predictor.state()
    with pytest.raises(ValueError, match=r"TTLPredictor\.state"):
        predictor.load(state)
    assert predictor.state() == before


def test_memory_is_bounded_however_many_tools_there_are():
    predictor = TTLPredictor(window=16, max_keys=50)
    for i in range(5000):
        predictor.observe([ToolCall(f"tool{i}", f"arg{i}")], 1.0)
    state = predictor.state()
    assert len(state["waits"]) <= 50 and len(state["means"]) <= 50
    assert max(len(w) for w in state["waits"].values()) <= 16


@pytest.mark.parametrize(
    "bad",
    [{"mode": "best"}, {"alpha": 0.0}, {"fixed_s": -1.0}, {"fixed_s": math.nan}, {"safety": math.inf}, {"window": 0}],
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TTLPredictor(**bad)


def test_unknown_and_negative_waits_are_harmless():
    predictor = TTLPredictor()
    predictor.observe([BASH], -5.0)
    assert predictor.ttl(None, benefit=1.0) > 0.0
    assert predictor.ttl([ToolCall("nobody knows this")], benefit=1.0) > 0.0
