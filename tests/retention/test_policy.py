"""What users of such systems reported, and the rest of a policy's behaviour, on a small engine (conftest.Engine)."""

from __future__ import annotations

import json
import logging
import time

import pytest

from retention import (
    POLICIES,
    Demand,
    EventLog,
    Hints,
    PoolState,
    ProgramKey,
    ToolCall,
    TurnArrived,
    TurnFinished,
    make_policy,
)
from retention.guardrail import Guardrail
from retention.policy import MAX_TTL_S
from retention.rules import RULES

BASH = ToolCall("bash")
RETAINING = [name for name in POLICIES if name not in ("lru", "continuum")]  # continuum needs a history before it keeps


def chain(name, n):
    return [(name, i) for i in range(n)]


def flood(e, blocks, count=1):
    for i in range(count):
        e.turn(None, chain(f"flood {e.now} {i} {len(e.hit_tokens)}", blocks))


# What it is for


@pytest.mark.parametrize("name", RETAINING)
def test_a_paused_program_survives_a_flood_that_evicts_it_from_lru(name, engine):
    hits = {}
    for policy in ("lru", name):
        e = engine(policy, blocks=64)
        e.turn("agent", chain("agent", 20), calls=[BASH])
        e.advance(0.5)
        flood(e, 30, count=3)
        hits[policy] = e.turn("agent", chain("agent", 22), calls=[BASH])
    assert hits == {"lru": 0, name: 20 * 16}


def test_continuum_keeps_once_it_has_learned(engine):
    e = engine("continuum", blocks=64, samples=3, guardrail=False)
    e.policy.rule.cost.observe(320, 30.0)
    for turn in range(6):
        e.advance(0.5)
        e.turn("agent", chain("agent", 20 + turn), calls=[BASH])
    e.advance(0.25)
    flood(e, 20, count=5)
    assert e.last_pin.reason == "no_program"
    assert e.turn("agent", chain("agent", 26), calls=[BASH]) == 25 * 16


def test_the_lease_is_worth_more_for_the_tool_that_returns_soon(engine):
    e = engine("value", blocks=64)
    for i in range(10):
        for tool, seconds in (("fast", 0.5), ("slow", 50.0)):
            e.turn(f"{tool}{i}", chain(f"{tool}{i}", 2), calls=[ToolCall(tool)])
            e.advance(seconds)
            e.turn(f"{tool}{i}", chain(f"{tool}{i}", 3), hints=Hints(release=True))
    e.apply(e.policy.reset())
    e.turn("a", chain("a", 20), calls=[ToolCall("slow")])
    e.turn("b", chain("b", 20), calls=[ToolCall("fast")])
    flood(e, 40)
    assert [lease.key.program_id for lease in e.policy.pins] == ["b"]


# Reported faults


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("hard", [False, True])
def test_a_new_request_progresses_when_idle_leases_hold_the_whole_pool(name, hard, engine):
    e = engine(name, blocks=64, hard=hard, budget=1.0)
    for i in range(8):
        e.turn(f"idle{i}", chain(f"idle{i}", 8), calls=[BASH], hints=Hints(ttl_s=3600.0))
    if RULES[name].retains:
        assert len(e.free) == 0
    e.arrive("new", chain("new", 60))
    e.step()
    assert "new" in e.running


def test_a_running_request_gets_its_next_block_from_leases_before_it_is_preempted(engine):
    e = engine("fixed", blocks=64, hard=True, budget=1.0, ttl_s=3600.0)
    e.arrive("runs", chain("runs", 20))
    e.step()
    e.turn("idle", chain("idle", 44), calls=[BASH])
    assert len(e.free) == 0
    assert e.grow("runs", [("more", 0)])
    e.finish("runs")


def test_a_hard_lease_makes_others_wait_but_only_for_so_long(engine):
    e = engine("fixed", blocks=64, hard=True, budget=1.0, ttl_s=3600.0, max_wait_s=10.0)
    e.arrive("runs", chain("runs", 10))
    e.step()
    e.turn("idle", chain("idle", 40), calls=[BASH])
    e.arrive("waits", chain("waits", 20))
    e.step()
    assert "waits" in e.waiting
    e.advance(10.0)
    e.step()
    assert "waits" in e.running


def test_a_soft_lease_makes_nobody_wait(engine):
    e = engine("fixed", blocks=64, ttl_s=3600.0)
    e.arrive("runs", chain("runs", 10))
    e.step()
    e.turn("idle", chain("idle", 40), calls=[BASH])
    e.arrive("waits", chain("waits", 20))
    e.step()
    assert "waits" in e.running


def test_a_soft_lease_yields_to_its_own_program_whose_prompt_has_left_it(engine):
    e = engine("value", blocks=64)
    e.arrive("runs", chain("runs", 5))
    e.step()
    e.turn("agent", chain("old branch", 40), calls=[BASH])
    e.turn("agent", chain("new branch", 50), calls=[BASH])
    assert e.last_pin.lease_id is not None


def test_a_lease_claimed_by_a_request_that_never_starts_is_reaped_and_counted(engine):
    e = engine("fixed", blocks=64)
    e.turn("agent", chain("agent", 20), calls=[BASH])
    e.policy.turn_arrived(TurnArrived("lost", ProgramKey("agent"), 320))
    e.advance(100.0)
    e.step()
    assert len(e.leases) == 1  # claimed: far past its 2 seconds, and still there
    e.advance(600.0)
    e.step()
    assert not e.leases
    assert e.policy.metrics.get("kvq_leaked_total") == 1


def test_a_request_that_finishes_before_it_started_gives_its_claim_back(engine):
    e = engine("fixed", blocks=64)
    e.turn("agent", chain("agent", 20), calls=[BASH])
    e.arrive("r", chain("agent", 21), "agent")
    del e.waiting["r"]  # vLLM frees the (no) blocks of a waiting request that is aborted, too
    assert e.policy.turn_finished(TurnFinished("r", tokens=0, blocks=0, finish="abort")).lease_id is None
    e.advance(3.0)
    e.step()
    assert not e.leases and e.policy.metrics.get("kvq_leaked_total") == 0


def test_releasing_twice_or_a_stranger_is_a_no_op(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 20), calls=[BASH])
    victims = e.policy.release(ProgramKey("agent"))
    assert [v.reason for v in victims] == ["released"]
    e.apply(victims)
    assert e.policy.release(ProgramKey("agent")) == () == e.policy.release(ProgramKey("nobody"))
    assert e.policy.reset() == ()
    e.policy.aborted("nobody")


@pytest.mark.parametrize("state", ["waiting", "started", "decoding", "retained", "returning", "finished"])
@pytest.mark.parametrize("name", POLICIES)
def test_an_abort_in_any_state_leaves_the_pool_whole(state, name, engine):
    e = engine(name, blocks=64)
    if state in ("retained", "returning"):
        e.turn("agent", chain("agent", 10), calls=[BASH])
    if state != "retained":
        e.arrive("r", chain("agent", 12), "agent")
    if state not in ("retained", "waiting", "returning"):
        e.step()
    if state == "decoding":
        e.grow("r", [("more", 0)])
    if state == "finished":
        e.finish("r", [BASH])
        e.policy.aborted("r")
    elif state == "retained":
        e.apply(e.policy.release(ProgramKey("agent")))
    else:
        e.abort("r")
        e.policy.aborted("r")
    e.check()
    for _ in range(3):
        e.advance(4000.0)
        e.step()
    assert len(e.free) == 64 and not e.leases


def test_an_aborted_request_is_not_retained_unless_asked(engine):
    e = engine("value", blocks=64)
    for finish in ("abort", "error"):
        e.arrive("r", chain("agent", 10), "agent")
        e.step()
        assert e.finish("r", [BASH], finish).reason == "aborted"
        e.arrive("r", chain("agent", 10), "agent", tool_pending=True)  # a stop string or tool parser aborts the core
        e.step()
        assert e.finish("r", None, finish).lease_id is not None


def test_a_client_that_leaves_while_its_lease_is_reset_changes_nothing(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH])
    e.arrive("r", chain("agent", 12), "agent")
    e.apply(e.policy.reset())
    e.abort("r")
    assert not e.leases and len(e.free) == 64


def test_tenants_salts_and_adapters_never_meet(engine):
    e = engine("value", blocks=64)
    keys = [ProgramKey("x", *rest) for rest in (("A",), ("B",), ("A", "salt"), ("A", "", "lora"))]
    for i, key in enumerate(keys):
        e.arrive(f"r{i}", chain(key, 8), key)
        e.step()
        e.finish(f"r{i}", [BASH])
    assert len(e.leases) == 4
    arrival = e.arrive("next", chain(keys[0], 9), keys[0])
    leases = {lease.key: lease for lease in e.policy.pins}
    assert arrival.lease_id == leases[keys[0]].id
    e.apply(e.policy.release(ProgramKey("x", "C")))
    e.apply(e.policy.release(keys[1]))
    assert {lease.key for lease in e.policy.pins} == {keys[0], keys[2], keys[3]}


def test_requests_without_a_program_share_no_identity(engine):
    e = engine("fixed", blocks=64)
    for i in range(3):
        e.turn(None, chain("same", 5 + i), calls=[BASH])
        assert e.last_pin.reason == "no_program"
    assert not e.leases and len(e.policy._programs) == 0


def test_stripped_reasoning_is_not_retained_again(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("p", 10), new=chain("thought", 10), calls=[BASH])
    assert e.last_pin.blocks == 20
    next_prompt = [*chain("p", 10), *chain("answer and result", 3)]
    e.turn("agent", next_prompt, new=chain("thought 2", 10), calls=[BASH])
    assert e.policy.metrics.get("kvq_drift_total") == 1
    assert e.last_pin.blocks == 13


def test_a_prompt_that_changes_at_its_head_is_reported_and_not_retained(engine, tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    e = engine("value", blocks=64, events=log)
    for turn in range(4):
        e.turn("agent", chain(f"header {turn}", 10), calls=[BASH])
        e.advance(1.0)
    log.close()
    assert e.last_pin.reason == "drift" and e.last_pin.lease_id is None
    events = [json.loads(line) for line in log.path.read_text().splitlines()]
    superseded = [x for x in events if x["event"] == "supersede"]
    assert [x["first_divergent_token"] for x in superseded] == [0]
    assert [x["event"] for x in events].count("pin") == 1


def test_the_stable_prefix_that_the_scheduler_knows_is_what_is_kept(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("p", 20), calls=[BASH], keep_tokens=165)
    assert e.last_pin.blocks == 10
    e.turn("other", chain("q", 20), calls=[BASH], keep_tokens=7)
    assert e.last_pin.reason == "drift"


def test_reuse_counts_the_tokens_that_were_hit_not_those_retained(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("p", 10), new=chain("x", 6), calls=[BASH])
    e.turn("agent", [*chain("p", 10), *chain("y", 2)], calls=[BASH])
    assert e.policy.metrics.get("kvq_reused_tokens_total") == 10 * 16


def test_hybrid_models_may_have_other_block_counts_than_tokens(engine):
    policy = make_policy("value", total_blocks=1000, block_tokens=16, clock=lambda: 0.0)
    key = ProgramKey("a")
    policy.turn_arrived(TurnArrived("r", key, 1000))
    pin = policy.turn_finished(TurnFinished("r", tokens=1000, blocks=90, tool_calls=[BASH], keep_tokens=500))
    assert pin.blocks == 45
    assert next(iter(policy.pins)).tokens == 500


def test_a_turn_that_cached_nothing_is_not_retained(engine):
    policy = make_policy("value", total_blocks=1000, clock=lambda: 0.0)
    policy.turn_arrived(TurnArrived("r", ProgramKey("a"), 10))
    assert policy.turn_finished(TurnFinished("r", tokens=10, blocks=0, tool_calls=[BASH])).reason == "nothing_cached"


def test_many_leases_that_expire_at_once_all_end(engine):
    e = engine("fixed", blocks=200)
    for i in range(100):
        e.turn(f"p{i}", chain(i, 2), calls=[BASH])
    e.advance(3.0)
    e.step()
    e.step()
    assert not e.leases and e.policy.metrics.get("kvq_expired_total") == 100


def test_the_default_clock_is_monotonic():
    before = time.monotonic()
    policy = make_policy("value", total_blocks=10)
    assert before <= policy._now() <= time.monotonic()


# Semantics


def test_a_new_turn_protects_its_lease_while_it_waits_and_ends_it_when_it_starts(engine):
    e = engine("fixed", blocks=64, hard=True, budget=1.0, max_wait_s=1e9)
    e.turn("agent", chain("agent", 20), calls=[BASH])
    e.arrive("blocker", chain("blocker", 40))
    e.step()
    arrival = e.arrive("r", chain("agent", 30), "agent")
    assert arrival.lease_id in e.leases and arrival.waited_s == 0.0
    e.advance(60.0)
    e.step()
    assert "r" in e.waiting and arrival.lease_id in e.leases
    e.finish("blocker")
    e.step()
    assert e.hit_tokens["r"] == 320 and arrival.lease_id in e.ended


def test_a_reused_lease_is_renewed_for_the_whole_new_context(engine):
    e = engine("fixed", blocks=64, ttl_s=5.0)
    for turn in range(5):
        e.turn("agent", chain("agent", 10 + turn), calls=[BASH])
        e.advance(4.0)
        e.step()
        assert len(e.leases) == 1 and e.last_pin.blocks == 10 + turn
    assert e.policy.metrics.get("kvq_reuse_total") == 4
    e.advance(2.0)
    e.step()
    assert not e.leases


def test_a_second_branch_of_a_program_supersedes_the_first(engine):
    e = engine("fixed", blocks=64)
    e.arrive("a", chain("a", 10), "agent")
    e.arrive("b", chain("b", 10), "agent")
    e.step()
    first = e.finish("a", [BASH])
    second = e.finish("b", [BASH])
    assert [(v.lease_id, v.reason) for v in second.victims] == [(first.lease_id, "superseded")]
    assert set(e.leases) == {second.lease_id}


def test_an_expired_lease_is_given_up_before_a_cheaper_live_one(engine):
    e = engine("value", blocks=64)
    e.turn("dear", chain("dear", 30), calls=[BASH], hints=Hints(ttl_s=1.0))
    e.turn("cheap", chain("cheap", 20), calls=[BASH], hints=Hints(ttl_s=100.0))
    e.advance(2.0)
    victims = e.policy.blocks_needed(Demand(10, "someone"))
    e.apply(victims)
    assert [v.reason for v in victims] == ["expired"]
    assert [lease.key.program_id for lease in e.policy.pins] == ["cheap"]


def test_an_expired_trtllm_lease_goes_to_the_back_of_everyone_s_queue(engine):
    """TensorRT-LLM: on expiry the level is the default again, behind all blocks that were free before, tail first."""
    e = engine("trtllm", blocks=20, duration_s=5.0)
    e.turn("agent", chain("p", 4), calls=[BASH])
    e.turn(None, chain("later", 4))
    e.advance(4.9)
    e.step()
    assert len(e.leases) == 1
    e.advance(0.1)
    e.step()
    assert not e.leases
    order = [e.content[block] for block in e.free]
    assert [c for c in order if c] == [*reversed(chain("later", 4)), *reversed(chain("p", 4))]


def test_trtllm_s_clock_restarts_at_each_release(engine):
    e = engine("trtllm", blocks=64, duration_s=5.0)
    e.turn("agent", chain("p", 4), calls=[BASH])
    e.advance(4.0)
    e.turn("agent", chain("p", 6), calls=[BASH])
    e.advance(4.0)
    e.step()
    assert len(e.leases) == 1
    e.advance(1.0)
    e.step()
    assert not e.leases


def test_hints_release_the_program(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH])
    e.turn("agent", chain("agent", 12), hints=Hints(release=True))
    assert e.last_pin.reason == "released" and not e.leases and len(e.policy._programs) == 0


@pytest.mark.parametrize(
    ("ttl", "kept"), [(30.0, 30.0), (0.0, None), (-5.0, None), (float("nan"), None), (1e30, MAX_TTL_S)]
)
def test_an_absurd_ttl_is_bounded(ttl, kept, engine):
    for name in RETAINING:
        e = engine(name, blocks=64)
        e.turn("agent", chain("agent", 10), calls=[BASH], hints=Hints(ttl_s=ttl))
        assert (e.last_pin.ttl_s if e.last_pin.lease_id else None) == kept


def test_a_hinted_ttl_is_not_decided_again(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH], hints=Hints(ttl_s=50.0))
    e.advance(49.0)
    e.step()
    assert e.leases
    e.advance(1.0)
    e.step()
    assert not e.leases


def test_a_hint_makes_lru_keep_nothing(engine):
    e = engine("lru", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH], hints=Hints(ttl_s=50.0, priority=100))
    assert e.last_pin.reason == "no_value"


def test_tool_calls_that_the_front_end_reports_later_change_the_lease(engine):
    e = engine("ema", blocks=64, ttl_s=2.0, off=["slow"])
    e.policy.rule.predictor.observe([BASH], 20.0)
    e.turn("agent", chain("agent", 10), calls=None)
    assert e.last_pin.ttl_s == 2.0
    assert e.policy.tool_called(ProgramKey("agent"), [BASH]) == ()
    assert next(iter(e.policy.pins)).ttl_s == 30.0
    victims = e.policy.tool_called(ProgramKey("agent"), [ToolCall("slow")])
    e.apply(victims)
    assert [v.reason for v in victims] == ["repriced"]
    assert e.policy.tool_called(ProgramKey("nobody"), [BASH]) == ()


def test_the_wait_is_learned_for_the_tools_that_were_called(engine):
    e = engine("value", blocks=64)
    for _ in range(8):
        e.turn("agent", chain("agent", 10), calls=[ToolCall("bash", "make")])
        e.advance(7.0)
    e.arrive("last", chain("agent", 10), "agent")
    curve = e.policy.rule.predictor.curve([ToolCall("bash", "make")])
    assert curve.at(7.0)[0] - curve.at(6.9)[0] == pytest.approx(8 / 9)  # eight waits and the imaginary one


def test_a_wait_that_outlasts_its_lease_is_censored_then_completed(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH], hints=Hints(ttl_s=5.0))
    e.advance(6.0)
    e.step()
    waits = e.policy.rule.predictor.state()["waits"]["tool:bash"]
    assert waits == [[6.0, 0.0]]
    e.advance(4.0)
    e.arrive("r", chain("agent", 11), "agent")
    assert e.policy.rule.predictor.state()["waits"]["tool:bash"] == [[10.0, 1.0]]


def test_leases_are_decided_again_when_memory_gets_dear(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 40), calls=[BASH])
    ttl = e.last_pin.ttl_s
    assert ttl > 60.0
    pressed = PoolState(64, 0, waiting_requests=50, waiting_blocks=500, running_requests=1)
    for _ in range(20):
        e.advance(1.0)
        e.apply(e.policy.tick(pressed))
    assert not e.leases
    assert e.policy.metrics.get("kvq_expired_total") == 1


def test_nobody_waits_so_everything_that_may_return_is_kept(engine):
    e = engine("value", blocks=64)
    for i in range(6):
        e.turn(f"p{i}", chain(i, 10), calls=[BASH])
    assert len(e.leases) == 6


def test_a_clock_that_goes_backwards_is_held_and_reported_once(engine, caplog):
    e = engine("fixed", blocks=64)
    e.advance(100.0)
    e.turn("agent", chain("agent", 10), calls=[BASH])
    with caplog.at_level(logging.WARNING):
        e.advance(-50.0)
        e.step()
        e.turn("agent", chain("agent", 10), calls=[BASH])
    assert len(e.leases) == 1 and len(caplog.records) == 1
    assert e.policy.metrics.get("kvq_clock_backwards_total") > 1
    assert min(w[0] for w in e.policy.rule.predictor.state()["waits"]["tool:bash"]) == 0.0
    e.advance(52.5)
    e.step()
    assert not e.leases


def test_a_full_budget_rejects_and_says_why(engine, tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    e = engine("fixed", blocks=64, budget=0.25, events=log)
    e.turn("first", chain("first", 16), calls=[BASH])
    e.turn("second", chain("second", 16), calls=[BASH])
    log.close()
    assert e.last_pin.reason == "budget"
    assert e.policy.metrics.get("kvq_rejected_total", "budget") == 1
    assert "pin_rejected_budget" in log.path.read_text()


def test_a_resized_pool_resizes_the_budget(engine):
    policy = make_policy("value", total_blocks=100, clock=lambda: 0.0, budget=0.5)
    policy.tick(PoolState(400, 400))
    assert policy.pins.budget_blocks == 200


def test_guardrail_switches_a_losing_policy_off_and_on_again(engine, tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    guard = Guardrail(min_turns=5, window_s=1.0, patience=1, retry_s=10.0)
    e = engine("fixed", blocks=64, ttl_s=1e4, guardrail=guard, events=log)
    for i in range(6):  # leases of programs that never return starve the prefix that everyone shares
        e.turn(f"gone{i}", chain(("gone", i), 9), calls=[BASH])
    for i in range(30):
        e.advance(1.0)
        e.turn(None, [*chain("shared", 5), ("x", i)])
        flood(e, 6)
    assert guard.off or e.policy.metrics.get("kvq_guardrail_trips_total") >= 1
    assert not e.leases
    guard_hits = e.turn(None, [*chain("shared", 5), ("y", 0)])
    assert guard_hits == 5 * 16
    while guard.off:
        e.advance(1.0)
        e.step()
    e.turn("agent", chain("agent", 5), calls=[BASH])
    assert e.last_pin.lease_id is not None
    log.close()
    assert {"guardrail_off", "guardrail_on"} <= {json.loads(x)["event"] for x in log.path.read_text().splitlines()}


def test_guardrail_leaves_a_winning_policy_alone(engine):
    guard = Guardrail(min_turns=5, window_s=1.0, patience=1)
    e = engine("value", blocks=64, guardrail=guard)
    for turn in range(30):
        e.turn("agent", chain("agent", 20 + turn // 3), calls=[BASH])
        e.advance(1.0)
        flood(e, 30, count=2)
    assert e.policy.metrics.get("kvq_guardrail_trips_total") == 0
    assert guard.retained_s >= guard.lru_s


def test_every_event_is_written_with_its_fields(engine, tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    e = engine("fixed", blocks=64, events=log, ttl_s=5.0)
    e.turn("a", chain("a", 20), calls=[BASH])
    e.turn("a", chain("a", 21), calls=[BASH])
    e.turn("b", chain("b", 30), calls=[BASH])
    flood(e, 40)
    e.turn("c", chain("c", 10), calls=[BASH])
    e.advance(6.0)
    e.step()
    e.turn("c", chain("c", 10), calls=[BASH])
    e.apply(e.policy.release(ProgramKey("c")))
    log.close()
    text = log.path.read_text()
    assert "Infinity" not in text and "NaN" not in text  # not JSON
    events = [json.loads(line) for line in text.splitlines()]
    assert {"pin", "reuse", "miss", "expire", "evict", "release"} <= {x["event"] for x in events}
    reuse = next(x for x in events if x["event"] == "reuse")
    assert (reuse["program"], reuse["tool"], reuse["blocks"], reuse["cached_tokens"]) == ("a", "bash", 20, 320)


def test_a_full_disk_does_not_stop_the_policy(engine):
    log = EventLog("/dev/full", buffer=10, retry_s=0.01)
    e = engine("fixed", blocks=64, events=log)
    for i in range(50):
        e.turn("agent", chain("agent", 10 + i % 10), calls=[BASH])
    log.close()
    e.policy.update_gauges()
    assert e.policy.metrics.get("kvq_events_dropped_total") > 0
    assert e.policy.metrics.get("kvq_pins_total") == 50


def test_status_is_json_and_true(engine):
    e = engine("value", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH])
    status = json.loads(json.dumps(e.policy.status()))
    assert status["policy"] == "value" and status["total_blocks"] == 64 and status["guardrail"] == "on"
    assert status["metrics"]["kvq_pins"] == 1 and status["metrics"]["kvq_pinned_blocks"] == 10


def test_what_was_learned_survives_a_restart(engine):
    e = engine("value", blocks=64)
    for _ in range(10):
        e.turn("agent", chain("agent", 10), calls=[BASH], prefill_s=0.3)
        e.advance(7.0)
    state = json.loads(json.dumps(e.policy.state()))
    again = make_policy("value", total_blocks=64, state=state)
    assert again.state() == e.policy.state()
    assert again.rule.predictor.curve([BASH]).cdf == e.policy.rule.predictor.curve([BASH]).cdf
    assert again.rule.predictor.curve([BASH]).median() == 7.0


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"name": "best"}, "policy must be one of lru, fixed"),
        ({"name": "fixed", "ttl": 3}, "'ttl'.*ttl_s"),
        ({"name": "lru", "ttl_s": 3}, "'ttl_s'.*none"),
        ({"name": "value", "total_blocks": 0}, "total_blocks"),
        ({"name": "value", "block_tokens": 0}, "block_tokens"),
        ({"name": "value", "budget": 2.0}, "budget"),
        ({"name": "value", "tenant_quota": -1.0}, "tenant_quota"),
        ({"name": "value", "max_wait_s": -1.0}, "max_wait_s"),
        ({"name": "value", "max_wait_s": float("nan")}, "max_wait_s"),
        ({"name": "value", "state": {"predictor": 1}}, r"Policy\.state"),
        ({"name": "value", "state": []}, r"Policy\.state"),
    ],
)
def test_bad_settings_are_refused_by_name(kwargs, named):
    with pytest.raises(ValueError, match=named):
        make_policy(**{"total_blocks": 100, **kwargs})


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.turn_arrived(TurnArrived("r", None, -1)),
        lambda p: p.turn_arrived(TurnArrived("r", None, 1.5)),
        lambda p: p.turn_started("r", -1),
        lambda p: p.turn_finished(TurnFinished("r", tokens=-1, blocks=1)),
        lambda p: p.turn_finished(TurnFinished("r", tokens=1, blocks=-1)),
        lambda p: p.turn_finished(TurnFinished("r", tokens=1, blocks=1, shared_blocks=-2)),
        lambda p: p.blocks_needed(Demand(-1, "r")),
        lambda p: p.tick(PoolState(100, -1)),
        lambda p: p.tick(PoolState(0, 0)),
        lambda p: p.tick(PoolState(100, 1, waiting_requests=-1)),
    ],
)
def test_impossible_numbers_are_refused_and_change_nothing(call):
    policy = make_policy("value", total_blocks=100)
    before = policy.status()
    with pytest.raises(ValueError, match="must be"):
        call(policy)
    assert policy.status() == before


def test_a_request_id_that_comes_twice_starts_anew(engine):
    e = engine("fixed", blocks=64)
    e.turn("agent", chain("agent", 10), calls=[BASH])
    e.arrive("same", chain("agent", 11), "agent")
    e.arrive("same", chain("agent", 11), "agent")
    e.abort("same")
    assert e.policy._programs.get(ProgramKey("agent")).live == 0
    assert next(iter(e.policy.pins)).waiting == 0


def test_a_request_whose_arrival_was_not_seen_can_finish(engine):
    policy = make_policy("value", total_blocks=100, clock=lambda: 0.0)
    pin = policy.turn_finished(TurnFinished("r", tokens=160, blocks=10, tool_calls=[BASH], program=ProgramKey("late")))
    assert pin.lease_id is not None
    assert policy.turn_finished(TurnFinished("s", tokens=160, blocks=10)).reason == "no_program"


def test_requests_that_a_scheduler_loses_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("retention.policy.MAX_REQUESTS", 50)
    policy = make_policy("value", total_blocks=100, clock=lambda: 0.0)
    for i in range(500):
        policy.turn_arrived(TurnArrived(f"r{i}", ProgramKey("a"), 16))
    assert len(policy._requests) == 50
