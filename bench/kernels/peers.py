"""Kernels of others on the same shapes, each at its best page size and number of splits; what is missing is named.

FlashAttention 3 comes from vLLM (``vllm.vllm_flash_attn``), with its scheduler's metadata computed beforehand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.kernels.measure import Shape, rotation_bytes
from kvq.kernels.timing import replay_us

Runs = Iterator[tuple[str, int, Sequence[Callable[[], Any]]]]  # settings, bytes read by a call, calls
PAGE_SIZES = (16, 64, 128)
SPLITS = (0, 4, 8, 16, 32)  # 0: the peer's own choice


class Best(NamedTuple):
    time_us: float
    settings: str
    bytes_read: int


class Batch:
    """Random paged K and V of a shape in bf16 or fp8, [num_pages, page_size, kv_heads, head_dim]."""

    def __init__(self, shape: Shape, page_size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.page_size, self.dtype = shape, page_size, dtype
        counts = [-(-n // page_size) for n in shape.lens]
        order = torch.randperm(sum(counts), device="cuda").to(torch.int32)
        self.block_tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        for row, pages in zip(self.block_tables, order.split(counts)):
            row[: len(pages)] = pages
        self.seq_lens = torch.tensor(shape.lens, dtype=torch.int32, device="cuda")
        pool = (len(order), page_size, shape.kv_heads, shape.head_dim)
        bytes_each = 2 * len(order) * page_size * shape.kv_heads * shape.head_dim * dtype.itemsize
        self.caches = [
            (self._random(pool), self._random(pool)) for _ in range(max(1, -(-rotation_bytes() // bytes_each)))
        ]
        self.query = self._random((len(counts), shape.heads, shape.head_dim))
        self.scale = shape.head_dim**-0.5

    @property
    def bytes_read(self) -> int:
        return 2 * sum(self.shape.lens) * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.dtype)


def fa3(shape: Shape, dtype: torch.dtype) -> Runs:
    """Settings, bytes and calls of FlashAttention 3 over each page size and number of splits."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    for page_size in PAGE_SIZES:
        batch = Batch(shape, page_size, dtype)
        num_seqs, longest = len(shape.lens), max(shape.lens)
        cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        ones = torch.ones(num_seqs, shape.kv_heads, device="cuda")
        descale = {} if dtype == torch.bfloat16 else {f"{x}_descale": ones for x in "qkv"}
        out = torch.empty(batch.query.shape, dtype=torch.bfloat16, device="cuda")
        for splits in SPLITS:
            if num_seqs >= 32 and splits > 8:
                continue
            metadata = flash.get_scheduler_metadata(
                batch_size=num_seqs, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=shape.heads,
                num_heads_kv=shape.kv_heads, headdim=shape.head_dim, cache_seqlens=batch.seq_lens, qkv_dtype=dtype,
                cu_seqlens_q=cu_seqlens, page_size=page_size, causal=True, num_splits=splits,
            )  # fmt: skip
            common: dict[str, Any] = dict(
                q=batch.query, out=out, cu_seqlens_q=cu_seqlens, max_seqlen_q=1, seqused_k=batch.seq_lens,
                max_seqlen_k=longest, softmax_scale=batch.scale, causal=True, block_table=batch.block_tables,
                fa_version=3, scheduler_metadata=metadata, num_splits=splits, **descale,
            )  # fmt: skip
            calls = [partial(flash.flash_attn_varlen_func, k=k, v=v, **common) for k, v in batch.caches]
            yield f"page {page_size}, splits {splits or 'own'}", batch.bytes_read, calls


def fa3_bf16(shape: Shape) -> Runs:
    return fa3(shape, torch.bfloat16)


def fa3_fp8(shape: Shape) -> Runs:
    return fa3(shape, torch.float8_e4m3fn)


def flashinfer_bf16(shape: Shape) -> Runs:
    """FlashInfer's paged decode on tensor cores, planned beforehand."""
    flashinfer = importlib.import_module("flashinfer")
    for page_size in PAGE_SIZES:
        batch = Batch(shape, page_size)
        counts = -(-batch.seq_lens // page_size)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        pages = torch.cat([row[:n] for row, n in zip(batch.block_tables, counts.tolist())])
        last = (batch.seq_lens - 1) % page_size + 1
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            starts, pages, last, shape.heads, shape.kv_heads, shape.head_dim, page_size,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=batch.scale,
        )  # fmt: skip
        out = torch.empty_like(batch.query)
        calls = [partial(wrapper.run, batch.query, kv, out=out) for kv in batch.caches]
        yield f"page {page_size}", batch.bytes_read, calls


def sdpa_bf16(shape: Shape) -> Runs:
    """torch's scaled_dot_product_attention over contiguous K and V: lengths must be equal."""
    if not shape.uniform:
        raise RuntimeError("lengths differ")
    batch = Batch(shape, shape.context)
    query = batch.query[:, :, None]
    calls = [
        partial(
            torch.nn.functional.scaled_dot_product_attention,
            query,
            key.transpose(1, 2),
            value.transpose(1, 2),
            enable_gqa=True,
        )
        for key, value in batch.caches
    ]
    yield "contiguous", batch.bytes_read, calls


PEERS: dict[str, Callable[[Shape], Runs]] = {
    "fa3_bf16": fa3_bf16,
    "fa3_fp8": fa3_fp8,
    "flashinfer_bf16": flashinfer_bf16,
    "sdpa_bf16": sdpa_bf16,
}


def measure(shape: Shape, missing: dict[str, str]) -> dict[str, Best]:
    """The best time of each peer on ``shape``; why a peer gave none goes to ``missing``."""
    best: dict[str, Best] = {}
    for name, peer in PEERS.items():
        if missing.get(name, "").startswith("not installed"):
            continue
        try:
            for settings, size, calls in peer(shape):
                time_us = replay_us(calls, 5)
                if name not in best or time_us < best[name].time_us:
                    best[name] = Best(time_us, settings, size)
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # another library's: whatever it raises, our rows are measured without it
            if name not in best:
                missing[name] = f"{shape}: {error!r}"[:200]
        torch.cuda.empty_cache()
    return best
