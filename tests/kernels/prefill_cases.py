"""Cases of the prefill tests, shared by CPU, interpreter and GPU: a batch of cases.py as context, and new tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq import reference
from kvq.kernels import prefill
from kvq.kernels.prefill import PrefillConfig
from kvq.scheme import INT4_SYM, INT8, K8V4
from tests.kernels import cases
from tests.kernels.cases import Case


@dataclass(frozen=True)
class PrefillCase:
    """``context.lens``: tokens already in pages; ``new``: tokens that each sequence adds."""

    context: Case
    new: tuple[int, ...]

    def __str__(self) -> str:
        return self.context.name


@dataclass
class NewTokens:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens: torch.Tensor


def make(case: PrefillCase, device: str) -> tuple[cases.Batch, NewTokens]:
    """The written context, and new tokens as strided views of one fused tensor, as a qkv projection leaves them."""
    context = case.context
    batch = cases.make_batch(context, device)
    cases.write_reference(batch)
    g = torch.Generator(device).manual_seed(2)
    heads, kv_heads, total = context.kv_heads * context.group, context.kv_heads, sum(case.new)
    fused = torch.randn(total, heads + 2 * kv_heads, context.head_dim, generator=g, device=device)
    query, key, value = fused.to(context.dtype).split([heads, kv_heads, kv_heads], 1)
    starts = torch.tensor([0, *case.new]).cumsum(0).to(device, torch.int32)
    return batch, NewTokens(query, key, value, starts)


def run_kernel(
    case: PrefillCase, batch: cases.Batch, new: NewTokens, out_dtype: torch.dtype, config: PrefillConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the kernel, from buffers that were NaN."""
    context, device = case.context, str(batch.pages.device)
    out = cases.poisoned(*new.query.shape, dtype=out_dtype, device=device)
    lse = cases.poisoned(*new.query.shape[:2], dtype=torch.float32, device=device)
    prefill.prefill(
        new.query, new.key, new.value, batch.pages, batch.layout, batch.block_tables, batch.seq_lens, new.cu_seqlens,
        context.head_dim**-0.5, out, lse, batch.tables, batch.hot, context.window, context.softcap, batch.sinks,
        batch.position_offset, config,
    )  # fmt: skip
    return out, lse


def run_reference(
    case: PrefillCase, batch: cases.Batch, new: NewTokens, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64 over the dequantized context."""
    context = case.context
    return reference.paged_attention_prefill(
        new.query, new.key, new.value, batch.pages, batch.layout, batch.block_tables, batch.seq_lens, new.cu_seqlens,
        context.head_dim**-0.5, batch.transform, batch.hot, context.window, context.softcap, batch.sinks,
        batch.position_offset, dtype,
    )  # fmt: skip


# Context lengths before, in and after a page; new lengths that do and do not fill a tile; sequences without either.
SMALL = [
    PrefillCase(Case("d64-g4", lens=(37, 0, 16, 5)), (17, 3, 0, 1)),
    PrefillCase(Case("d64-g3-bf16", group=3, dtype=torch.bfloat16, lens=(33, 20), kv_heads=1), (24, 4)),
    PrefillCase(Case("d80-g5-hot", head_dim=80, group=5, hot=True, lens=(70, 0), kv_heads=1), (9, 14)),
    PrefillCase(Case("d96-g12-k8v4", K8V4, head_dim=96, group=12, kv_heads=1, lens=(35,)), (8,)),
    PrefillCase(Case("d112-g7", head_dim=112, group=7, kv_heads=1, lens=(18,)), (21,)),
    PrefillCase(Case("d128-g1-int8", INT8, head_dim=128, group=1, lens=(33, 9)), (40, 3)),
    PrefillCase(Case("d192-symmetric", INT4_SYM, head_dim=192, kv_heads=1, lens=(20,)), (19,)),
    PrefillCase(Case("d256-bf16", head_dim=256, kv_heads=1, dtype=torch.bfloat16, lens=(17,)), (12,)),
    PrefillCase(Case("page32-k8v4-hot-bf16", K8V4, page_size=32, hot=True, dtype=torch.bfloat16, kv_heads=1,
                     lens=(140,)), (6,)),
    PrefillCase(Case("window", window=20, lens=(60, 0, 10), kv_heads=1), (20, 33, 2)),
    PrefillCase(Case("window-hot-int8", INT8, window=50, hot=True, lens=(90,), kv_heads=1), (24,)),
    PrefillCase(Case("window-of-one-token", window=1, lens=(33, 16), kv_heads=1), (20, 1)),
    PrefillCase(Case("softcap-sinks", softcap=5.0, sinks=True, lens=(40, 0), kv_heads=1), (18, 9)),
    PrefillCase(Case("everything", hot=True, window=40, softcap=20.0, sinks=True, mu=3.0, pairs=8, pair_scale=True,
                     shifts=(9, 0), lens=(90, 16), dtype=torch.bfloat16), (14, 5)),
    PrefillCase(Case("offset-all-pairs-d128", head_dim=128, mu=3.0, pairs=64, pair_scale=True, kv_heads=1,
                     lens=(36,)), (10,)),
    PrefillCase(Case("offset-shifted-left-and-right", mu=3.0, pairs=16, shifts=(7, -3), lens=(33, 20), kv_heads=1),
                (6, 11)),
    PrefillCase(Case("offset-200", mu=200.0, pairs=3, shifts=(30000,), lens=(40,), kv_heads=1), (17,)),
]  # fmt: skip
