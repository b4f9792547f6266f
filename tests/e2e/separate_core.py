"""One engine whose core is a process of its own, driven as its mode says; prints OK. Run by test_engine_processes.py.

python separate_core.py spawn-async | fork-tp2 | fork-dp2 | fork-without-plugin
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.soak import made_up_llama

BLOCK, BLOCKS = 32, 40
RANDOM = random.Random(0)


def arguments(**more: Any) -> dict[str, Any]:
    return {
        "model": made_up_llama(),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 4,
        "seed": 0,
        **more,
    }


def tokens(count: int) -> list[int]:
    return [RANDOM.randrange(3, 500) for _ in range(count)]


def sampling(output: int, **extra: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra or None)


def fork_the_core() -> None:
    """As GPU servers do by default; vLLM on a CPU spawns whatever VLLM_WORKER_MULTIPROC_METHOD says. Workers spawn."""
    from vllm.v1.engine import coordinator, utils

    context = multiprocessing.get_context("fork")
    utils.get_mp_context = coordinator.get_mp_context = lambda: context


def turn(llm: Any, prompt: list[int], output: int = 4, **extra: Any) -> Any:
    return llm.generate([{"prompt_token_ids": prompt}], sampling(output, **extra), use_tqdm=False)[0]


def tp2() -> None:
    """Two workers, `enable` on the running engine, all the calls, and the engine as it was afterwards."""
    from vllm import LLM

    import integration

    llm = LLM(**arguments(tensor_parallel_size=2))
    assert integration.status(llm)["enabled"] is False
    stock = turn(llm, prompt := tokens(200), 6).outputs[0].token_ids
    with integration.enable(llm, policy="fixed", ttl_s=600.0, guardrail=False) as handle:
        first = turn(llm, prompt, 6, kvq_program_id="agent", kvq_tool_name="bash")
        assert first.outputs[0].token_ids == stock
        assert first.kv_transfer_params["kvq"]["blocks"] == 6
        assert handle.programs()[0]["state"] == "waiting_tool"
        for _ in range(3):
            turn(llm, tokens(600), 2)
        again = turn(llm, prompt + list(first.outputs[0].token_ids) + tokens(20), kvq_program_id="agent")
        assert again.num_cached_tokens == 192, again.num_cached_tokens
        assert handle.metrics()["kvq_reuse_total"] == 1
        handle.release("agent")
        assert handle.status()["leases"] == 0
        turn(llm, prompt, 2, kvq_program_id="agent")
        assert llm.reset_prefix_cache() and handle.status()["leases"] == 0
        try:
            integration.enable(llm)
        except integration.IntegrationError as error:
            assert "enabled already" in str(error)
        else:
            raise AssertionError("enabled twice")
        assert handle.status()["faults"] == []
    status = integration.status(llm)
    assert status["enabled"] is False and status["faults"] == []
    assert turn(llm, prompt, 6).outputs[0].token_ids == stock
    print("OK")


async def async_llm() -> None:
    """AsyncLLM, the plugin loaded by vLLM, KVQ_CONFIG: on from the start. Two at once, a client that goes away."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import integration

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments()))

    async def one(name: str, prompt: list[int], output: int, leave_after: int | None = None, **extra: Any) -> Any:
        last = None
        async for answer in engine.generate({"prompt_token_ids": prompt}, sampling(output, **extra), name):
            last = answer
            if leave_after is not None and len(answer.outputs[0].token_ids) >= leave_after:
                break
        return last

    status = await integration.astatus(engine)
    assert status["enabled"] and status["policy"] == "fixed", status
    prompts = [tokens(200), tokens(200)]
    first = await asyncio.gather(
        *[one(f"first{i}", prompt, 6, kvq_program_id=f"agent{i}") for i, prompt in enumerate(prompts)]
    )
    assert all(answer.kv_transfer_params["kvq"]["retained"] for answer in first)
    await one("gone", tokens(200), 700, leave_after=3, kvq_program_id="gone")
    for i in range(3):
        await one(f"filler{i}", tokens(600), 2)
    again = await one("again", prompts[1] + list(first[1].outputs[0].token_ids) + tokens(9), 2, kvq_program_id="agent1")
    assert again.num_cached_tokens == 192, again.num_cached_tokens
    from integration.client import connect

    rows = {row["program"]: row for row in (await connect(engine).acall("programs"))["programs"]}
    assert rows["gone"]["state"] == "idle" and rows["gone"]["blocks"] == 0 and rows["agent0"]["blocks"] == 6
    try:
        connect(engine).call("status")
    except integration.IntegrationError as error:
        assert "await" in str(error)
    assert (await integration.adisable(engine))["enabled"] is False
    async with await integration.aenable(engine, policy="value") as handle:
        assert (await handle.connection.acall("status"))["policy"] == "value"
    await pause_and_sleep(engine, one)
    status = await integration.astatus(engine)
    assert status["enabled"] is False and status["faults"] == []
    engine.shutdown()
    print("OK")


async def pause_and_sleep(engine: Any, one: Any) -> None:
    """Whatever clears the cache ends hard leases first and succeeds; what leaves the KV alone leaves them alone."""
    import integration

    handle = await integration.aenable(engine, policy="fixed", ttl_s=600.0, hard=True, guardrail=False)

    async def status() -> dict[str, Any]:
        return await handle.connection.acall("status")

    for number, (act, undo, kept) in enumerate(
        [
            (lambda: engine.pause_generation(mode="abort"), engine.resume_generation, False),
            (lambda: engine.pause_generation(mode="wait"), engine.resume_generation, False),
            (lambda: engine.pause_generation(mode="keep"), engine.resume_generation, False),
            (lambda: engine.pause_generation(mode="keep", clear_cache=False), engine.resume_generation, True),
            (lambda: engine.sleep(0), lambda: engine.wake_up(["scheduling"]), True),
            (lambda: engine.sleep(1), engine.wake_up, False),
            (lambda: engine.sleep(2), engine.wake_up, False),
            (lambda: engine.reset_prefix_cache(reset_running_requests=True), engine.resume_generation, False),
        ]
    ):
        prompt = tokens(200)
        first = await one(f"pause{number}", prompt, 4, kvq_program_id="agent")
        assert (await status())["leases"] == 1
        await act()
        assert (await status())["leases"] == kept, number
        assert kept or (await status())["free_blocks"] == BLOCKS - 1, number
        await undo()
        again = prompt + list(first.outputs[0].token_ids) + tokens(9)
        again = await one(f"resumed{number}", again, 2, kvq_program_id="agent", kvq_release=True)
        assert again.num_cached_tokens == 192 * kept, (number, again.num_cached_tokens)
    # A request that runs while the cache is cleared starts again afterwards, and its turn is retained.
    running = asyncio.create_task(one("kept", tokens(200), 200, kvq_program_id="runs"))
    while not any(row["state"] == "running" for row in (await handle.connection.acall("programs"))["programs"]):
        await asyncio.sleep(0.01)
    await engine.pause_generation(mode="keep")
    await engine.resume_generation()
    assert len((await running).outputs[0].token_ids) == 200
    assert (await status())["leases"] == 1 and (await status())["faults"] == []
    assert (await integration.adisable(engine))["faults"] == []


async def dp2() -> None:
    """Two engine cores behind one AsyncLLM: each has its own leases, and calls reach both."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import integration

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(data_parallel_size=2)))

    async def one(name: str, rank: int, prompt: list[int], output: int = 4, **extra: Any) -> Any:
        last = None
        sent = {"prompt_token_ids": prompt}
        async for answer in engine.generate(sent, sampling(output, **extra), name, data_parallel_rank=rank):
            last = answer
        return last

    events = Path(tempfile.mkdtemp(prefix="kvq-dp-"), "events.jsonl")
    handle = await integration.aenable(engine, policy="fixed", ttl_s=600.0, guardrail=False, events=events)

    async def ask(op: str, **payload: Any) -> Any:
        return await handle.connection.acall(op, **payload)

    turns = [await one(f"first{rank}", rank, tokens(200), kvq_program_id=f"agent{rank}") for rank in (0, 1)]
    assert [status["leases"] for status in (await ask("status"))["engines"]] == [1, 1]
    assert {(row["program"], row["engine"]) for row in (await ask("programs"))["programs"]} == {
        ("agent0", 0),
        ("agent1", 1),
    }
    for i in range(6):
        await one(f"filler{i}", i % 2, tokens(600), 2)
    for rank, first in enumerate(turns):
        prompt = first.prompt_token_ids + list(first.outputs[0].token_ids) + tokens(9)
        for at in (1 - rank, rank):  # the other engine has none of its KV
            again = await one(f"again{rank}-{at}", at, prompt, 2, kvq_program_id=f"agent{rank}")
            assert again.num_cached_tokens == (192 if at == rank else 0), (rank, at, again.num_cached_tokens)
    metrics = await ask("metrics")
    assert metrics["kvq_reuse_total"] == 2 and metrics["kvq_pins"] == 4 and metrics["kvq_enabled"] == 1
    assert (await ask("release", program_id="agent1"))["released"] == 2
    assert await engine.reset_prefix_cache() and (await ask("metrics"))["kvq_pins"] == 0
    last = await integration.adisable(engine)
    assert last["enabled"] is False and [core["faults"] for core in last["engines"]] == [[], []]
    for rank, name in enumerate(("events.jsonl", "events-dp1.jsonl")):
        assert events.with_name(name).read_text().count('"event":"reuse"') == 1, rank
    engine.shutdown()
    print("OK")


def without_plugin() -> None:
    """VLLM_PLUGINS keeps kvq out of the engine core: `enable` says what to do, and the engine goes on."""
    from vllm import LLM

    import integration

    llm = LLM(**arguments())
    try:
        integration.enable(llm)
    except integration.IntegrationError as error:
        assert "VLLM_PLUGINS" in str(error), error
    else:
        raise AssertionError("enabled without the plugin")
    assert len(turn(llm, tokens(50), 3).outputs[0].token_ids) == 3
    print("OK")


if __name__ == "__main__":
    method, _, mode = sys.argv[1].partition("-")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_WORKER_MULTIPROC_METHOD=method,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    if mode in ("tp2", "dp2"):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if mode == "without-plugin":
        os.environ["VLLM_PLUGINS"] = "none"
    if mode == "async":
        os.environ["KVQ_CONFIG"] = '{"policy": "fixed", "ttl_s": 600, "guardrail": false}'
    if method == "fork":
        fork_the_core()
    if mode == "tp2":
        tp2()
    elif mode == "without-plugin":
        without_plugin()
    else:
        asyncio.run(dp2() if mode == "dp2" else async_llm())
