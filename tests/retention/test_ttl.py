"""Formulas of the predictor against values worked out by hand."""

from __future__ import annotations

import json
import math
import random

import pytest

from retention.toolcalls import ToolCall
from retention.ttl import PRIORS, Survival, TTLPredictor

BASH, READ = ToolCall("bash"), ToolCall("read")


def fitted(curve, waits, prior="tool"):
    """Whether the curve is that of these waits (seconds of returns, or (seconds, returned)) and the imaginary one."""
    pairs = [wait if isinstance(wait, tuple) else (wait, True) for wait in waits]
    expected = Survival.fit(pairs, PRIORS[prior])
    return (curve.times, curve.cdf) == (expected.times, expected.cdf)


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


def test_the_imaginary_wait_is_spread_over_the_prior():
    # Returns at 1 and 4, one wait censored at 2, and an imaginary one: half of it ends at 2, a quarter at 8, the rest
    # never. At risk 4 at 1, 3 at 2, 1.5 at 4 (one real, half of the imaginary one), 0.5 at 8.
    # S(1) = 3/4, S(2) = 3/4 * (1 - 0.5/3) = 5/8, S(4) = 5/8 * (1 - 1/1.5) = 5/24, S(8) = 5/24 * (1 - 0.25/0.5) = 5/48.
    curve = Survival.fit([(1.0, True), (4.0, True), (2.0, False)], Survival([2.0, 8.0], [0.5, 0.75]))
    assert curve.times == (1.0, 2.0, 4.0, 8.0)
    assert curve.cdf == pytest.approx((1 / 4, 3 / 8, 19 / 24, 43 / 48))


def test_beyond_the_longest_wait_seen_the_prior_decides():
    curve = Survival.fit([(1.0, True), (2.0, True)], PRIORS["tool"])
    assert curve.within(100.0, elapsed=20.0) == pytest.approx(PRIORS["tool"].within(100.0, elapsed=20.0))


def test_a_tool_that_runs_on_has_no_scale():
    # Half of those that have lasted 90 s last 180 s, half of those 360 s, and so on for an hour.
    prior = PRIORS["tool"]
    for seconds in (90.0, 180.0, 360.0, 720.0, 1440.0):
        assert prior.within(seconds, elapsed=seconds)[0] == pytest.approx(0.5)
    assert prior.at(math.inf)[0] == pytest.approx(1 - 1 / 352)  # the rest may never return


def test_the_first_long_waits_of_a_tool_are_kept_while_memory_is_free():
    """Before the first long one has returned, only the short ones are known: no reason to give the others up."""
    predictor = TTLPredictor()
    for _ in range(20):
        predictor.observe([BASH], 1.0)
    assert predictor.ttl([BASH], benefit=1.0, elapsed=50.0) > 60.0
    assert predictor.ttl([BASH], benefit=1.0, rate=0.1, elapsed=50.0) == 0.0  # not at any price


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
    imaginary = 9 / 11  # of the prior's waits end within a minute
    assert p_all == pytest.approx((20 + imaginary) / 21)
    assert p_half == pytest.approx((20 + imaginary) / 41)


def test_a_tool_that_never_returns_is_not_kept():
    predictor = TTLPredictor()
    assert predictor.ttl([BASH], benefit=1.0, rate=1.0) > 0.0
    for _ in range(10):
        predictor.censor([BASH], 300.0)
    assert predictor.ttl([BASH], benefit=1.0, rate=1.0) == 0.0
    assert predictor.curve([BASH]).within(300.0)[0] == pytest.approx((1 - 1 / 22) / 11)  # the imaginary wait's, of 11


def test_a_censored_wait_is_completed_by_its_return():
    predictor = TTLPredictor(min_samples=1)
    record = predictor.censor([BASH], 5.0)
    assert fitted(predictor.curve([BASH]), [(5.0, False)])
    predictor.observe([BASH], 7.0, record)
    assert fitted(predictor.curve([BASH]), [7.0])  # one wait and the imaginary one, not two and the imaginary one


def test_back_off_from_arguments_to_prior():
    predictor = TTLPredictor(min_samples=4)
    pytest_call, ls_call, edit_call = ToolCall("bash", "pytest"), ToolCall("bash", "ls"), ToolCall("edit")
    assert predictor.curve([pytest_call]) is PRIORS["tool"]
    for _ in range(4):
        predictor.observe([pytest_call], 30.0)
    assert fitted(predictor.curve([pytest_call]), [30.0] * 4)
    assert fitted(predictor.curve([ls_call]), [30.0] * 4)  # bash as a whole
    assert fitted(predictor.curve([ToolCall("run_shell")]), [30.0] * 4)  # its kind
    assert fitted(predictor.curve([edit_call]), [30.0] * 4)  # all tools
    for _ in range(4):
        predictor.observe([ls_call], 0.1)
    assert fitted(predictor.curve([pytest_call]), [30.0] * 4)
    assert fitted(predictor.curve([ls_call]), [0.1] * 4)
    assert fitted(predictor.curve([BASH]), [0.1] * 4 + [30.0] * 4)


def test_waits_on_a_person_have_their_own_class():
    predictor = TTLPredictor(min_samples=4)
    for _ in range(50):
        predictor.observe([READ], 0.01)
    for calls in ((), [ToolCall("AskUserQuestion")]):
        assert predictor.curve(calls) is PRIORS["person"]
    for _ in range(4):
        predictor.observe((), 300.0)
    assert fitted(predictor.curve(()), [300.0] * 4, "person")
    assert fitted(predictor.curve([READ]), [0.01] * 50)
    assert fitted(predictor.curve([ToolCall("edit")]), [0.01] * 50)


def test_parallel_calls_take_as_long_as_the_slowest():
    predictor = TTLPredictor(min_samples=3)
    for seconds in (1.0, 2.0, 3.0):
        predictor.observe([READ], seconds)
        predictor.observe([BASH], 10 * seconds)
    # F = F_read * F_bash, each of three waits and the imaginary one, of which 6/11, 7/11, 9/11 end in 5, 10, 30 s.
    curve = predictor.curve([READ, BASH])
    assert curve.at(5.0)[0] == pytest.approx((3 + 6 / 11) / 4 * (6 / 11) / 4)
    assert curve.at(10.0)[0] == pytest.approx((3 + 7 / 11) / 4 * (1 + 7 / 11) / 4)
    assert curve.at(30.0)[0] == pytest.approx((3 + 9 / 11) / 4 * (3 + 9 / 11) / 4)
    for _ in range(3):
        predictor.observe([BASH, READ], 12.0)  # known together now, in whatever order
    assert fitted(predictor.curve([READ, BASH]), [12.0] * 3)
    assert fitted(predictor.curve([BASH]), [10.0, 20.0, 30.0])


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
    waits = [(s, bool(returned)) for s, returned in predictor.state()["waits"]["call:bash:ls"]]
    assert fitted(again.curve([ToolCall("bash", "ls")]), waits)


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
