"""A small engine: a prefix cache with reference counts and an LRU free queue, and a scheduler that asks a policy."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from retention import Demand, Hints, PoolState, ProgramKey, TurnArrived, TurnFinished, make_policy

BLOCK = 16


class Engine:
    """Blocks are named by their contents: one hashable a block, different for different prefixes. Leases hold
    references, soft ones too.
    """

    def __init__(self, name="value", blocks=64, **settings):
        self.now = 0.0
        self.policy = make_policy(name, total_blocks=blocks, block_tokens=BLOCK, clock=lambda: self.now, **settings)
        self.total = blocks
        self.ref = [0] * blocks
        self.content = [None] * blocks
        self.cached = {}
        self.free = OrderedDict.fromkeys(range(blocks))
        self.waiting = {}  # request: (order, contents)
        self.running = {}  # request: (blocks, contents)
        self.leases = {}  # lease: blocks
        self.ended = set()
        self.hit_tokens = {}
        self.last_pin = None

    def advance(self, seconds):
        self.now += seconds

    def arrive(self, request, contents, program=None, **hints):
        key = ProgramKey(program) if isinstance(program, str) else program
        turn = TurnArrived(request, key, len(contents) * BLOCK, tuple(contents), Hints(**hints))
        arrival = self.policy.turn_arrived(turn)
        self.waiting[request] = (arrival.order, tuple(contents))
        return arrival

    def step(self):
        """One scheduling step: sweep, then admit in order until one does not fit."""
        need = sum(len(contents) for _, contents in self.waiting.values())
        self.apply(self.policy.tick(PoolState(self.total, len(self.free), len(self.waiting), need, len(self.running))))
        for request in sorted(self.waiting, key=lambda r: self.waiting[r][0]):
            if not self.start(request):
                break

    def start(self, request):
        _, contents = self.waiting[request]
        if not self.policy.admits(request):
            return False
        hits = []
        for c in contents[: max(0, len(contents) - 1)]:  # at least one block is computed
            if c not in self.cached:
                break
            hits.append(self.cached[c])
        self.touch(hits)
        new = self.allocate(len(contents) - len(hits), request, running=False)
        if new is None:
            self.release(hits)
            return False
        del self.waiting[request]
        for block, c in zip(new, contents[len(hits) :]):
            self.fill(block, c)
        self.running[request] = ([*hits, *new], list(contents))
        self.hit_tokens[request] = len(hits) * BLOCK
        self.apply(self.policy.turn_started(request, len(hits) * BLOCK))
        return True

    def grow(self, request, contents):
        """Decode: more full blocks for a running request. False if it had to be preempted."""
        blocks, old = self.running[request]
        new = self.allocate(len(contents), request, running=True)
        if new is None:
            del self.running[request]
            self.release(blocks)
            self.waiting[request] = ((-1, 0.0), (*old, *contents))
            return False
        for block, c in zip(new, contents):
            self.fill(block, c)
        blocks.extend(new)
        old.extend(contents)
        return True

    def finish(self, request, calls=(), finish="stop", **kw):
        blocks, contents = self.running.pop(request)
        shared = next((i for i, b in enumerate(blocks) if self.ref[b] < 2), len(blocks))
        kw.setdefault("tokens", len(blocks) * BLOCK)
        pin = self.policy.turn_finished(
            TurnFinished(
                request,
                blocks=len(blocks),
                shared_blocks=shared,
                finish=finish,
                tool_calls=calls,
                block_hashes=tuple(contents),
                **kw,
            )
        )
        self.apply(pin.victims)
        if pin.lease_id is not None:
            assert pin.lease_id not in self.leases and pin.lease_id not in self.ended
            assert 0 < pin.blocks <= len(blocks) and 0.0 < pin.ttl_s < float("inf")
            self.leases[pin.lease_id] = blocks[: pin.blocks]
            self.touch(blocks[: pin.blocks])
        self.release(blocks)
        self.last_pin = pin
        return pin

    def abort(self, request):
        if request in self.running:
            self.finish(request, finish="abort")
        else:
            del self.waiting[request]
            self.policy.aborted(request)

    def turn(self, program, contents, new=(), calls=(), **kw):
        """A whole turn that is served at once."""
        request = f"{program}-{self.now}-{len(self.hit_tokens)}"
        self.arrive(request, contents, program)
        self.step()
        assert request in self.running
        if new:
            assert self.grow(request, new)
        self.finish(request, calls, **kw)
        return self.hit_tokens[request]

    def apply(self, victims):
        for victim in victims:
            blocks = self.leases[victim.lease_id]
            assert 0 < victim.blocks <= len(blocks)
            tail = blocks[-victim.blocks :]
            del blocks[-victim.blocks :]
            assert victim.ended == (not blocks)
            if victim.ended:
                del self.leases[victim.lease_id]
                self.ended.add(victim.lease_id)
            self.release(tail)

    def allocate(self, count, request, running):
        rounds = 0
        while len(self.free) < count:
            demand = Demand(count - len(self.free), request, running, stalled=not self.running)
            victims = self.policy.blocks_needed(demand)
            if not victims:
                return None
            self.apply(victims)
            rounds += 1
            assert rounds <= self.total
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            if self.cached.get(self.content[block]) == block:
                del self.cached[self.content[block]]
            self.content[block] = None
            self.ref[block] = 1
        return taken

    def fill(self, block, content):
        self.content[block] = content
        self.cached.setdefault(content, block)

    def touch(self, blocks):
        for block in blocks:
            self.free.pop(block, None)
            self.ref[block] += 1

    def release(self, blocks):
        for block in reversed(blocks):
            self.ref[block] -= 1
            assert self.ref[block] >= 0
            if self.ref[block] == 0:
                self.free[block] = None

    def check(self):
        """free + used + pinned = total, references add up, and the policy's books are the engine's."""
        held = [0] * self.total
        for blocks in (*(b for b, _ in self.running.values()), *self.leases.values()):
            for block in blocks:
                held[block] += 1
        assert held == self.ref
        used = {b for blocks, _ in self.running.values() for b in blocks}
        pinned = {b for blocks in self.leases.values() for b in blocks} - used
        assert len(self.free) + len(used) + len(pinned) == self.total
        assert set(self.free) == {b for b in range(self.total) if self.ref[b] == 0}
        pins = self.policy.pins
        assert {lease.id: lease.blocks for lease in pins} == {i: len(b) for i, b in self.leases.items()}
        assert len({lease.key for lease in pins}) == len(pins)
        assert pins.used == sum(lease.charge for lease in pins) <= pins.budget_blocks
        assert not self.ended & set(self.leases)


@pytest.fixture
def engine():
    """Makes an Engine; what it made is checked when the test ends."""
    made = []

    def make(*args, **kwargs):
        made.append(Engine(*args, **kwargs))
        return made[-1]

    make.type = Engine
    yield make
    for each in made:
        each.check()
