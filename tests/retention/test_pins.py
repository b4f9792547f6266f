from __future__ import annotations

import random

import pytest

from retention.pins import Lease, PinManager
from retention.programs import ProgramKey


class Books:
    """A PinManager whose ranks are set by hand, and what it gave up."""

    def __init__(self, total=100, **settings):
        self.ranks: dict[str, float] = {}
        self.victims = []
        self.pins = PinManager(
            total, lambda lease, now: (self.ranks[lease.key.program_id],),
            lambda lease, victim, now: self.victims.append((lease.key.program_id, victim)), **settings,
        )  # fmt: skip

    def add(self, name, blocks, rank=1.0, ttl=10.0, now=0.0, tenant="", shared=0):
        self.ranks[name] = rank
        lease = Lease(ProgramKey(name, tenant), tokens=16 * blocks, blocks=blocks, shared=shared)
        self.reason, _ = self.pins.add(lease, ttl, now)
        return lease

    def gave_up(self):
        given = [(name, v.blocks, v.ended) for name, v in self.victims]
        self.victims.clear()
        return given


def test_lease_ids_are_unique_for_ever():
    books = Books()
    ids = []
    for i in range(50):
        ids.append(books.add(f"p{i}", 2).id)
        books.pins.end(ids[-1], "reused", 0.0)
    assert len(set(ids)) == 50 and 0 not in ids


def test_ending_a_lease_twice_is_a_no_op():
    books = Books()
    lease = books.add("a", 30)
    other = books.add("b", 30)
    assert books.pins.end(lease.id, "released", 0.0).blocks == 30
    assert books.pins.end(lease.id, "released", 0.0) is None
    assert books.pins.end(None, "released", 0.0) is None
    assert books.pins.end(12345, "released", 0.0) is None
    assert books.pins.used == 30 and books.pins.get(other.id) is other


def test_lowest_rank_goes_first_and_from_its_tail():
    books = Books()
    for name, rank in (("dear", 3.0), ("cheap", 1.0), ("middle", 2.0)):
        books.add(name, 20, rank)
    books.pins.give_up(10, 0.0)
    assert books.gave_up() == [("cheap", 10, False)]
    books.pins.give_up(25, 0.0)
    assert books.gave_up() == [("cheap", 10, True), ("middle", 15, False)]


def test_a_shrunk_lease_keeps_its_head():
    books = Books()
    lease = books.add("a", 40)
    books.pins.give_up(10, 0.0)
    assert (lease.blocks, lease.tokens) == (30, 480)


def test_the_whole_program_goes_when_little_would_be_left():
    books = Books(keep_fraction=0.25)
    books.add("a", 40)
    books.pins.give_up(31, 0.0)
    assert books.gave_up() == [("a", 40, True)]


def test_small_demands_take_a_worthwhile_part():
    books = Books()
    books.add("a", 80)
    books.pins.give_up(1, 0.0)
    assert books.gave_up() == [("a", 10, False)]


def test_a_program_that_waits_in_the_queue_is_given_up_last():
    books = Books()
    books.add("idle", 10, rank=9.0)
    claimed = books.add("claimed", 10, rank=1.0)
    books.pins.claim(claimed, 0.0)
    books.pins.give_up(10, 0.0)
    assert books.gave_up() == [("idle", 10, True)]
    books.pins.give_up(10, 0.0)
    assert books.gave_up() == [("claimed", 10, True)]


def test_the_requester_s_own_lease_is_spared():
    books = Books()
    own = books.add("own", 10, rank=0.0)
    books.add("other", 10, rank=1.0)
    books.pins.give_up(100, 0.0, protect=own.key)
    assert books.gave_up() == [("other", 10, True)]
    assert books.pins.give_up(100, 0.0, protect=own.key) == []
    books.pins.give_up(100, 0.0)
    assert books.gave_up() == [("own", 10, True)]


def test_shared_blocks_cost_nothing_and_free_nothing():
    books = Books(total=100, budget=0.5)
    books.add("a", 40, shared=30)
    books.add("b", 40, shared=30)
    assert books.pins.used == 20
    books.pins.give_up(15, 0.0)
    assert sum(blocks for _, blocks, _ in books.gave_up()) >= 15 and books.pins.used <= 5


def test_ranks_that_rose_since_are_looked_at_again():
    books = Books()
    books.add("a", 10, rank=1.0)
    books.add("b", 10, rank=2.0)
    books.ranks["a"] = 3.0
    books.pins.give_up(10, 0.0)
    assert books.gave_up() == [("b", 10, True)]


def test_budget_is_never_exceeded_and_dear_leases_displace_cheap_ones():
    books = Books(total=100, budget=0.5)
    books.add("cheap", 30, rank=1.0)
    books.add("dear", 40, rank=2.0)
    assert books.gave_up() == [("cheap", 20, False)]
    assert books.pins.used == 50
    books.add("cheaper", 30, rank=0.5)
    assert books.reason == "budget"
    assert books.gave_up() == []


def test_what_does_not_fit_the_budget_is_clipped_at_the_tail():
    books = Books(total=100, budget=0.5)
    lease = books.add("long", 80)
    assert books.reason == "clipped"
    assert (lease.blocks, lease.tokens, books.pins.used) == (50, 800, 50)


def test_what_can_never_fit_displaces_nothing():
    books = Books(total=100, budget=0.5)
    books.add("cheap", 30, rank=0.1)
    assert books.add("far too long", 1000, rank=9.0).id == 0
    assert books.reason == "budget" and books.gave_up() == []


def test_a_tenant_is_held_to_its_quota_and_displaces_only_itself():
    books = Books(total=100, budget=1.0, tenant_quota=0.5)
    books.add("a1", 45, rank=1.0, tenant="A")
    books.add("b1", 30, rank=0.1, tenant="B")
    books.add("a2", 20, rank=0.5, tenant="A")
    assert books.reason == "clipped"
    assert sum(lease.charge for lease in books.pins if lease.key.tenant == "A") <= 50
    books.add("a3", 40, rank=5.0, tenant="A")
    assert {name for name, _, _ in books.gave_up()} <= {"a1", "a2"}
    assert sum(lease.charge for lease in books.pins if lease.key.tenant == "B") == 30


def test_one_tenant_s_lease_never_displaces_another_s_even_when_the_budget_is_full():
    books = Books(total=100, budget=0.5)
    books.add("a", 50, rank=0.1, tenant="A")
    books.add("b", 40, rank=9.0, tenant="B")
    assert books.reason == "budget" and books.gave_up() == []


def test_due_leases_come_in_order_and_only_once():
    books = Books()
    for i in (3, 1, 2):
        books.add(f"p{i}", 1, ttl=float(i))
    assert [lease.key.program_id for lease in books.pins.due(2.5)] == ["p1", "p2"]
    assert list(books.pins.due(2.5)) == []
    assert len(list(books.pins.due(9.0))) == 1


def test_every_lease_is_seen_while_the_books_change_under_the_loop():
    books = Books()
    for i in range(20):
        books.add(f"p{i}", 1, ttl=1.0)
    for lease in books.pins.due(1.0):
        books.pins.end(lease.id, "expired", 1.0)
    assert len(books.pins) == 0 and books.pins.used == 0


def test_a_new_deadline_replaces_the_old_one():
    books = Books()
    lease = books.add("a", 1, ttl=1.0)
    books.pins.set_ttl(lease, 5.0, 0.5)
    assert lease.ttl_s == 5.5
    assert list(books.pins.due(5.0)) == []
    assert list(books.pins.due(5.5)) == [lease]


def test_a_claimed_lease_does_not_expire_until_it_is_unclaimed():
    books = Books(leak_s=100.0)
    lease = books.add("a", 1, ttl=1.0)
    books.pins.claim(lease, 0.5)
    assert list(books.pins.due(50.0)) == []
    books.pins.unclaim(lease, 50.0)
    assert list(books.pins.due(50.0)) == [lease]


def test_heaps_stay_in_proportion_to_the_live_leases():
    books = Books(total=10_000)
    lease = books.add("a", 10)
    for i in range(5000):
        books.pins.set_ttl(lease, float(i), 0.0)
        books.pins.claim(lease, 0.0)
        books.pins.unclaim(lease, 0.0)
    assert max(len(books.pins._times._entries), len(books.pins._ranks._entries)) < 100


def test_nothing_is_left_of_tenants_without_leases():
    books = Books(total=10_000)
    for i in range(200):
        books.pins.end(books.add("a", 1, tenant=f"t{i}").id, "released", 0.0)
    assert len(books.pins._tenants) == 0


def test_books_balance_under_random_operations():
    books, rng = Books(total=500, budget=0.8, tenant_quota=0.5), random.Random(7)
    for step in range(3000):
        now = step / 10
        live = list(books.pins)
        what = rng.randrange(5)
        if what == 0 or not live:
            books.add(f"p{step}", rng.randrange(1, 60), rng.random(), rng.random() * 20, now, rng.choice("AB"))
        elif what == 1:
            books.pins.give_up(rng.randrange(1, 80), now)
        elif what == 2:
            books.pins.end(rng.choice(live).id, "released", now)
        elif what == 3:
            for lease in books.pins.due(now):
                books.pins.end(lease.id, "expired", now)
        else:
            books.pins.set_ttl(rng.choice(live), rng.random() * 20, now)
        assert books.pins.used == sum(lease.charge for lease in books.pins) <= 400
        assert all(0 < lease.blocks <= lease.original for lease in books.pins)
        for tenant in "AB":
            assert sum(lease.charge for lease in books.pins if lease.key.tenant == tenant) <= 200


@pytest.mark.parametrize(
    "bad", [{"budget": 1.5}, {"budget": -0.1}, {"tenant_quota": 2.0}, {"leak_s": 0.0}, {"keep_fraction": -1.0}]
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Books(**bad)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="total_blocks"):
        Books(total=0)
