"""Leases beside vLLM's SimpleCPUOffloadConnector, whose scheduler side walks the free queue and holds blocks too. Its
worker needs CUDA, so what its transfers would move is kept here: for every block, which tokens it holds.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.simple_kv_offload.metadata", reason="drives a connector of vLLM")

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import BLOCK, FakeEngine

PAGE = 1 << 16  # bytes of a block, of one layer
LATENCY = 3  # steps that a transfer takes


class OffloadingEngine(FakeEngine):
    """FakeEngine with the connector. held, offloaded: {block id: the hash of its tokens}, in both memories."""

    def __init__(self, blocks: int, lazy: bool) -> None:
        from vllm.config import KVTransferConfig
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

        super().__init__(blocks)
        plain = self.scheduler
        config = copy.copy(plain.vllm_config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 4 * blocks * PAGE, "lazy_offload": lazy},
        )
        number = plain.kv_cache_config.num_blocks
        tensor = KVCacheTensor(number * PAGE, layers=["layer"], layer_stride=number * PAGE, block_stride=PAGE)
        self.scheduler = type(plain)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(number, [tensor], plain.kv_cache_config.kv_cache_groups),
            structured_output_manager=plain.structured_output_manager,
            block_size=BLOCK,
        )
        self.scheduler.max_num_scheduled_tokens = 256
        self.held: dict[int, Any] = {}
        self.offloaded: dict[int, Any] = {}
        self.loaded = 0
        self._moving: deque[tuple[int, Any]] = deque()

    def step(self, seconds: float = 0.05) -> bool:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        self.now += seconds
        self.steps += 1
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        self._compute(scheduled)
        moves = scheduled.kv_connector_metadata
        if moves.load_event >= 0 or moves.store_event >= 0:
            self._moving.append((self.steps + LATENCY, moves))
        received: set[str] = set()
        stored: dict[int, int] = {}
        while self._moving and (self._moving[0][0] <= self.steps or moves.need_flush):
            moved = self._moving.popleft()[1]
            for here, there in zip(moved.load_gpu_blocks, moved.load_cpu_blocks, strict=True):
                self.held[here] = self.offloaded[there]
            for here, there in zip(moved.store_gpu_blocks, moved.store_cpu_blocks, strict=True):
                self.offloaded[there] = self.held[here]
            self.loaded += len(moved.load_gpu_blocks)
            received |= set(moved.load_event_to_reqs.get(moved.load_event, ()))
            if moved.store_event >= 0:
                stored[moved.store_event] = 1
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [[self._sample(request_id)] if self._complete(request_id, scheduled) else [] for request_id in ids]
        output = ModelRunnerOutput(
            ids,
            {r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=received or None,
                kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
            ),
        )
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
        return True

    def settle(self) -> None:
        """All requests end, and then all transfers, of which blocks that a lease has just left begin new ones."""
        self.run()
        for _ in range(4 * LATENCY):
            self.step()

    def _compute(self, scheduled: Any) -> None:
        """Every request reads the blocks before its new tokens, which must hold its own tokens, and writes the rest."""
        group = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # the scheduler has counted the new ones already
            blocks = group.req_to_blocks[request_id]
            for i in range((end - count) // BLOCK):
                assert self.held[blocks[i].block_id] == request.block_hashes[i], (request_id, i)
            for i in range((end - count) // BLOCK, -(-end // BLOCK)):
                full = (i + 1) * BLOCK <= end and i < len(request.block_hashes)
                self.held[blocks[i].block_id] = request.block_hashes[i] if full else (request_id, i)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_every_block_that_is_read_holds_the_tokens_of_its_reader(lazy, hard):
    """Random agents, others, and clients that go away, over a pool that is always too small: leased, offloaded, loaded
    and computed blocks are never taken for one another, and all of them come back.
    """
    fake = OffloadingEngine(96, lazy)
    start = fake.free
    retention = fake.enable("fixed", hard=hard, budget=0.7, ttl_s=8.0)
    rng = random.Random(0)
    turns: dict[str, list[int]] = {f"agent{i}": fake.tokens(rng.randint(60, 300)) for i in range(6)}
    flying: dict[str, str] = {}
    for _ in range(1000):
        for name, tokens in turns.items():
            if name not in flying and rng.random() < 0.08:
                if len(tokens) > 600:
                    tokens = fake.tokens(rng.randint(60, 300))
                turns[name] = tokens = tokens + fake.tokens(rng.randint(1, 40))
                flying[name] = fake.add(tokens, rng.randint(1, 20), name, kvq_tool_pending=rng.random() < 0.2)
        if rng.random() < 0.04:
            fake.add(rng.randint(20, 500), 2)
        if flying and rng.random() < 0.02:
            fake.abort(flying[rng.choice(list(flying))])
        fake.step()
        for name, request_id in list(flying.items()):
            if request_id not in fake.scheduler.requests:
                del flying[name]
                turns[name] = turns[name] + fake.outputs[request_id]
        fake.check()
    metrics = retention.metrics()
    assert metrics["kvq_reuse_total"] > 10 and fake.loaded > 10 and fake.offloaded, "both were at work"
    fake.run()
    fake.check()
    assert retention.faults == []
    retention.disable()
    fake.settle()
    fake.check()
    assert fake.free == start
