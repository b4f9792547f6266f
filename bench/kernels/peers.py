"""Kernels of others on the same shapes, each at its best page size and number of splits; what is missing is named.

FlashAttention 3 comes from vLLM (``vllm.vllm_flash_attn``), with its scheduler's metadata computed beforehand.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.kernels.measure import PrefillInputs, Shape, rotation_bytes, stream_us
from kvq.kernels.timing import replay_us
from kvq.reference import hadamard

Runs = Iterator[tuple[str, int, Sequence[Callable[[], Any]]]]  # settings, bytes read by a call, calls
PAGE_SIZES = (16, 64, 128)
VLLM_PAGE = 16  # vLLM's own default
SPLITS = (0, 4, 8, 16, 32)  # 0: the peer's own choice


class Best(NamedTuple):
    time_us: float
    settings: str
    bytes_read: int


class Batch:
    """Random paged K and V of a shape, [num_pages, page_size, kv_heads, width]; integers stand for any codes."""

    def __init__(
        self, shape: Shape, page_size: int, dtype: torch.dtype = torch.bfloat16, width: int | None = None
    ) -> None:
        self.shape, self.page_size = shape, page_size
        counts = [-(-n // page_size) for n in shape.lens]
        order = torch.randperm(sum(counts), device="cuda").to(torch.int32)
        self.block_tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        for row, pages in zip(self.block_tables, order.split(counts)):
            row[: len(pages)] = pages
        self.seq_lens = torch.tensor(shape.lens, dtype=torch.int32, device="cuda")
        self.cu_seqlens = torch.arange(len(counts) + 1, dtype=torch.int32, device="cuda")
        pool = (len(order), page_size, shape.kv_heads, width or shape.head_dim)
        self.token_bytes = 2 * pool[2] * pool[3] * dtype.itemsize
        sets = max(1, -(-rotation_bytes() // (len(order) * page_size * self.token_bytes)))
        self.caches = [(random(pool, dtype), random(pool, dtype)) for _ in range(sets)]
        self.query = random((len(counts), shape.heads, shape.head_dim), torch.bfloat16)
        self.out = torch.empty_like(self.query)
        self.scale = shape.head_dim**-0.5

    @property
    def bytes_read(self) -> int:
        """Bytes of the codes or values of K and V."""
        return sum(self.shape.lens) * self.token_bytes


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, device="cuda", dtype=dtype)


def fa3(shape: Shape, dtype: torch.dtype) -> Runs:
    """Settings, bytes and calls of FlashAttention 3 over each page size and number of splits."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    for page_size in PAGE_SIZES:
        batch = Batch(shape, page_size, dtype)
        num_seqs, longest = len(shape.lens), max(shape.lens)
        query = batch.query.to(dtype)
        ones = torch.ones(num_seqs, shape.kv_heads, device="cuda")
        descale = {} if dtype == torch.bfloat16 else {f"{x}_descale": ones for x in "qkv"}
        for splits in SPLITS:
            if num_seqs >= 32 and splits > 8:
                continue
            metadata = flash.get_scheduler_metadata(
                batch_size=num_seqs, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=shape.heads,
                num_heads_kv=shape.kv_heads, headdim=shape.head_dim, cache_seqlens=batch.seq_lens, qkv_dtype=dtype,
                cu_seqlens_q=batch.cu_seqlens, page_size=page_size, causal=True, num_splits=splits,
            )  # fmt: skip
            common: dict[str, Any] = dict(
                q=query, out=batch.out, cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=1, seqused_k=batch.seq_lens,
                max_seqlen_k=longest, softmax_scale=batch.scale, causal=True, block_table=batch.block_tables,
                fa_version=3, scheduler_metadata=metadata, num_splits=splits, **descale,
            )  # fmt: skip
            calls = [partial(flash.flash_attn_varlen_func, k=k, v=v, **common) for k, v in batch.caches]
            yield f"page {page_size}, splits {splits or 'own'}", batch.bytes_read, calls


def fa3_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, causal: bool, scale: float, window: tuple[int, int], softcap: float,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention 3 as kvq.prefill.Attention."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    return flash.flash_attn_varlen_func(
        q=q, k=k, v=v, out=out, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, softmax_scale=scale, causal=causal, window_size=list(window), softcap=softcap,
        return_softmax_lse=True, fa_version=3,
    )  # fmt: skip


def fa3_prefill(inputs: PrefillInputs) -> dict[str, float]:
    """Microseconds of FlashAttention 3 over the context in bf16, contiguous and in pages of each size: the best."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    tokens, keys = inputs.tokens, inputs.context + inputs.tokens
    common: dict[str, Any] = {
        "q": inputs.query, "out": torch.empty_like(inputs.query), "cu_seqlens_q": inputs.cu_seqlens,
        "max_seqlen_q": tokens, "max_seqlen_k": keys, "softmax_scale": inputs.layout.head_dim**-0.5, "causal": True,
        "fa_version": 3,
    }  # fmt: skip
    ends = torch.tensor([0, keys], dtype=torch.int32, device="cuda")
    runs = [partial(flash.flash_attn_varlen_func, k=inputs.key, v=inputs.value, cu_seqlens_k=ends, **common)]
    for page_size in PAGE_SIZES:
        order = torch.randperm(-(-keys // page_size), device="cuda").to(torch.int32)
        pool = (len(order), page_size, *inputs.key.shape[1:])
        k, v = (random(pool, torch.bfloat16) for _ in range(2))
        runs.append(
            partial(flash.flash_attn_varlen_func, k=k, v=v, seqused_k=ends[1:], block_table=order[None], **common)
        )
    best = []
    for run in runs:
        run()
        best.append(statistics.median(stream_us([run] * 4) / 4 for _ in range(5)))
    return {"fa3_bf16": min(best)}


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
        calls = [partial(wrapper.run, batch.query, kv, out=batch.out) for kv in batch.caches]
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


def vllm_triton(shape: Shape, mode: str) -> Runs:
    """vLLM's unified attention in Triton, with the split that its backend plans; int8 and int4 have a float32 scale a
    token and head, int4 rotates the query and the output."""
    ops = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
    dtype, width = {
        "NONE": (torch.bfloat16, shape.head_dim),
        "INT8_PER_TOKEN_HEAD": (torch.int8, shape.head_dim),
        "INT4_PER_TOKEN_HEAD": (torch.uint8, shape.head_dim // 2),
    }[mode]
    batch = Batch(shape, VLLM_PAGE, dtype, width)
    most, segments = 128 // shape.kv_heads, 16  # sequences up to which it splits, and in how many parts
    parts = (most, shape.heads, segments)
    scales = {}
    size = batch.bytes_read
    if mode != "NONE":
        rows = batch.caches[0][0].shape[:3]
        scales = {f"{x}_scale_cache": torch.rand(rows, device="cuda") * 0.01 for x in "kv"}
        size += 2 * 4 * shape.kv_heads * sum(shape.lens)
    common: dict[str, Any] = dict(
        q=batch.query, out=batch.out, cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=1, seqused_k=batch.seq_lens,
        max_seqlen_k=max(shape.lens), softmax_scale=batch.scale, causal=True, window_size=(-1, -1),
        block_table=batch.block_tables, softcap=0, q_descale=None, k_descale=None, v_descale=None,
        seq_threshold_3D=most, num_par_softmax_segments=segments,
        softmax_segm_output=torch.empty(*parts, 1 << (shape.head_dim - 1).bit_length(), device="cuda"),
        softmax_segm_max=torch.empty(parts, device="cuda"), softmax_segm_expsum=torch.empty(parts, device="cuda"),
        kv_quant_mode=modes[mode], **scales,
    )  # fmt: skip
    yield f"page {VLLM_PAGE}", size, [partial(ops.unified_attention, k=k, v=v, **common) for k, v in batch.caches]


def vllm_turboquant(shape: Shape) -> Runs:
    """vLLM's TurboQuant decode, 4-bit keys and values with norm correction, rotation of the query included."""
    ops = importlib.import_module("vllm.v1.attention.ops.triton_turboquant_decode")
    key_bytes = shape.head_dim // 2 + 2  # codes and a fp16 norm; values have a fp16 scale and zero
    slot_bytes = key_bytes + shape.head_dim // 2 + 4
    rotation = hadamard(shape.head_dim, device=torch.device("cuda"))
    batch = Batch(shape, VLLM_PAGE, torch.uint8, slot_bytes // 2)  # K and V of a token share a slot
    parts = 32
    decode = partial(
        ops.triton_turboquant_decode_attention,
        query=batch.query, block_table=batch.block_tables, seq_lens=batch.seq_lens, Pi=rotation, PiT=rotation,
        centroids=torch.linspace(-2.5, 2.5, 16, device="cuda"), scale=batch.scale, mse_bits=4,
        key_packed_size=key_bytes, value_quant_bits=4, key_fp8=False, norm_correction=True, max_num_kv_splits=parts,
        output_buf=batch.out,
        mid_o_buf=torch.empty(len(shape.lens), shape.heads, parts, shape.head_dim + 1, device="cuda"),
        lse_buf=torch.empty(len(shape.lens), shape.heads, device="cuda"),
    )  # fmt: skip
    calls = [partial(decode, kv_cache=torch.cat(pair, -1)) for pair in batch.caches]
    batch.caches.clear()
    yield f"page {VLLM_PAGE}, splits {parts}", batch.bytes_read, calls


PEERS: dict[str, Callable[[Shape], Runs]] = {
    "fa3_bf16": fa3_bf16,
    "fa3_fp8": fa3_fp8,
    "flashinfer_bf16": flashinfer_bf16,
    "sdpa_bf16": sdpa_bf16,
    "vllm_triton_bf16": partial(vllm_triton, mode="NONE"),
    "vllm_triton_int8": partial(vllm_triton, mode="INT8_PER_TOKEN_HEAD"),
    "vllm_triton_int4": partial(vllm_triton, mode="INT4_PER_TOKEN_HEAD"),
    "vllm_turboquant_4bit": vllm_turboquant,
}


def compile_jobs(shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """Triton peers with a small shape for each head layout and either side of vLLM's split."""
    heads = dict.fromkeys((s.heads, s.kv_heads, s.head_dim) for s in shapes)
    small = [Shape((256,) * batch, *layout) for layout in heads for batch in (2, 128)]
    return [(name, shape) for name in PEERS if name.startswith("vllm") for shape in small]


def compile_peer(name: str, shape: Shape) -> None:
    for _, _, calls in PEERS[name](shape):
        calls[0]()
    torch.cuda.synchronize()


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
