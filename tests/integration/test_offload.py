"""Leases beside vLLM's offloading connectors. Their scheduler sides walk the free queue, hold blocks of their own, or
watch which are handed out. Their workers need CUDA, so what they would move is kept here: for every block, which tokens
it holds.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm.v1.simple_kv_offload.metadata", reason="drives a connector of vLLM")

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import BLOCK, FakeEngine

PAGE = 1 << 16  # bytes of a block, of one layer
LATENCY = 3  # steps that a transfer takes


class Move(NamedTuple):
    """A transfer under way. pairs: (from, to) blocks. done: the step at which it ends. requests: that wait for it."""

    key: int
    load: bool
    pairs: list[tuple[int, int]]
    requests: list[str]
    done: int


class OffloadingEngine(FakeEngine):
    """FakeEngine with a connector. held, offloaded: {block id: the hash of its tokens}, in both memories."""

    def __init__(self, blocks: int, connector: str, **extra: Any) -> None:
        from vllm.config import KVTransferConfig
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

        super().__init__(blocks)
        plain = self.scheduler
        config = copy.copy(plain.vllm_config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 4 * blocks * PAGE, **extra},
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
        self._moving: list[Move] = []

    def step(self, seconds: float = 0.05) -> bool:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.now += seconds
        self.steps += 1
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        began, urgent, completed = self._transfers(scheduled.kv_connector_metadata)
        ended = self._move(lambda move: move.key in urgent and not move.load)
        self._compute(scheduled)
        self._moving += began
        ended += self._move(lambda move: move.done <= self.steps)
        received = {request_id for move in ended for request_id in move.requests}
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [[self._sample(request_id)] if self._complete(request_id, scheduled) else [] for request_id in ids]
        output = ModelRunnerOutput(
            ids,
            {r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=received or None, kv_connector_worker_meta=completed(ended) if ended else None
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

    def _transfers(self, plan: Any) -> tuple[list[Move], set[int], Callable[[list[Move]], Any]]:
        """Those that a step begins; the stores that must end before it computes; how to say which have ended."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

        done, began = self.steps + LATENCY, []
        if isinstance(plan, SimpleCPUOffloadMetadata):
            if plan.load_event >= 0:
                pairs = list(zip(plan.load_cpu_blocks, plan.load_gpu_blocks, strict=True))
                began.append(Move(plan.load_event, True, pairs, plan.load_event_to_reqs[plan.load_event], done))
            if plan.store_event >= 0:
                pairs = list(zip(plan.store_gpu_blocks, plan.store_cpu_blocks, strict=True))
                began.append(Move(plan.store_event, False, pairs, [], done))
            urgent = {move.key for move in self._moving} if plan.need_flush else set()
            return began, urgent, lambda ended: SimpleCPUOffloadWorkerMetadata({m.key: 1 for m in ended if not m.load})
        for jobs, load in ((plan.load_jobs, True), (plan.store_jobs, False)):
            for key, job in jobs.items():
                pairs = list(zip(job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True))
                began.append(Move(key, load, pairs, [job.req_id] if load else [], done))
        urgent = plan.jobs_to_flush or set()
        for move in [move for move in began if move.key in urgent]:
            began.remove(move)
            self._moving.append(move)
        return began, urgent, lambda ended: OffloadingWorkerMetadata({m.key: 1 for m in ended})

    def _move(self, which: Callable[[Move], bool]) -> list[Move]:
        ended = [move for move in self._moving if which(move)]
        self._moving = [move for move in self._moving if not which(move)]
        for move in ended:
            here, there = (self.offloaded, self.held) if move.load else (self.held, self.offloaded)
            for source, target in move.pairs:
                there[target] = here[source]
            self.loaded += len(move.pairs) * move.load
        return ended

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
@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("SimpleCPUOffloadConnector", {"lazy_offload": False}),
        ("SimpleCPUOffloadConnector", {"lazy_offload": True}),
        ("OffloadingConnector", {}),
    ],
    ids=["simple eager", "simple lazy", "offloading"],
)
def test_every_block_that_is_read_holds_the_tokens_of_its_reader(connector, extra, hard):
    """Random agents, others, and clients that go away, over a pool that is always too small: leased, offloaded, loaded
    and computed blocks are never taken for one another, and all of them come back.
    """
    fake = OffloadingEngine(96, connector, **extra)
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
