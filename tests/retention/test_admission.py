"""Holding new programs while those under way need the pool."""

from __future__ import annotations

import math

import pytest

from retention.admission import Admission
from retention.programs import ProgramKey
from retention.ttl import Survival

QUICK = Survival([1.0], [0.999])
SLOW = Survival([100.0], [0.999])


def key(name):
    return ProgramKey(str(name))


def filled(count, blocks, wait=QUICK, horizon_s=10.0, **settings):
    """`count` paused programs of `blocks` blocks."""
    admission = Admission(horizon=1.0, **settings)
    for name in range(count):
        admission.paused(key(name), blocks, 0, wait, horizon_s, 0.0)
    return admission


def test_a_new_program_is_held_when_it_does_not_fit_beside_those_under_way():
    admission = filled(8, 10, overcommit=1.0)
    assert admission.admits(10, 100, 0.0)
    assert not admission.admits(10, 85, 0.0)


def test_programs_whose_tools_take_longer_than_the_horizon_hold_nobody():
    assert filled(8, 10, wait=SLOW, overcommit=1.0).admits(10, 11, 0.0)


def test_a_paused_program_stops_counting_after_the_horizon():
    admission = filled(8, 10, overcommit=1.0)
    assert not admission.admits(10, 20, 9.9)
    assert admission.admits(10, 20, 10.0)
    assert admission.charged == 0.0


def test_small_programs_are_expected_to_grow_to_the_mean():
    admission = filled(1, 50, overcommit=1.0)
    admission.busy(key("young"), 1)
    assert admission.charged == pytest.approx(0.999 * 50 + 50)


def test_a_return_without_its_lease_needs_its_own_size_and_a_new_program_the_mean():
    admission = filled(2, 40, overcommit=1.0)  # 80 of 100 expected, 40 on average
    assert admission.admits(15, 100, 0.0, new=False)
    assert not admission.admits(25, 100, 0.0, new=False)
    assert not admission.admits(15, 100, 0.0, new=True)


def test_shared_blocks_are_not_charged():
    admission = Admission(overcommit=1.0)
    admission.paused(key(0), 50, 40, QUICK, 10.0, 0.0)
    assert admission.charged == pytest.approx(0.999 * 10)


def test_a_busy_program_counts_once_and_in_full_until_it_is_gone():
    admission = filled(1, 10)
    admission.busy(key(0), 10)
    admission.busy(key(0), 10)
    assert admission.charged == pytest.approx(10)
    assert not admission.admits(10, 12, 1e6)
    admission.gone(key(0))
    admission.gone(key(0))
    assert admission.admits(1e9, 1, 1e6)


def test_nobody_under_way_admits_anything():
    assert Admission().admits(1e9, 1, 0.0)


def test_memory_is_bounded_by_the_programs_under_way():
    admission = Admission()
    for turn in range(10_000):
        admission.paused(key(turn % 3), 10, 0, QUICK, 10.0, float(turn))
    assert len(admission._ends) < 100 and len(admission._charges) == 3


@pytest.mark.parametrize("setting", ["overcommit", "horizon", "hold_s"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(ValueError, match=setting):
        Admission(**{setting: value})


# In the policy.


def crowd(engine, blocks=64, programs=4, **settings):
    """An engine whose programs, paused on quick tools, need more than the pool."""
    settings.setdefault("guardrail", False)
    e = engine("value", blocks=blocks, **settings)
    for name in range(programs):
        e.turn(f"p{name}", [f"{name}/{i}" for i in range(blocks // programs - 1)], calls=[])
    for name in range(programs):  # all are back
        e.arrive(f"back{name}", [f"{name}/{i}" for i in range(blocks // programs)], f"p{name}")
    e.step()
    assert e.running
    e.step()
    return e


def test_a_first_turn_is_held_and_starts_after_hold_s(engine):
    e = crowd(engine, hold_s=60.0)
    e.arrive("new", ["n0", "n1"], "new")
    e.arrive("plain", ["x0", "x1"])
    assert not e.policy.admits("new")
    assert e.policy.admits("plain")
    e.advance(60.0)
    assert e.policy.admits("new")


def test_a_held_program_starts_when_programs_end(engine):
    for end in ("release", "abort"):
        e = crowd(engine, hold_s=1e6)
        e.arrive("new", ["n0", "n1"], "new")
        assert not e.policy.admits("new")
        for name in range(4):
            request = f"back{name}"
            if end == "abort":
                e.abort(request)
            elif request in e.running:
                e.finish(request)
                e.apply(e.policy.release(ProgramKey(f"p{name}")))
            else:
                e.abort(request)
                e.apply(e.policy.release(ProgramKey(f"p{name}")))
        assert e.policy.admits("new")
        assert e.policy.rule.admission.charged == pytest.approx(0.0)


def test_an_idle_engine_holds_nobody(engine):
    e = crowd(engine, hold_s=1e6)
    e.arrive("new", ["n0", "n1"], "new")
    assert not e.policy.admits("new")
    for request in list(e.running):
        e.finish(request)
    e.apply(e.policy.tick(_pool(e)))
    assert e.policy.admits("new")


def test_overcommit_0_and_other_policies_hold_nobody(engine):
    e = crowd(engine, overcommit=0.0)
    assert e.arrive("new", ["n0", "n1"], "new").order == e.arrive("plain", ["x"]).order
    assert e.policy.admits("new")
    lru = engine("lru")
    lru.arrive("new", ["n0"], "new")
    assert lru.policy.admits("new")


def test_programs_without_a_lease_queue_by_age_and_for_no_longer_than_hold_s(engine):
    e = engine("value", hold_s=300.0, ahead_s=5.0)
    assert e.arrive("plain", ["x"]).order == (0, 0.0)
    assert e.arrive("first", ["f"], "new").order == (0, 300.0)
    e.turn("p", ["a", "b", "c"], calls=[])
    e.advance(1.0)
    assert e.arrive("kept", ["a", "b", "c", "d"], "p").order == (0, 1.0 - 5.0)
    e.abort("kept")
    e.apply(e.policy.reset())
    assert e.arrive("lost", ["a", "b", "c", "d"], "p").order == (0, 300.0)
    e.abort("lost")
    e.advance(1000.0)
    assert e.arrive("old", ["a", "b", "c", "d"], "p").order == (0, 1001.0)


def test_a_return_with_a_lease_passes_a_burst_but_nobody_who_waits_longer_than_ahead_s(engine):
    e = engine("value", ahead_s=5.0)
    e.turn("p", ["a", "b", "c"], calls=[])
    long_ago = e.arrive("early", ["x"]).order
    e.advance(5.5)
    burst = e.arrive("burst", ["y"]).order
    e.advance(1.0)
    assert long_ago < e.arrive("back", ["a", "b", "c", "d"], "p").order < burst


def test_a_return_that_lost_its_lease_is_held_and_one_that_has_it_is_not(engine):
    e = engine("value", guardrail=False, overcommit=0.5)
    for name in ("p", "q"):
        e.turn(name, [f"{name}{i}" for i in range(24)], calls=[])
    e.arrive("kept", [f"p{i}" for i in range(25)], "p")
    e.step()
    assert "kept" in e.running
    e.step()
    e.apply(e.policy.release(ProgramKey("q")))
    e.arrive("lost", [f"q{i}" for i in range(25)], "q")
    assert not e.policy.admits("lost")
    e.finish("kept")
    e.apply(e.policy.release(ProgramKey("p")))
    assert e.policy.admits("lost")


def _pool(e):
    from retention import PoolState

    return PoolState(e.total, len(e.free), len(e.waiting), 0, len(e.running))
