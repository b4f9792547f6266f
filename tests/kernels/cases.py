"""Cases of the kernel tests, shared by the interpreter (tests/kernels) and the GPU (tests/gpu), and how they are run.

A batch lives in hostile memory: pages are an offset view into a wider buffer full of NaN, in random order; unused hot
slots, unused rows of pages and outputs are NaN; unused entries of block tables are -1; the query is a strided view.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kvq import DecodeConfig, DecodePlan, reference
from kvq.kernels import decode, gather, quantize
from kvq.kernels.device import DeviceTransform
from kvq.ops import new_status
from kvq.page import PageLayout
from kvq.reference import HotPool
from kvq.scheme import INT4, INT4_SYM, INT8, K8V4, QuantScheme
from kvq.transform import KeyTransform
from kvq.tuned import WriteConfig


@dataclass(frozen=True)
class Case:
    """One batch. ``mu``: size of the key offset on each of ``pairs`` rotary pairs; ``shifts``: position offsets;
    ``flat``: a third of the tokens are zero rows, and another third have constant values; ``hot``: the first page and
    the last two of each sequence are hot, and the pages ``also_hot``."""

    name: str
    scheme: QuantScheme = INT4
    head_dim: int = 64
    page_size: int = 16
    kv_heads: int = 2
    group: int = 4
    q_len: int = 1
    lens: tuple[int, ...] = (37, 0, 7)
    dtype: torch.dtype = torch.float16
    hot: bool = False
    also_hot: tuple[int, ...] = ()
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    mu: float = 0.0
    pairs: int = 0
    pair_scale: bool = False
    rotary_dim: int | None = None
    interleaved: bool = False
    shifts: tuple[int, ...] = ()
    programs: float = 16.0
    scale: float | None = None
    key_size: float = 1.5
    value_size: float = 1.0
    query_size: float = 1.0
    flat: bool = False
    spare: int = 0  # pages and hot slots that lie, unused, before those of the batch

    def __str__(self) -> str:
        return self.name

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass
class Batch:
    case: Case
    layout: PageLayout
    pages: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    transform: KeyTransform | None
    tables: DeviceTransform | None
    hot: HotPool | None
    query: torch.Tensor
    sinks: torch.Tensor | None
    position_offset: torch.Tensor | None
    tokens: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # key, value, slots, positions a sequence

    def shift(self, i: int) -> int:
        return self.case.shifts[i] if self.case.shifts else 0


def make_transform(case: Case) -> KeyTransform | None:
    if not case.pairs and not case.pair_scale:
        return None
    g = torch.Generator().manual_seed(1)
    heads, dim = case.kv_heads, case.head_dim
    rotary = case.rotary_dim or dim
    inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    scale = torch.rand(heads, dim // 2, generator=g) + 0.5 if case.pair_scale else None
    empty = KeyTransform(heads, dim, None, scale, inv_freq, case.rotary_dim, case.interleaved)
    if not case.pairs:
        return empty
    mu = torch.zeros(heads, dim)
    for head in range(heads):
        pairs = empty.pair_dims[torch.randperm(rotary // 2, generator=g)[: case.pairs]]
        angle = torch.rand(case.pairs, generator=g) * 6.28
        mu[head, pairs] = case.mu * torch.stack([angle.cos(), angle.sin()], -1)
    return replace(empty, mu=mu)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def make_batch(case: Case, device: str) -> Batch:
    """The batch of ``case`` with nothing written yet."""
    g = torch.Generator(device).manual_seed(0)
    layout = PageLayout(case.scheme, case.page_size, case.kv_heads, case.head_dim)
    need = [-(-n // case.page_size) for n in case.lens]
    num_pages = sum(need) + 3 + case.spare
    buffer = torch.full((num_pages, layout.page_bytes + 48), 255, dtype=torch.uint8, device=device)
    pages = buffer[:, 32 : 32 + layout.page_bytes]
    order = torch.randperm(num_pages - case.spare, generator=g, device=device).to(torch.int32) + case.spare
    block_tables = torch.full((len(need), max(need) + 1), -1, dtype=torch.int32, device=device)
    used = 0
    for i, count in enumerate(need):
        block_tables[i, :count] = order[used : used + count]
        used += count
    hot = None
    if case.hot:  # the first page and the last two, as TurnBook would have it
        wanted = [
            block_tables[i, sorted({0, max(n - 2, 0), n - 1, *(p for p in case.also_hot if p < n)})]
            for i, n in enumerate(need)
            if n
        ]
        wanted = torch.cat(wanted).long()
        index = torch.full((num_pages,), -1, dtype=torch.int32, device=device)
        first = case.spare + 1
        index[wanted] = torch.randperm(len(wanted), generator=g, device=device).to(torch.int32) + first
        pool = poisoned(
            len(wanted) + first, 2, case.kv_heads, case.page_size, case.head_dim, dtype=case.dtype, device=device
        )
        hot = HotPool(pool, index)
    transform = make_transform(case)
    reach = max(case.lens) + max((abs(s) for s in case.shifts), default=0)
    heads = case.kv_heads * case.group
    wide = torch.randn(len(need), case.q_len, heads + 3, case.head_dim, generator=g, device=device).to(case.dtype)
    batch = Batch(
        case=case,
        layout=layout,
        pages=pages,
        block_tables=block_tables,
        seq_lens=torch.tensor(case.lens, dtype=torch.int32, device=device),
        transform=transform,
        tables=None if transform is None else DeviceTransform.build(transform, case.page_size, reach, device),
        hot=hot,
        query=(case.query_size * wide)[:, :, 1 : 1 + heads],
        sinks=torch.randn(heads, generator=g, device=device) if case.sinks else None,
        position_offset=torch.tensor(case.shifts, dtype=torch.int32, device=device) if case.shifts else None,
    )
    for i, n in enumerate(case.lens):
        index = torch.arange(n, device=device)
        slots = block_tables[i].long()[index // case.page_size] * case.page_size + index % case.page_size
        positions = index + batch.shift(i)
        shape = (n, case.kv_heads, case.head_dim)
        key = case.key_size * torch.randn(shape, generator=g, device=device)
        if transform is not None and transform.mu is not None:
            key += reference.offset(transform, positions)
        value = case.value_size * torch.randn(shape, generator=g, device=device)
        if case.flat:
            key[::3], value[::3], value[1::3] = 0.0, 0.0, 2.0
        batch.tokens.append((key.to(case.dtype), value.to(case.dtype), slots, positions))
    return batch


def write_reference(batch: Batch) -> None:
    for key, value, slots, positions in batch.tokens:
        reference.write(batch.pages, batch.layout, key, value, slots, positions, batch.transform, batch.hot)


def write_kernel(batch: Batch, config: WriteConfig | None = None) -> torch.Tensor:
    """Writes the batch through the kernel and returns the status word."""
    status = new_status(batch.pages.device)
    for key, value, slots, positions in batch.tokens:
        quantize.write(
            batch.pages, batch.layout, key, value, slots, status, positions, batch.tables, batch.hot, check=True,
            config=config,
        )  # fmt: skip
    return status


def decode_kernel(
    batch: Batch, out_dtype: torch.dtype, config: DecodeConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the decode kernel, from buffers that were NaN; split as the case says by default."""
    case, device = batch.case, str(batch.pages.device)
    plan = DecodePlan(
        batch.layout,
        case.kv_heads * case.group,
        len(case.lens) + 1,
        max(max(case.lens), 1),
        q_len=case.q_len,
        sliding_window=case.window,
        hot=case.hot,
        device=device,
        pairs=case.pairs > 0,
        config=config or DecodeConfig(programs=case.programs, min_chunk=1),
    )
    plan.update(batch.block_tables, batch.seq_lens, batch.hot)
    out = poisoned(*batch.query.shape, dtype=out_dtype, device=device)
    lse = poisoned(*batch.query.shape[:3], dtype=torch.float32, device=device)
    decode.decode(
        plan, batch.query, batch.pages, batch.block_tables, batch.seq_lens, case.softmax_scale, out, lse,
        batch.tables, batch.hot, case.softcap, batch.sinks, batch.position_offset,
    )  # fmt: skip
    return out, lse


def decode_reference(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64 over the dequantized cache."""
    case = batch.case
    return reference.paged_attention_decode(
        batch.query, batch.pages, batch.layout, batch.block_tables, batch.seq_lens, case.softmax_scale,
        batch.transform, batch.hot, case.window, case.softcap, batch.sinks, batch.position_offset, torch.float64,
    )  # fmt: skip


def gather_kernel(batch: Batch, i: int, start: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    n, case = batch.case.lens[i], batch.case
    shape = (n - start, case.kv_heads, case.head_dim)
    key, value = (poisoned(*shape, dtype=dtype, device=str(batch.pages.device)) for _ in range(2))
    gather.gather(
        batch.pages, batch.layout, batch.block_tables[i], start, n, key, value, batch.tables, batch.hot, batch.shift(i)
    )
    return key, value


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN where ``got`` holds any."""
    return float((got.double() - want.double()).norm() / want.double().norm())


# The sizes, groups, page sizes, schemes and features each appear; not their product, the interpreter is slow.
SMALL = [
    Case("d64-g4"),
    Case("d64-g3-bf16", group=3, dtype=torch.bfloat16, lens=(20, 33)),
    Case("d80-g5-hot", head_dim=80, group=5, hot=True, lens=(70, 0, 5)),
    Case("d96-g12-k8v4", K8V4, head_dim=96, group=12, kv_heads=1, lens=(35, 1)),
    Case("d112-g7-q2", head_dim=112, group=7, q_len=2, kv_heads=1, lens=(18, 33)),
    Case("d128-g4", head_dim=128, lens=(40, 0, 16)),
    Case("d128-g16-int8", INT8, head_dim=128, group=16, kv_heads=1, lens=(33, 9)),
    Case("d192-g1-symmetric", INT4_SYM, head_dim=192, group=1, lens=(20, 3)),
    Case("d256-g4-bf16", head_dim=256, kv_heads=1, dtype=torch.bfloat16, lens=(17, 30)),
    Case("d80-int8-g1-one-sequence", INT8, head_dim=80, group=1, lens=(50,)),
    Case("page32-k8v4-hot", K8V4, page_size=32, hot=True, lens=(130, 20), kv_heads=1),
    Case("page64-symmetric-one-part-each", INT4_SYM, page_size=64, lens=(100, 0, 64), programs=1.0),
    Case("page128", page_size=128, lens=(140, 128), kv_heads=1),
    Case("tiles-of-four-pages", lens=(333, 64, 63, 0), programs=2.0),
    Case("tiles-of-four-pages-split-hot-bf16", head_dim=128, hot=True, lens=(700, 131), kv_heads=1, programs=5.0,
         dtype=torch.bfloat16),
    Case("tiles-of-four-pages-d80-g12-symmetric", INT4_SYM, head_dim=80, group=12, lens=(200,), kv_heads=1,
         programs=2.0),
    Case("tiles-of-four-pages-window-q2", q_len=2, window=150, lens=(400, 170), kv_heads=1, programs=3.0),
    Case("tiles-of-two-pages-int8", INT8, page_size=32, lens=(300, 64, 95), programs=4.0),
    Case("tiles-of-two-pages-k8v4-g12", K8V4, page_size=32, group=12, lens=(290,), kv_heads=1, programs=3.0),
    Case("near-fp16-max", key_size=1e4, query_size=1e4, value_size=1e4, scale=1e-9, lens=(35, 5)),
    Case("near-fp16-max-int8", INT8, key_size=1e4, query_size=1e4, value_size=1e4, scale=1e-9,
         lens=(35, 5), kv_heads=1),
    Case("subnormal-values", value_size=3e-6, lens=(35, 5), kv_heads=1),
    Case("subnormal-values-g12", group=12, value_size=3e-6, lens=(35, 5), kv_heads=1),
    Case("large-values-g12-symmetric", INT4_SYM, group=12, value_size=1e4, lens=(35, 5), kv_heads=1),
    Case("zero-and-constant-rows", flat=True, lens=(40, 3), kv_heads=1),
    Case("zero-and-constant-rows-symmetric", INT4_SYM, flat=True, lens=(40, 3), kv_heads=1),
    Case("window", window=20, lens=(60, 0, 10)),
    Case("window-int8-q3-hot", INT8, q_len=3, window=17, hot=True, lens=(90, 2), kv_heads=1),
    Case("window-of-one-token", window=1, lens=(33, 16)),
    Case("softcap", softcap=5.0, lens=(40, 9)),
    Case("sinks", sinks=True, lens=(40, 0, 16)),
    Case("sinks-one-part-each", sinks=True, lens=(40, 0, 16), programs=1.0),
    Case("everything", q_len=2, hot=True, window=40, softcap=20.0, sinks=True, mu=3.0, pairs=8, pair_scale=True,
         shifts=(9, 0, 30), lens=(90, 1, 33), dtype=torch.bfloat16),
    Case("q5-shorter-than-q", q_len=5, lens=(3, 21, 0), kv_heads=1),
    Case("q8-g7-56-rows", q_len=8, group=7, kv_heads=1, lens=(30,)),
    Case("hot-bf16-g1", hot=True, dtype=torch.bfloat16, group=1, lens=(100, 15)),
    Case("hot-everywhere", hot=True, lens=(30, 16)),
    Case("scale-without-offset", pair_scale=True, lens=(33, 5)),
    Case("tiles-offset-hot", mu=5.0, pairs=10, hot=True, pair_scale=True, lens=(420, 0, 131), kv_heads=1, programs=3.0),
    Case("tiles-offset-hot-with-a-gap", mu=5.0, pairs=10, hot=True, also_hot=(11,), lens=(420, 150), kv_heads=1,
         programs=2.0),
    Case("tiles-offset-shifted-page32", page_size=32, mu=5.0, pairs=16, shifts=(9, -4), lens=(300, 200), programs=4.0),
    Case("offset-4-pairs", mu=5.0, pairs=4, lens=(40, 0, 5)),
    Case("offset-all-pairs-d128-hot", head_dim=128, mu=3.0, pairs=64, pair_scale=True, hot=True, kv_heads=1,
         lens=(70, 3)),
    Case("offset-shifted-left-and-right", mu=3.0, pairs=16, shifts=(7, -3), lens=(33, 20)),
    Case("offset-interleaved-partial-rotary", mu=3.0, pairs=6, pair_scale=True, rotary_dim=32, interleaved=True,
         lens=(33, 5)),
    Case("offset-int8-d96", INT8, head_dim=96, mu=10.0, pairs=20, lens=(33, 5), kv_heads=1),
    Case("offset-200", mu=200.0, pairs=3, shifts=(30000, 131000), lens=(40, 60), kv_heads=1),
]  # fmt: skip
