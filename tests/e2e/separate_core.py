"""One engine whose core is a process of its own, driven as its mode says; prints OK. Run by test_engine_processes.py.

python separate_core.py spawn-async | fork-tp2 | fork-without-plugin
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
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


def turn(llm: Any, prompt: list[int], output: int = 4, **extra: Any) -> Any:
    return llm.generate([{"prompt_token_ids": prompt}], sampling(output, **extra), use_tqdm=False)[0]


def fork_tp2() -> None:
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


async def spawn_async() -> None:
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
    status = await integration.astatus(engine)
    assert status["enabled"] is False and status["faults"] == []
    engine.shutdown()
    print("OK")


def fork_without_plugin() -> None:
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
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_WORKER_MULTIPROC_METHOD=sys.argv[1].partition("-")[0],
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    if sys.argv[1] == "spawn-async":
        os.environ["KVQ_CONFIG"] = '{"policy": "fixed", "ttl_s": 600, "guardrail": false}'
        asyncio.run(spawn_async())
    elif sys.argv[1] == "fork-tp2":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        fork_tp2()
    else:
        os.environ["VLLM_PLUGINS"] = "none"
        fork_without_plugin()
