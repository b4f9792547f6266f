"""vLLM's scheduler, block pool and request class with a model that makes up tokens: an engine core without a worker."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

from bench.simulate import make_scheduler
from integration.config import Config
from integration.scheduler import Retention

BLOCK = 16
EOS = 2


class FakeEngine:
    """Stands in for an EngineCore: `scheduler` is what `kvq_rpc` needs. ahead: batches scheduled before the last
    one's output is known, as with async scheduling.
    """

    def __init__(self, blocks: int = 64, *, ahead: int = 0, groups: int = 1, **changes: Any) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.scheduler = make_scheduler(blocks, BLOCK)
        if ahead or groups > 1 or changes:  # sliding_window: tokens that the last group sees
            self.scheduler = _another(self.scheduler, ahead, groups, changes)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._ahead = ahead
        self._flying: deque[Any] = deque()
        self._ids = itertools.count()
        self._random = random.Random(0)
        self.now = 100.0
        self.outputs: dict[str, list[int]] = {}
        self.receipts: dict[str, dict[str, Any]] = {}
        self.cached: dict[str, int] = {}
        self.steps = 0
        self.retention: Retention | None = None

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def enable(self, policy: str = "fixed", **settings: Any) -> Retention:
        if policy == "fixed":
            settings = {"ttl_s": 1000.0, **settings}
        config = Config.from_mapping({"policy": policy, "guardrail": False, **settings})
        self.retention = Retention(self.scheduler, config, clock=lambda: self.now)
        return self.retention

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100, 30000) for _ in range(count)]

    def add(
        self,
        prompt: list[int] | int,
        output: int = 4,
        program: str | None = None,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        **extra: Any,
    ) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        if isinstance(prompt, int):
            prompt = self.tokens(prompt)
        if program is not None:
            extra["kvq_program_id"] = program
        request_id = f"r{next(self._ids)}"
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra or None)
        lora = None if adapter is None else LoRARequest(adapter, 1, "/nowhere")
        request = Request(
            request_id,
            prompt,
            sampling,
            None,
            arrival_time=self.now,
            lora_request=lora,
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def step(self, seconds: float = 0.05) -> bool:
        """One step of the engine; False if nothing was scheduled and nothing was in flight."""
        from vllm.v1.outputs import ModelRunnerOutput

        self.now += seconds
        self.steps += 1
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        if scheduled.num_scheduled_tokens:
            self._flying.append(scheduled)
        if not self._flying or (scheduled.num_scheduled_tokens and len(self._flying) <= self._ahead):
            return bool(scheduled.num_scheduled_tokens)
        batch = self._flying.popleft()
        ids = list(batch.num_scheduled_tokens)
        sampled = [[self._sample(request_id)] if self._complete(request_id, batch) else [] for request_id in ids]
        output = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled)
        for outputs in self.scheduler.update_from_output(batch, output).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.kv_transfer_params and "kvq" in one.kv_transfer_params:
                    self.receipts[one.request_id] = one.kv_transfer_params["kvq"]
        return True

    def run(self, *request_ids: str, limit: int = 400) -> None:
        """Until these requests, by default all, have ended. Fails after `limit` steps."""
        for _ in range(limit):
            left = [r for r in request_ids if r in self.scheduler.requests]
            if not left and (request_ids or not self.scheduler.has_unfinished_requests()):
                break
            self.step()
        else:
            raise AssertionError(f"after {limit} steps: {list(self.scheduler.requests)} have not ended")
        while not request_ids and self._flying:
            self.step()

    def turn(self, prompt: list[int] | int, output: int = 4, program: str | None = None, **extra: Any) -> list[int]:
        """Add, run to its end; returns prompt and output: how the next prompt of the program begins."""
        if isinstance(prompt, int):
            prompt = self.tokens(prompt)
        self.last = self.add(prompt, output, program, **extra)
        self.run(self.last)
        return prompt + self.outputs[self.last]

    def flood(self, tokens: int, count: int) -> None:
        """Requests without a program, one after the other."""
        for _ in range(count):
            self.turn(tokens, 2)

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def check(self) -> None:
        """The books of vLLM's pool are consistent, with each other and with ours."""
        blocks = [b for b in self.pool.blocks if not b.is_null]
        queue = self.pool.free_block_queue
        free = queue.get_all_free_blocks()
        assert len(free) == self.free == len({b.block_id for b in free})
        assert {b.block_id for b in free} == {b.block_id for b in blocks if b.ref_cnt == 0}
        assert all(b.ref_cnt >= 0 for b in blocks)
        if self.retention is None or not self.retention.live:
            assert type(queue).__name__ == "FreeKVCacheBlockQueue"
            return
        ours = self.retention.pool
        held = [0] * self.pool.num_gpu_blocks
        for lease in ours.leases.values():
            for block in lease.blocks:
                held[block.block_id] += 1
                assert block.ref_cnt > 0 or not lease.hard
        assert held == ours._holds
        assert {lease.id for lease in self.retention.policy.pins} == set(ours.leases)
        for lease in self.retention.policy.pins:
            assert lease.blocks == len(ours.leases[lease.id].blocks)
        if ours.queue is not None:
            behind = [bool(held[b.block_id]) for b in free]
            assert behind == sorted(behind), "retained blocks stand behind all others"
            assert ours.queue.retained == sum(behind)

    def _complete(self, request_id: str, batch: Any) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return True
        return not request.is_prefill_chunk

    def _sample(self, request_id: str) -> int:
        return 40000 + (hash(request_id) + len(self.outputs.get(request_id, ()))) % 1000


def _another(plain: Any, ahead: int, groups: int, changes: dict[str, Any]) -> Any:
    """The scheduler again: of the class for async scheduling, or with several groups of layers."""
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    specs: list[Any] = [
        FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16)
        for heads in (8, 4)[:groups]
    ]
    if window := changes.pop("sliding_window", None):
        specs[-1] = SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=window
        )
    config = KVCacheConfig(
        num_blocks=plain.kv_cache_config.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
    )
    return (AsyncScheduler if ahead else type(plain))(
        vllm_config=plain.vllm_config,
        kv_cache_config=config,
        structured_output_manager=plain.structured_output_manager,
        block_size=BLOCK,
        **changes,
    )
