"""Random agents on a real engine until the time is up: ``python -m bench.soak --minutes 10``.

Agents with tool pauses, plain requests, clients that go away in every state, programs that are released or change
their prompts, long requests that need the whole pool, resets of the prefix cache, retention disabled and enabled again.
At the end nothing may be left: every block is free again, no lease, no fault. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.arguments import number

BLOCK = 32
MAX_TOKENS = 1024
VOCABULARY = 512


def made_up_llama() -> str:
    """Folder of a two-layer llama, for `load_format="dummy"`: an engine whose steps take milliseconds."""
    folder = tempfile.mkdtemp(prefix="kvq-llama-")
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    Path(folder, "config.json").write_text(json.dumps(shape))
    return folder


@dataclass
class Agent:
    """A program: what it has said so far, when it returns, and the request it waits for."""

    name: str
    tokens: list[int]
    back_at: float = 0.0
    request: str | None = None
    inside: str = ""  # the request's name in the core
    turns: int = 0
    named: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


class Soak:
    """llm: a `vllm.LLM` whose core is in this process, with `blocks` usable blocks."""

    def __init__(self, llm: Any, blocks: int, seed: int) -> None:
        self.llm, self.blocks = llm, blocks
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._random = random.Random(seed)
        self._requests: dict[str, Agent | None] = {}
        self._agents: list[Agent] = []
        self._number = 0
        self._handle: Any = None
        self._metrics: Counter[str] = Counter()

    @property
    def free(self) -> int:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def run(self, seconds: float, agents: int) -> None:
        """Drive the engine for so long, then let everything under way end."""
        self._enable()
        self._agents = [self._new_agent() for _ in range(agents)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._arrive()
            self._disturb()
            self._step()
            self._check_step()
        while self._requests:
            self._step()
        self._collect()
        self._handle.disable()

    def table(self) -> list[tuple[str, str]]:
        """What happened, row by row."""
        names = (
            "kvq_pins_total",
            "kvq_reuse_total",
            "kvq_reused_tokens_total",
            "kvq_misses_total",
            "kvq_expired_total",
        )
        rows = [(name, str(count)) for name, count in sorted(self.counts.items())]
        rows += [(name, f"{self._metrics[name]:.0f}") for name in names]
        rows += [(n, f"{v:.0f}") for n, v in sorted(self._metrics.items()) if n.startswith("kvq_evictions_total{")]
        return rows

    def _enable(self) -> None:
        import integration

        hard = self._random.random() < 0.3
        policy = self._random.choice(("value", "fixed", "continuum"))
        settings: dict[str, Any] = {"ttl_s": self._random.choice((1.0, 5.0, 60.0))} if policy == "fixed" else {}
        budget = self._random.choice((0.5, 1.0))
        self._handle = integration.enable(self.llm, policy=policy, hard=hard, budget=budget, **settings)
        self.counts[f"enabled, {'hard' if hard else 'soft'} leases"] += 1

    def _collect(self) -> None:
        status = self._handle.status()
        if status["faults"]:
            self.violations += [f"fault: {text}" for text in status["faults"]]
        for name, value in status.get("metrics", {}).items():
            if name.split("{")[0].endswith("_total"):
                self._metrics[name] += value

    def _new_agent(self) -> Agent:
        self._number += 1
        named = self._random.random() < 0.8
        extra: dict[str, Any] = {}
        if self._random.random() < 0.3:
            extra["kvq_tool_name"] = self._random.choice(("bash", "web_search", "edit"))
        if self._random.random() < 0.1:
            extra["kvq_ttl_s"] = self._random.choice((0.5, 30.0))
        if self._random.random() < 0.1:
            extra["kvq_tool_pending"] = True
        now = time.monotonic()
        return Agent(
            f"agent{self._number}", self._tokens(40, 400), now + self._random.random(), named=named, extra=extra
        )

    def _tokens(self, low: int, high: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(self._random.randint(low, high))]

    def _add(self, agent: Agent | None, prompt: list[int], output: int) -> None:
        from vllm import SamplingParams

        self._number += 1
        request = f"request{self._number}"
        extra = {} if agent is None else dict(agent.extra)
        if agent is not None and agent.named:
            extra["kvq_program_id"] = agent.name
        sampling = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args=extra or None, temperature=0, detokenize=False
        )
        inside = self.llm.llm_engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
        self._requests[request] = agent
        if agent is not None:
            agent.request, agent.inside = request, inside
        self.counts["requests of agents" if agent is not None else "plain requests"] += 1

    def _arrive(self) -> None:
        now = time.monotonic()
        for i, agent in enumerate(self._agents):
            if agent.request is not None or now < agent.back_at:
                continue
            if len(agent.tokens) > MAX_TOKENS - 150:
                if agent.named:
                    self._handle.release(agent.name)
                    self._handle.release(agent.name)  # twice is once
                    self.counts["released"] += 1
                self._agents[i] = self._new_agent()
                continue
            if self._random.random() < 0.05:
                keep = self._random.randrange(len(agent.tokens))
                agent.tokens = agent.tokens[:keep] + self._tokens(10, 40)
                self.counts["prompts that left their prefix"] += 1
            self._add(agent, agent.tokens, self._random.randint(1, 30))
        if len(self._requests) < 6 and self._random.random() < 0.1:
            if self._random.random() < 0.1:
                self._add(None, self._tokens(MAX_TOKENS - 40, MAX_TOKENS - 20), 4)
            else:
                self._add(None, self._tokens(20, 600), self._random.randint(1, 10))

    def _disturb(self) -> None:
        chance = self._random.random()
        if chance < 0.04 and self._requests:
            request = self._random.choice(list(self._requests))
            scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
            kind = "gone"
            for state in scheduler.requests.values():
                if state.request_id.startswith(f"{request}-"):
                    kind = state.status.name.lower()
                    if kind == "running":
                        kind = "decode" if state.num_output_tokens else "prefill"
            self.llm.llm_engine.abort_request([request])
            self._ended(request, None)
            self.counts[f"aborted in state {kind}"] += 1
        elif chance < 0.042:
            self.counts["resets that succeeded" if self.llm.reset_prefix_cache() else "resets refused, as in use"] += 1
        elif chance < 0.045:
            self._collect()
            self._handle.disable()
            self._enable()

    def _step(self) -> None:
        if not self.llm.llm_engine.has_unfinished_requests():
            time.sleep(0.005)
            return
        for output in self.llm.llm_engine.step():
            if output.finished and output.request_id in self._requests:
                self._ended(output.request_id, output)

    def _ended(self, request: str, output: Any) -> None:
        agent = self._requests.pop(request)
        if agent is None:
            return
        agent.request = None
        agent.turns += 1
        agent.back_at = time.monotonic() + self._random.choice((0.0, 0.05, 0.5, 3.0))
        if output is None:
            return
        self.counts["cached tokens"] += output.num_cached_tokens or 0
        self.counts["prompt tokens"] += len(output.prompt_token_ids)
        agent.tokens = output.prompt_token_ids + list(output.outputs[0].token_ids) + self._tokens(5, 60)
        if self._random.random() < 0.5:
            self._handle.connection.call(
                "tool_called",
                request_id=agent.inside,
                calls=[{"name": "bash", "arguments": '{"command": "ls"}'}] * self._random.randint(0, 2),
            )

    def _check_step(self) -> None:
        """At every moment when nothing runs, only hard leases may hold blocks."""
        core = self.llm.llm_engine.engine_core.engine_core
        if core.scheduler.requests:
            return
        leases = core.scheduler.kvq_retention.pool.leases.values() if hasattr(core.scheduler, "kvq_retention") else ()
        held = {block.block_id for lease in leases if lease.hard for block in lease.blocks}
        self.counts["checks while idle"] += 1
        if self.free + len(held) != self.blocks and len(self.violations) < 10:
            self.violations.append(f"idle: {self.free} free and {len(held)} held of {self.blocks}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").split("\n")[0])
    least = MAX_TOKENS // BLOCK  # one request may need them all
    parser.add_argument("--minutes", type=number(float, 0.01, 10_000), default=10.0)
    parser.add_argument("--agents", type=number(int, 1), default=12)
    parser.add_argument("--blocks", type=number(int, least), default=64, help=f"KV blocks of {BLOCK} tokens")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0)
    parser.add_argument("--model", default="made-up", help="made-up (two layers), or one of bench.models in float32")
    args = parser.parse_args(argv)
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
    from rich.console import Console
    from rich.table import Table
    from vllm import LLM

    from bench.models import model_path

    made_up = args.model == "made-up"
    llm = LLM(
        model=made_up_llama() if made_up else str(model_path(args.model)),
        load_format="dummy" if made_up else "auto",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_TOKENS,
        enforce_eager=True,
        block_size=BLOCK,
        num_gpu_blocks_override=args.blocks + 1,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        seed=args.seed,
    )
    soak = Soak(llm, args.blocks, args.seed)
    start = soak.free
    soak.run(60 * args.minutes, args.agents)
    end = soak.free
    table = Table("", "", title=f"Soak of {args.minutes:g} minutes, {args.model}, seed {args.seed}")
    for row in soak.table():
        table.add_row(*row)
    table.add_row("free blocks at the start and at the end", f"{start} {end}")
    table.add_row("violations", "\n".join(soak.violations) or "none")
    Console().print(table)
    return 0 if start == end and not soak.violations else 1


if __name__ == "__main__":
    sys.exit(main())
