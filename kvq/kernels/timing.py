"""Timing on a GPU: CUDA-graph replays over inputs that rotate, so that no call finds its data in L2."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvq.kernels.decode import decode
from kvq.kernels.device import DeviceTransform
from kvq.kernels.quantize import write
from kvq.ops import new_status, write_pages
from kvq.page import PageLayout
from kvq.plan import DecodePlan
from kvq.reference import HotPool, offset
from kvq.transform import KeyTransform
from kvq.tuned import DecodeConfig, WriteConfig

CHUNK = 2048  # pages that are really quantized; the rest repeat them in another order
CALLS = 10  # least calls in a graph: the launch of a replay is shared by them
REST_S = 0.1  # before each: at the power limit of an H200, what ran before lowers the clocks, by up to a quarter
WARM_S = 0.02  # of replays before any is timed


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph of ``calls`` in turn, repeated to at least CALLS calls, and how many calls it holds; after a rest,
    replayed for WARM_S seconds."""
    repeats = -(-CALLS // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    time.sleep(REST_S)
    start = time.perf_counter()
    while time.perf_counter() < start + WARM_S:
        graph.replay()
        torch.cuda.synchronize()
    return graph, repeats * len(calls)


def graph_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay. The GPU is kept busy first, so that the launch itself is not timed."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def replay_us(calls: Sequence[Callable[[], Any]], replays: int = 7) -> float:
    """Median microseconds of one call, over ``replays`` replays of the graph of ``calls``."""
    graph, count = capture(calls)
    return statistics.median(graph_us(graph) for _ in range(replays)) / count


@dataclass
class DecodeInputs:
    """A decode batch over several caches of the same lengths. ``caches``: pages and hot pool of each."""

    layout: PageLayout
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    caches: list[tuple[torch.Tensor, HotPool | None]]
    query: torch.Tensor
    source: KeyTransform | None
    transform: DeviceTransform | None

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V that one call must read: whole quantized pages, and hot pages in their own precision."""
        size = self.layout.page_size
        pages = sum(-(-n // size) for n in self.seq_lens.tolist())
        hot = self.caches[0][1]
        hot_pages = 0 if hot is None else hot.pool.shape[0]
        return (pages - hot_pages) * self.layout.page_bytes + hot_pages * self.layout.native_page_bytes

    def plan(self, config: DecodeConfig | None = None) -> DecodePlan:
        """A plan of these lengths, updated; ``config`` None picks the tuned one."""
        num_seqs, q_len, heads, _ = self.query.shape
        hot = self.caches[0][1]
        plan = DecodePlan(
            self.layout,
            heads,
            num_seqs,
            self.block_tables.shape[1] * self.layout.page_size,
            q_len=q_len,
            hot=hot is not None,
            pairs=0 if self.transform is None else self.transform.pairs,
            device=self.query.device,
            config=config,
        )
        plan.update(self.block_tables, self.seq_lens, hot)
        return plan

    def calls(self, plan: DecodePlan, out: torch.Tensor) -> list[Callable[[], None]]:
        """Decode and merge over each cache, into ``out``."""
        lse = torch.empty(self.query.shape[:3], dtype=torch.float32, device=out.device)
        scale = self.layout.head_dim**-0.5
        return [
            partial(
                decode, plan, self.query, pages, self.block_tables, self.seq_lens, scale, out, lse, self.transform, hot
            )
            for pages, hot in self.caches
        ]


def log_uniform(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths of a ragged batch, spread evenly in their logarithm."""
    step = math.log(longest / shortest) / (count - 1)
    return tuple(round(shortest * math.exp(i * step)) for i in range(count))


def decode_inputs(
    layout: PageLayout,
    heads: int,
    seq_lens: Sequence[int],
    *,
    q_len: int = 1,
    sink: bool = False,
    recent: int = 0,
    transform: KeyTransform | None = None,
    dtype: torch.dtype = torch.bfloat16,
    least_bytes: int = 0,
    device: torch.device | str = "cuda",
) -> DecodeInputs:
    """Random caches, quantized by the write kernel, in pages of random order; keys have the offset of ``transform``.

    sink: the first page of each sequence is hot. recent: so are the pages of as many last tokens. least_bytes: caches
    are added until together they are as large (rotation beyond L2).
    """
    g = torch.Generator(device).manual_seed(0)
    size, kv_heads, head_dim = layout.page_size, layout.kv_heads, layout.head_dim
    counts = [-(-n // size) for n in seq_lens]
    num_pages = sum(counts)
    width = -(-max(counts) // 16) * 16  # rows aligned alike for every batch: one compiled kernel
    block_tables = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
    order = torch.randperm(num_pages, generator=g, device=device).to(torch.int32)
    is_hot = torch.zeros(num_pages, dtype=torch.bool, device=device)
    first_token = torch.zeros(num_pages, dtype=torch.int64, device=device)
    used = 0
    for i, count in enumerate(counts):
        row = order[used : used + count]
        block_tables[i, :count] = row
        first_token[row.long()] = torch.arange(count, device=device) * size
        used += count
        if sink:
            is_hot[row[0].long()] = True
        if recent:
            is_hot[row[max(0, seq_lens[i] - recent) // size :].long()] = True
    tables = None if transform is None else DeviceTransform.build(transform, size, max(seq_lens) + size, device)
    caches = []
    for _ in range(max(1, -(-least_bytes // (num_pages * layout.page_bytes)))):
        pages = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        chunk = min(num_pages, CHUNK)
        shape = (chunk * size, kv_heads, head_dim)
        key, value = (torch.randn(shape, generator=g, device=device).to(dtype) for _ in range(2))
        if transform is not None and transform.mu is not None:  # at position 0, as all are written
            key += offset(transform, torch.zeros(1, dtype=torch.int64, device=device)).to(dtype)
        slots = torch.arange(chunk * size, device=device)
        write_pages(pages[:chunk], layout, key, value, slots, torch.zeros_like(slots), tables, check="flag")
        for start in range(chunk, num_pages, chunk):
            count = min(chunk, num_pages - start)
            pages[start : start + count] = pages[torch.randperm(chunk, generator=g, device=device)[:count]]
        hot = None
        if sink or recent:
            index = torch.where(is_hot, is_hot.cumsum(0) - 1, -1).to(torch.int32)
            pool = torch.randn(int(is_hot.sum()), 2, kv_heads, size, head_dim, generator=g, device=device)
            if transform is not None and transform.mu is not None:
                for slot, start in enumerate(first_token[is_hot].tolist()):
                    pool[slot, 0] += offset(transform, start + torch.arange(size, device=device)).transpose(0, 1)
            hot = HotPool(pool.to(dtype), index)
        caches.append((pages, hot))
    query = torch.randn(len(counts), q_len, heads, head_dim, generator=g, device=device).to(dtype)
    lens = torch.tensor(list(seq_lens), dtype=torch.int32, device=device)
    return DecodeInputs(layout, block_tables, lens, caches, query, transform, tables)


@dataclass
class WriteInputs:
    """Tokens to quantize, several sets of them, with the same slots. ``tokens``: K and V of each set."""

    layout: PageLayout
    pages: torch.Tensor
    slots: torch.Tensor
    tokens: list[tuple[torch.Tensor, torch.Tensor]]
    positions: torch.Tensor
    transform: DeviceTransform | None
    status: torch.Tensor

    @property
    def bytes_moved(self) -> int:
        """Bytes of K and V that one call reads, and of what it writes."""
        key, value = self.tokens[0]
        written = key.shape[0] * self.layout.page_bytes // self.layout.page_size
        return key.nbytes + value.nbytes + written

    def calls(self, config: WriteConfig | None = None) -> list[Callable[[], None]]:
        """The write of each set; ``config`` None picks the tuned one."""
        pages, layout, slots, status = self.pages, self.layout, self.slots, self.status
        return [
            partial(write, pages, layout, key, value, slots, status, self.positions, self.transform, config=config)
            for key, value in self.tokens
        ]


def write_inputs(
    layout: PageLayout,
    count: int,
    *,
    transform: KeyTransform | None = None,
    least_bytes: int = 0,
    device: torch.device | str = "cuda",
) -> WriteInputs:
    """``count`` random tokens: a prefill chunk, which fills its pages in order, or up to a page of a decode batch.

    At least 8 sets, and as many as are together as large as ``least_bytes``, but at most 64: chunks rotate beyond L2; a
    decode batch's K and V come from L2 in a model too.
    """
    g = torch.Generator(device).manual_seed(0)
    size = layout.page_size
    num_pages = max(64, -(-count // size))
    pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(num_pages * size, generator=g, device=device)[:count]
    if count > size:
        slots = torch.arange(count, device=device)
    shape = (count, layout.kv_heads, layout.head_dim)
    sets = min(64, max(8, -(-least_bytes // (4 * count * layout.kv_heads * layout.head_dim))))
    tokens = [
        (
            torch.randn(shape, generator=g, device=device).to(torch.bfloat16),
            torch.randn(shape, generator=g, device=device).to(torch.bfloat16),
        )
        for _ in range(sets)
    ]
    tables = None if transform is None else DeviceTransform.build(transform, size, count, device)
    positions = torch.arange(count, device=device)
    return WriteInputs(layout, pages, slots, tokens, positions, tables, new_status(device))


def in_processes(jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], processes: int) -> None:
    """Call every function of ``jobs`` with its arguments in fresh processes: kernels compile side by side into
    Triton's cache.

    A job that fails says so on stderr and is left; whoever then needs its kernel meets the error itself.
    """
    if jobs:
        with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
            pool.starmap(_attempt, jobs, chunksize=1)


def _attempt(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    except Exception as error:
        print(f"{work.__name__}{arguments}: {error!r}", file=sys.stderr)
