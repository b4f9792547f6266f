from __future__ import annotations

import json
import math
import random

import pytest

from retention.cost import MemoryPrice, PrefillCost


def test_prefill_seconds_by_hand():
    cost = PrefillCost(prior=(1e-9, 2e-5, 0.01))
    # 1e-9 * (3000^2 - 1000^2) + 2e-5 * 2000 + 0.01 = 0.008 + 0.04 + 0.01
    assert cost.prefill_seconds(2000, cached=1000) == pytest.approx(0.058)
    assert cost.prefill_seconds(0) == 0.0
    assert cost.saved_seconds(1000) == pytest.approx(1e-9 * 1000**2 + 2e-5 * 1000)


def test_saved_and_remaining_prefill_add_up_to_the_whole():
    cost = PrefillCost()
    assert cost.saved_seconds(3000) + cost.prefill_seconds(5000, cached=3000) == pytest.approx(
        cost.prefill_seconds(8000)
    )


def test_quadratic_is_recovered_from_observations():
    true = (3e-10, 4e-5, 0.02)
    cost, rng = PrefillCost(), random.Random(0)
    for _ in range(300):
        n, c = rng.randrange(100, 30000), rng.choice([0, rng.randrange(20000)])
        cost.observe(n, true[0] * ((c + n) ** 2 - c * c) + true[1] * n + true[2], cached=c)
    assert cost.coefficients == pytest.approx(true, rel=1e-3)


def test_fit_follows_a_machine_that_became_slower():
    cost, rng = PrefillCost(), random.Random(0)
    for rate in (1e-5, 5e-5):
        for _ in range(1500):
            n = rng.randrange(1000, 20000)
            cost.observe(n, rate * n * rng.uniform(0.9, 1.1))
    assert cost.prefill_seconds(10000) == pytest.approx(0.5, rel=0.05)


def test_coefficients_never_become_negative():
    cost, rng = PrefillCost(), random.Random(0)
    for _ in range(200):
        n = rng.randrange(1, 3000)
        cost.observe(n, 0.05 * rng.random())
    assert min(cost.coefficients) >= 0.0
    assert cost.saved_seconds(50000) >= 0.0


def test_impossible_observations_are_ignored():
    cost = PrefillCost()
    before = cost.coefficients
    for tokens, seconds in ((0, 1.0), (-5, 1.0), (100, 0.0), (100, -1.0), (100, math.nan), (100, math.inf)):
        cost.observe(tokens, seconds)
    assert cost.coefficients == before


def test_cost_survives_a_restart():
    cost = PrefillCost()
    cost.observe(1000, 0.1)
    cost.observe(9000, 1.2)
    again = PrefillCost()
    again.load(json.loads(json.dumps(cost.state())))
    assert again.coefficients == pytest.approx(cost.coefficients)
    with pytest.raises(ValueError, match=r"PrefillCost\.state"):
        again.load({"xx": [[1.0]], "xy": [1.0]})


@pytest.mark.parametrize("prior", [(0.0, 0.0, 1.0), (-1e-9, 1e-5, 0.0), (math.nan, 1e-5, 0.0), (1e-9, 1e-5)])
def test_bad_prior_is_refused(prior):
    with pytest.raises(ValueError, match="prior"):
        PrefillCost(prior=prior)


def test_a_prefix_saves_something_however_noisy_the_prefills():
    cost = PrefillCost(prior=(0.0, 1e-5, 0.0))
    for tokens, seconds in ((100, 9e-4), (400, 3e-4), (200, 8e-4), (800, 2e-4)) * 20:  # longer prompts look quicker
        cost.observe(tokens, seconds)
    assert cost.coefficients[:2] == (0.0, 0.0)
    assert cost.saved_seconds(1000) == pytest.approx(1e-4)


def test_price_by_hand():
    price = MemoryPrice(smooth_s=0.0)
    # 4 requests wait for 200 blocks, 40 are free, too few for the next one: 4 / 1000 * (1 - 40 / 200)
    price.update(0.0, total=1000, free=40, waiting_requests=4, waiting_blocks=200)
    assert price.per_block == pytest.approx(0.0032)
    assert price.weight == 5.0


@pytest.mark.parametrize("pool", [(0, 0, 0), (500, 4, 200), (0, 4, 0)])
def test_price_is_zero_when_nobody_waits_or_enough_is_free(pool):
    free, requests, blocks = pool
    price = MemoryPrice()
    price.update(0.0, total=1000, free=0, waiting_requests=9, waiting_blocks=900)
    assert price.per_block > 0.0
    for t in range(1, 60):
        price.update(float(t), total=1000, free=free, waiting_requests=requests, waiting_blocks=blocks)
    assert price.per_block == pytest.approx(0.0, abs=1e-9)


def test_requests_that_wait_for_their_turn_and_not_for_memory_put_no_price_on_it():
    """A burst of 60 requests of 512 blocks in a pool of 4096, of which the step admits one at a time."""
    price = MemoryPrice(smooth_s=0.0)
    price.update(0.0, total=4096, free=512, waiting_requests=60, waiting_blocks=60 * 512)
    assert price.per_block == 0.0
    price.update(1.0, total=4096, free=511, waiting_requests=60, waiting_blocks=60 * 512)
    assert price.per_block == pytest.approx(60 / 4096 * (1 - 511 / (60 * 512)))


def test_price_is_smoothed_but_drops_at_once_when_the_queue_empties():
    price = MemoryPrice(smooth_s=2.0)
    price.update(0.0, total=100, free=0, waiting_requests=1, waiting_blocks=10)
    price.update(2.0, total=100, free=0, waiting_requests=3, waiting_blocks=10)
    assert price.per_block == pytest.approx(0.01 + (1 - math.exp(-1)) * 0.02)
    price.update(2.1, total=100, free=0, waiting_requests=0, waiting_blocks=0)
    assert (price.per_block, price.weight) == (0.0, 1.0)
