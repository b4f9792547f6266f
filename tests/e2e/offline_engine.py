"""Run by test_frontend_engine.py in a process of its own: what a user of an offline engine sees, as JSON."""

import json
import sys
import urllib.request

from prometheus_client import REGISTRY, generate_latest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

import integration
from bench.models import model_path
from integration import exporter

TOOL_CALL = '<tool_call>\n{"name": "run_tests", "arguments": {"command": "pytest -q"}}\n</tool_call>'
SCHEDULER = ("add_request", "schedule", "update_from_output", "reset_prefix_cache", "_free_request")


def touched(llm: LLM) -> list[str]:
    """What of kvq's is in the engine."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    found = [name for name in ("add_request", "_finish_request") if name in vars(engine.output_processor)]
    found += [name for name in SCHEDULER if name in vars(scheduler)]
    queue = type(scheduler.kv_cache_manager.block_pool.free_block_queue).__name__
    return found + ([queue] if queue != "FreeKVCacheBlockQueue" else [])


def main() -> None:
    llm = LLM(
        model=str(model_path("smollm2-135m")),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=41,
        max_num_seqs=4,
        seed=0,
    )
    seen: dict[str, object] = {"stock": touched(llm), "page": "kvq_" in generate_latest(REGISTRY).decode()}
    prompt = "The log of the night: " + " ".join(f"at {i} service {i % 7} was slow." for i in range(20))
    forced = SamplingParams(
        temperature=0.0, max_tokens=80, structured_outputs=StructuredOutputsParams(choice=[TOOL_CALL])
    )
    exporter.REFRESH_S = 0.0  # at every step: a quick machine is done within a second
    with integration.enable(llm) as handle:
        served = exporter.serve(llm, port=0)
        seen["enabled"] = touched(llm)
        (answer,) = integration.generate(llm, [prompt], forced, program_id="a", use_tqdm=False)
        seen["receipt"] = integration.receipt(answer)
        seen["programs"] = handle.programs()
        stopped = forced.clone()
        stopped.stop = ["</tool_call>"]
        (answer,) = integration.generate(llm, [prompt + " Twice."], stopped, program_id="b", use_tqdm=False)
        seen["stopped"] = [answer.outputs[0].finish_reason, {p["program"]: p for p in handle.programs()}["b"]]
        (answer,) = integration.generate(
            llm, [prompt + TOOL_CALL], SamplingParams(max_tokens=2), program_id="a", release=True, use_tqdm=False
        )
        seen["released"] = integration.receipt(answer)
        llm.generate(["x"], SamplingParams(max_tokens=2), use_tqdm=False)
        with urllib.request.urlopen(f"{served.url}/metrics") as page:
            seen["served"] = page.read().decode()
        served.close()
    seen["disabled"] = touched(llm)
    print("RESULT", json.dumps(seen))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
