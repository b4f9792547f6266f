from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from retention.guardrail import Guardrail, ShadowLRU


def turn(shadow, prompt, finished):
    sampled, hits = shadow.start(prompt)
    shadow.finish(sampled, shadow.sample(finished))
    return hits


def test_small_pools_are_simulated_exactly():
    shadow = ShadowLRU(100)
    assert shadow.every == 1
    assert turn(shadow, range(40), range(60)) == 0
    assert turn(shadow, range(70), range(70)) == 60


def test_the_tail_of_the_least_recent_goes_first():
    shadow = ShadowLRU(100)
    turn(shadow, range(60), range(60))
    turn(shadow, range(1000, 1060), range(1000, 1060))
    assert turn(shadow, range(60), range(60)) == 40
    assert turn(shadow, range(1000, 1060), range(1000, 1060)) == 40


def test_blocks_of_running_requests_are_not_evicted():
    shadow = ShadowLRU(100)
    running, _ = shadow.start(range(60))
    turn(shadow, range(1000, 1090), range(1000, 1090))
    assert shadow.start(range(60)) == (running, 60)
    for _ in range(2):
        shadow.finish(running, range(60))
    assert not shadow._held


def test_shared_prefixes_hit_across_programs():
    shadow = ShadowLRU(100)
    system = list(range(20))
    turn(shadow, [*system, 100], [*system, 100, 101])
    assert turn(shadow, [*system, 200], [*system, 200]) == 20


def test_sampling_estimates_the_hits_of_the_full_cache():
    rng = random.Random(3)
    total, every_turn = 20_000, []
    shadow, cache = ShadowLRU(total), OrderedDict()
    assert shadow.every > 10
    estimate = exact = 0
    lengths = {}
    for _ in range(1500):
        program = int(rng.expovariate(0.02))
        old = lengths.get(program, 0)
        lengths[program] = new = old + rng.randrange(20, 200) if old < 2000 else 100
        start = program << 32
        prompt = range(start, start + new)
        estimate += turn(shadow, prompt, prompt)
        exact += next((i for i, b in enumerate(prompt) if b not in cache), new)
        for b in reversed(prompt):
            cache[b] = None
            cache.move_to_end(b)
        while len(cache) > total:
            cache.popitem(last=False)
        every_turn.append(new)
    assert 0.2 < exact / sum(every_turn) < 0.95
    assert estimate == pytest.approx(exact, rel=0.05)


def test_hits_are_estimated_without_bias_when_all_prompts_share_their_first_block():
    shadow, rng = ShadowLRU(20_000), random.Random(1)
    assert shadow.every > 10
    estimate = exact = 0
    for program in range(60):
        base = program << 32
        length = rng.randrange(30, 100)
        turn(shadow, [7, *range(base, base + length)], [7, *range(base, base + length)])
        estimate += turn(shadow, [7, *range(base, base + length + 8)], [7])
        exact += length + 1
    assert estimate == pytest.approx(exact, rel=0.05)


def test_memory_is_bounded():
    shadow = ShadowLRU(1_000_000)
    for i in range(500):
        turn(shadow, range(i << 20, (i << 20) + 5000), range(i << 20, (i << 20) + 5000))
    assert len(shadow._free) <= 1100 and not shadow._held


def window(guard, now, retained, lru, total=10.0, turns=64, queued=0.0):
    for _ in range(turns):
        guard.turn(retained / turns, lru / turns, total / turns)
    guard.queued(queued)
    return guard.check(now)


def test_a_losing_policy_is_switched_off_and_tried_again():
    guard = Guardrail(retry_s=60.0)
    guard.check(0.0)
    assert not window(guard, 30.0, retained=4.0, lru=5.0)  # one bad window is patience
    assert window(guard, 60.0, retained=4.0, lru=5.0) and guard.off
    assert guard.lost == pytest.approx({"retained_saved_s": 4.0, "lru_saved_s": 5.0, "queued_s": 0.0})
    assert not guard.check(100.0)
    assert guard.check(121.0) and not guard.off


def test_pauses_double_while_it_keeps_losing_and_shrink_when_it_wins():
    guard = Guardrail(retry_s=60.0, max_retry_s=200.0)
    now, pauses = 0.0, []
    guard.check(now)
    for _ in range(4):
        for _ in range(2):
            now += 30.0
            window(guard, now, retained=4.0, lru=5.0)
        assert guard.off
        pauses.append(guard.back_at - now)
        now = guard.back_at
        assert guard.check(now)
    assert pauses == [60.0, 120.0, 200.0, 200.0]
    for _ in range(3):
        now += 30.0
        window(guard, now, retained=5.0, lru=4.0)
    assert guard.retry_s == 60.0


def test_winning_and_small_losses_are_left_alone():
    guard = Guardrail()
    guard.check(0.0)
    for i in range(1, 10):
        assert not window(guard, 30.0 * i, retained=5.0, lru=5.1)  # 1 % of 10 s


def test_good_windows_reset_the_patience():
    guard = Guardrail()
    guard.check(0.0)
    for i in range(1, 20):
        assert not window(guard, 30.0 * i, retained=5.0, lru=6.0 if i % 2 else 4.0)


def test_queueing_that_hard_leases_cause_counts_against_them():
    guard = Guardrail(patience=1)
    guard.check(0.0)
    assert window(guard, 30.0, retained=5.0, lru=4.0, queued=2.0) and guard.off


def test_noise_is_not_a_loss():
    guard = Guardrail(patience=1)
    guard.check(0.0)
    for i in range(64):  # a loss of 20 % of all prefill, but single turns differ far more
        guard.turn(1.0 if i % 2 else 0.0, 0.0 if i % 2 else 1.4, 1.0)
    assert not guard.check(30.0)
    for _ in range(64):
        guard.turn(0.3, 0.5, 1.0)
    assert guard.check(60.0)


def test_few_turns_or_a_short_time_decide_nothing():
    guard = Guardrail(patience=1)
    guard.check(0.0)
    assert not window(guard, 300.0, retained=0.0, lru=9.0, turns=63)
    guard = Guardrail(patience=1)
    guard.check(0.0)
    assert not window(guard, 19.0, retained=0.0, lru=9.0)


def test_the_shadow_is_calibrated_while_lru_runs():
    guard = Guardrail(patience=1)
    guard.check(0.0)
    assert window(guard, 30.0, retained=4.0, lru=5.0)
    window(guard, 31.0, retained=4.0, lru=5.0)  # what LRU itself reaches where the shadow says 5
    assert guard.check(100.0) and guard.bias == pytest.approx(0.8)
    assert not window(guard, 200.0, retained=4.0, lru=5.0)
