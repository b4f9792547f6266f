"""What the tables of kernels measure: shapes, storage variants, read bandwidth, time and error of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvq import ops, reference
from kvq.kernels.timing import DecodeInputs, WriteInputs, decode_inputs, graph_us, log_uniform, replay_us
from kvq.page import PageLayout
from kvq.prefill import Attention, prefill_pages
from kvq.scheme import INT4, INT4_SYM, INT8, K8V4, QuantScheme
from kvq.transform import KeyTransform, measured_name
from kvq.tuned import DecodeConfig, pick

ERROR_LIMIT = 1e-3  # relative error of a decode row against float64, in its Frobenius norm
WRITE_LIMIT = 5e-3  # of a write row against the reference: values that round either way may get the next code


@dataclass(frozen=True)
class Shape:
    """A batch of sequences of ``lens`` tokens."""

    lens: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    @property
    def context(self) -> int:
        """Mean tokens of a sequence."""
        return sum(self.lens) // len(self.lens)

    @property
    def uniform(self) -> bool:
        return len(set(self.lens)) == 1

    def __str__(self) -> str:
        text = f"{len(self.lens)} x {self.context}" + ("" if self.uniform else " ragged")
        other = (self.heads, self.kv_heads, self.head_dim, self.page_size)
        return (
            text
            if other == (32, 8, 128, 64)
            else text
            + f" heads {self.heads}/{self.kv_heads}/{self.head_dim}"
            + ("" if self.page_size == 64 else f" page {self.page_size}")
        )


@dataclass(frozen=True)
class Variant:
    """How a row stores its cache. ``sink``: the first page of each sequence is hot; ``recent``: so are as many last
    tokens; ``pairs``: rotary pairs with an offset, with pair scales."""

    name: str
    scheme: QuantScheme = INT4
    sink: bool = True
    recent: int = 0
    pairs: int = 0
    q_len: int = 1


DEFAULT = Variant("int4")
VARIANTS = (
    DEFAULT,
    Variant("int4, no hot page", sink=False),
    Variant("int4-sym", INT4_SYM),
    Variant("int4, offset on 16 pairs", pairs=16),
    Variant("k8v4", K8V4),
    Variant("int8", INT8, sink=False),
    Variant("int4, 512 recent hot", recent=512),
    Variant("int4, q_len 4", q_len=4),
)


def uniform(batch: int, context: int, **other: int) -> Shape:
    return Shape((context,) * batch, **other)


def ragged(batch: int = 64, shortest: int = 256, longest: int = 32768) -> Shape:
    return Shape(log_uniform(batch, shortest, longest))


MAIN = uniform(32, 16384)
RAGGED = ragged()
SHAPES = (
    MAIN,
    uniform(64, 8192),
    uniform(128, 2048),
    uniform(8, 32768),
    uniform(1, 32768),
    uniform(1, 131072),
    uniform(64, 16384, heads=64, kv_heads=4),
    uniform(len(RAGGED.lens), RAGGED.context),
    RAGGED,
)
SMALL = (uniform(2, 192, heads=8, kv_heads=2), Shape((300, 70), heads=8, kv_heads=2))
WRITES = (64, 8192)
PREFILL_TOKENS = 8192
PREFILL_CONTEXTS = (0, 8192, 32768)
PREFILL_LIMIT = 8e-3  # of a prefill row against float64: bf16 output, and attention that rounds probabilities to bf16


def rows(shapes: tuple[Shape, ...], small: bool = False) -> list[tuple[Shape, Variant]]:
    """Every variant at the first shape, the default at the others."""
    first = [(shapes[0], v) for v in VARIANTS if not (small and v.recent)]
    return first + [(shape, DEFAULT) for shape in shapes[1:]]


def offset(shape: Shape, pairs: int) -> KeyTransform | None:
    """Pair scales, and an offset on ``pairs`` pairs of each head: of size 3, but 200 on one, as in Qwen2.5."""
    if not pairs:
        return None
    g = torch.Generator().manual_seed(0)
    heads, dim = shape.kv_heads, shape.head_dim
    inv_freq = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scale = torch.rand(heads, dim // 2, generator=g) + 0.5
    mu = 3 * torch.randn(heads, dim, generator=g)
    mu[:, dim // 2 - 1] = 200.0  # of the slowest pair
    return KeyTransform(heads, dim, mu, scale, inv_freq).keep_pairs(pairs)


class DeviceClock:
    """A clock, in seconds, that runs only while the GPU does: pytest-benchmark's timer."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, graph: torch.cuda.CUDAGraph) -> None:
        self.now += graph_us(graph) * 1e-6

    def run_calls(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.now += stream_us(calls) * 1e-6


CLOCK = DeviceClock()


def stream_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of ``calls`` together, for what a graph cannot capture; the GPU is busy while they are queued."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(40_000_000)
    start.record()
    for call in calls:
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def layout_of(shape: Shape, variant: Variant) -> PageLayout:
    return PageLayout(variant.scheme, shape.page_size, shape.kv_heads, shape.head_dim)


def inputs_of(shape: Shape, variant: Variant, least_bytes: int = 0, device: str = "cuda") -> DecodeInputs:
    return decode_inputs(
        layout_of(shape, variant),
        shape.heads,
        shape.lens,
        q_len=variant.q_len,
        sink=variant.sink,
        recent=variant.recent,
        transform=offset(shape, variant.pairs),
        least_bytes=least_bytes,
        device=device,
    )


def rotation_bytes() -> int:
    """Least bytes that the caches of a row have together: four times L2."""
    return 4 * torch.cuda.get_device_properties(0).L2_cache_size


def config_of(shape: Shape, variant: Variant) -> DecodeConfig:
    """What the plan of a row picks."""
    rows = 8 if variant.q_len * shape.heads // shape.kv_heads <= 8 else 16
    return pick(layout_of(shape, variant), rows, len(shape.lens), pairs=variant.pairs)


def compile_jobs(rows: list[tuple[Shape, Variant]]) -> list[tuple[Shape, Variant, DecodeConfig]]:
    """A small batch, variant and configuration for every kernel that ``rows`` need."""
    jobs: dict[tuple[Shape, Variant, DecodeConfig], None] = {}
    for shape, variant in rows:
        small = Shape((16 * shape.page_size,) * 2, shape.heads, shape.kv_heads, shape.head_dim, shape.page_size)
        jobs[small, variant, config_of(shape, variant)] = None
    return list(jobs)


def compile_row(shape: Shape, variant: Variant, config: DecodeConfig) -> None:
    """Compile what a row needs by running it, in both output types."""
    inputs = inputs_of(shape, variant)
    plan = inputs.plan(config)
    for dtype in (inputs.query.dtype, torch.float32):
        inputs.calls(plan, torch.empty_like(inputs.query, dtype=dtype))[0]()
    torch.cuda.synchronize()


def decode_error(inputs: DecodeInputs, out: torch.Tensor) -> float:
    """Largest relative error of a sequence of ``out`` (of the first cache, in float32) against float64 attention over
    the same pages: of the first sequence, the shortest and the longest."""
    pages, hot = inputs.caches[0]
    worst = 0.0
    for i in sorted({0, int(inputs.seq_lens.argmin()), int(inputs.seq_lens.argmax())}):
        part = slice(i, i + 1)
        want, _ = reference.paged_attention_decode(
            inputs.query[part], pages, inputs.layout, inputs.block_tables[part], inputs.seq_lens[part],
            inputs.layout.head_dim**-0.5, inputs.source, hot, dtype=torch.float64,
        )  # fmt: skip
        worst = max(worst, float((out[part].double() - want).norm() / want.norm()))
    return worst


def reference_call(inputs: DecodeInputs) -> torch.Tensor:
    """Decode on CPU, float32."""
    pages, hot = inputs.caches[0]
    return ops.decode_pages(
        inputs.query.float(), pages, inputs.layout, inputs.block_tables, inputs.seq_lens, transform=inputs.transform,
        hot=hot,
    )  # type: ignore[return-value]  # fmt: skip


def write_layout(scheme: QuantScheme) -> PageLayout:
    return PageLayout(scheme, 64, 8, 128)


def write_error(inputs: WriteInputs) -> float:
    """Relative difference of what is read back from the kernel's pages and from those of the reference."""
    key, value = (x[:512] for x in inputs.tokens[0])
    slots, pages, layout = inputs.slots[:512], inputs.pages, inputs.layout
    want = torch.zeros_like(pages)
    inputs.calls()[0]()  # as it is timed: all tokens
    reference.write(want, layout, key, value, slots)
    worst = 0.0
    table = torch.arange(pages.shape[0], device=pages.device)
    for got, ideal in zip(
        reference.gather(pages, layout, table, layout.page_size * len(table)),
        reference.gather(want, layout, table, layout.page_size * len(table)),
    ):
        worst = max(worst, float((got[slots] - ideal[slots]).norm() / ideal[slots].norm()))
    return worst


@dataclass
class PrefillInputs:
    """New tokens of one sequence over ``context`` quantized tokens, and the same context in bf16 for the peers.

    ``query`` [tokens, heads, head_dim], ``key`` and ``value`` [context + tokens, kv_heads, head_dim].
    """

    layout: PageLayout
    context: int
    pages: torch.Tensor
    block_tables: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.query.shape[0]

    def call(self, attention: Attention | None) -> torch.Tensor:
        """paged_attention_prefill as an engine calls it: lengths known to the host, nothing read back."""
        return prefill_pages(
            self.query, self.key[self.context :], self.value[self.context :], self.pages, self.layout,
            self.block_tables, self.context_lens, self.cu_seqlens, attention=attention,
            host_lengths=([self.context], [0, self.tokens]), check="flag",
        )  # type: ignore[return-value]  # fmt: skip

    def error(self, out: torch.Tensor) -> float:
        """Relative error of some rows of ``out`` against float64 attention over the dequantized context."""
        keys, values = reference.gather(
            self.pages, self.layout, self.block_tables[0], self.context, dtype=torch.float64
        )
        keys = torch.cat([keys, self.key[self.context :].double()])
        values = torch.cat([values, self.value[self.context :].double()])
        rows = sorted({0, 1, 63, 64, self.tokens // 2 + 1, self.tokens - 2, self.tokens - 1})
        want = [
            reference.attention(
                self.query[row : row + 1].double(), keys[: self.context + row + 1], values[: self.context + row + 1],
                self.layout.head_dim**-0.5,
            )[0]
            for row in rows
        ]  # fmt: skip
        ideal = torch.cat(want)
        return float((out[rows].double() - ideal).norm() / ideal.norm())


def prefill_inputs(
    context: int, tokens: int, scheme: QuantScheme = INT4, heads: int = 32, kv_heads: int = 8, head_dim: int = 128,
    device: str = "cuda",
) -> PrefillInputs:  # fmt: skip
    layout = PageLayout(scheme, 64, kv_heads, head_dim)
    g = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    count = max(1, -(-context // 64))
    table = torch.randperm(count, generator=g, device=device).to(torch.int32)
    query, key, value = (
        torch.randn(n, h, head_dim, generator=g, device=device).to(dtype)
        for n, h in ((tokens, heads), (context + tokens, kv_heads), (context + tokens, kv_heads))
    )
    pages = torch.zeros(count, layout.page_bytes, dtype=torch.uint8, device=device)
    index = torch.arange(context, device=device)
    slots = table.long()[index // 64] * 64 + index % 64
    ops.write_pages(pages, layout, key[:context], value[:context], slots)
    lens, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([context], [0, tokens]))
    return PrefillInputs(layout, context, pages, table[None], query, key, value, lens, starts)


def prefill_row(
    path: str, inputs: PrefillInputs, time_us: float, peers: dict[str, float], error: float
) -> dict[str, Any]:
    """``peers``: microseconds of each over the same context in bf16."""
    pairs = inputs.tokens * (inputs.context + (inputs.tokens + 1) / 2)
    flop = 4 * inputs.query.shape[1] * inputs.layout.head_dim * pairs
    return {
        "prefill": path,
        "format": measured_name(inputs.layout.scheme),
        "tokens": inputs.tokens,
        "context": inputs.context,
        "time_us": round(time_us, 1),
        "tflop_per_s": round(flop / time_us / 1e6, 1),
        "vs_fa3_bf16": None,
        "rel_err": float(f"{error:.2e}"),
    } | {f"vs_{name}": round(t / time_us, 3) for name, t in peers.items()}


@triton.jit
def read_kernel(x, out, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (parts): reads ROUNDS x BLOCK words of ``x`` a program."""
    total = tl.zeros([BLOCK], tl.int32)
    start = tl.program_id(0).to(tl.int64) * (ROUNDS * BLOCK)
    for i in range(ROUNDS):
        total += tl.load(x + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth(size: int = 8 << 30) -> float:
    """Bytes a second that the GPU reads: the best of torch.sum and ``read_kernel`` over ``size`` bytes."""
    x = torch.ones(size // 4, dtype=torch.int32, device="cuda")
    block, rounds = 4096, 16
    parts = x.numel() // (block * rounds)
    out = torch.empty(parts, dtype=torch.int32, device="cuda")
    whole = x.view(torch.int64)
    times = [
        replay_us([lambda: torch.sum(whole)], 3),
        replay_us([lambda: read_kernel[(parts,)](x, out, ROUNDS=rounds, BLOCK=block, num_warps=8)], 3),
    ]
    return size / min(times) * 1e6


def row(
    shape: Shape,
    variant: Variant,
    time_us: float,
    size: int | None,
    bandwidth: float | None,
    peers: dict[str, float],
    error: float,
) -> dict[str, Any]:
    """A row of the results. ``peers``: microseconds of each on this shape; ``size``: bytes read, None on CPU."""
    rate = None if size is None else size / time_us / 1e6
    source = offset(shape, variant.pairs)
    result = {
        "scheme": variant.name,
        "format": measured_name(variant.scheme, None if source is None else [source]),
        "batch": len(shape.lens),
        "context": shape.context,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "ragged": not shape.uniform,
        "q_len": variant.q_len,
        "bytes": size,
        "time_us": round(time_us, 2),
        "tb_per_s": None if rate is None else round(rate, 3),
        "pct_read_bw": None if rate is None or bandwidth is None else round(1e14 * rate / bandwidth, 1),
        "vs_fa3_bf16": None,
        "vs_fa3_fp8": None,
        "rel_err": float(f"{error:.2e}"),
    }
    if variant.q_len == 1:
        result |= {f"vs_{name}": round(t / time_us, 2) for name, t in peers.items()}
    return result


def write_row(
    scheme: QuantScheme, inputs: WriteInputs, time_us: float, bandwidth: float | None, error: float
) -> dict[str, Any]:
    rate = inputs.bytes_moved / time_us / 1e6
    return {
        "write": scheme.name,
        "format": measured_name(scheme),
        "tokens": inputs.slots.shape[0],
        "time_us": round(time_us, 2),
        "tb_per_s": round(rate, 3),
        "pct_read_bw": None if bandwidth is None else round(1e14 * rate / bandwidth, 1),
        "rel_err": float(f"{error:.2e}"),
    }


def scheme_lines() -> list[str]:
    """What the default row stores, for comparison with what bench.accuracy prints."""
    name, scheme = measured_name(DEFAULT.scheme), DEFAULT.scheme
    return [
        f"int4 is {name}: keys {scheme.key}, values {scheme.value}.",
        "Rotating q and the output, the hot first page and the merge are timed. bench.accuracy's row int4 stores the",
        "same on a model without bias in k_proj (no offset, no pair scales).",
    ]
