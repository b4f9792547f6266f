"""What an engine does on a GPU: CUDA graphs, writes that must not synchronise, the public API on CUDA tensors."""

from __future__ import annotations

import pytest
import torch

from kvq import KeyTransform, PagedKVCache, PageLayout, ops, paged_attention_decode, quantize_blocks, reference
from kvq.scheme import INT4, INT8
from tests import tolerances
from tests.kernels.cases import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

HEADS, DIM, PAGE = 2, 128, 64


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def transform() -> KeyTransform:
    freq = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    g = torch.Generator().manual_seed(1)
    return KeyTransform(HEADS, DIM, 3 * torch.randn(HEADS, DIM, generator=g), None, freq).keep_pairs(16)


def want_of(cache: PagedKVCache, query: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    return reference.paged_attention_decode(
        query, cache.pages, cache.layout, tables, seq_lens, DIM**-0.5, cache.source, cache.hot, dtype=torch.float64
    )[0]


@pytest.mark.parametrize("hot_pages", [0, 12])
def test_a_captured_graph_follows_other_lengths(hot_pages: int) -> None:  # vLLM #40807, #45670
    seqs, max_len = 4, 32 * PAGE
    cache = PagedKVCache(seqs * 32, HEADS, DIM, "int4", PAGE, transform(), hot_pages, dtype=torch.float16)
    tables = (
        torch.randperm(seqs * 32, generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32).view(seqs, 32)
    )
    cache.promote(tables[:, [0, 20, 21]].flatten().tolist())
    index = torch.arange(max_len, device="cuda")
    for i in range(seqs):
        slots = tables[i].long()[index // PAGE] * PAGE + index % PAGE
        cache.write(randn(max_len, HEADS, DIM, seed=i), randn(max_len, HEADS, DIM, seed=9 + i), slots, index)

    key, value = randn(seqs, HEADS, DIM, seed=20), randn(seqs, HEADS, DIM, seed=21)
    query = randn(seqs, 1, 4 * HEADS, DIM, seed=22)
    seq_lens = torch.tensor([70, 0, 5, 1], dtype=torch.int32, device="cuda")
    out = torch.full((seqs, 1, 4 * HEADS, DIM), torch.nan, dtype=torch.float16, device="cuda")
    plan = cache.plan(4 * HEADS, seqs, max_len)

    def step() -> None:
        last = (seq_lens - 1).long()
        page = tables.long().gather(1, (last.clamp(min=0) // PAGE)[:, None])[:, 0]
        slots = torch.where(last >= 0, page * PAGE + last % PAGE, -1)
        cache.write(key, value, slots, last.clamp(min=0), check="flag")
        plan.update(tables, seq_lens, cache.hot)
        paged_attention_decode(query, cache, tables, seq_lens, plan=plan, out=out, check="flag")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([70, 0, 5, 1], [max_len, 1300, 0, 64], [1345, 1344, 1343, max_len - 1], [0, 0, 0, 7]):
        seq_lens.copy_(torch.tensor(lens))
        query.copy_(randn(*query.shape, seed=sum(lens)))
        key.copy_(randn(*key.shape, seed=sum(lens) + 1))
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, want_of(cache, query, tables, seq_lens)) < tolerances.DECODE[torch.float16]
    assert cache.status.tolist() == [0, 0, 0, 0]


def test_flag_skips_and_counts_on_the_device_as_on_cpu() -> None:
    cache = PagedKVCache(4, HEADS, DIM, "int4", PAGE, transform(), max_position=1000, device="cuda")
    cpu = PagedKVCache(4, HEADS, DIM, "int4", PAGE, transform(), max_position=1000, device="cpu")
    key, value = randn(64, HEADS, DIM, dtype=torch.bfloat16), randn(64, HEADS, DIM, dtype=torch.bfloat16, seed=1)
    slots, positions = torch.arange(64, device="cuda"), torch.arange(64, device="cuda")
    key[3], value[4, 1, 5], key[5, 0, 0] = torch.nan, torch.inf, 1e30
    slots[6], slots[7], positions[8], positions[9] = 4 * PAGE, -5, 1001, -1
    for c in (cache, cpu):
        c.pages.fill_(255)
        c.write(*(t.to(c.device) for t in (key, value, slots, positions)), check="flag")
    assert cache.status.tolist() == cpu.status.tolist() == [1, 3, 1, 2]
    good = [i for i in range(64) if i not in (3, 4, 5, 6, 7, 8, 9)]
    table = torch.arange(4, dtype=torch.int32)
    stored = cache.gather(table.cuda(), 64)
    for got, want, x in zip(stored, cpu.gather(table, 64), (key, value)):
        assert relative_error(got[good].cpu(), want[good]) < 0.01
        assert got[[6, 7, 8, 9]].isnan().all()
        assert relative_error(got[good], x[good]) < 0.4  # the offset is not in these keys
    assert stored[0][3].isnan().all() and stored[1][4, 1].isnan().all()
    assert relative_error(stored[1][3], value[3]) < 0.4  # rows are left out, not tokens


@pytest.mark.parametrize("on_nonfinite", ["raise", "clamp"])
def test_sync_raises_or_clamps(on_nonfinite: str) -> None:
    cache = PagedKVCache(2, HEADS, DIM, "int8", PAGE, hot_pages=1, device="cuda")
    cache.promote([0])
    key, value = randn(100, HEADS, DIM), randn(100, HEADS, DIM, seed=1)
    key[70, 1, 5], value[2, 0, 7] = torch.nan, -torch.inf
    before = cache.pages.clone()
    slots = torch.arange(100, device="cuda")
    if on_nonfinite == "raise":
        with pytest.raises(ValueError, match=r"key holds nan at \[70, 1, 5\]"):
            cache.write(key, value, slots)
        with pytest.raises(ValueError, match="slot_mapping holds 128; there are 128 slots"):
            cache.write(key, value, slots + 29)
        assert torch.equal(cache.pages, before)
        return
    cache.write(key, value, slots, on_nonfinite="clamp")
    k, v = cache.gather(torch.tensor([0, 1], device="cuda"), 100, dtype=torch.float32)
    assert torch.isfinite(k).all() and torch.isfinite(v).all()
    assert k[70, 1, 5] == 0 and v[2, 0, 7] == -65504


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("with_transform", [False, True], ids=["plain", "transform"])
def test_quantize_blocks_gives_on_cuda_what_it_gives_on_cpu(bits: int, axis: str, with_transform: bool) -> None:
    x = randn(130, HEADS, DIM, dtype=torch.float32)
    extra = {"transform": transform(), "positions": torch.arange(1000, 1130, device="cuda")} if with_transform else {}
    got = quantize_blocks(x, bits, axis=axis, block_size=64, **extra)
    extra = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in extra.items()}
    want = quantize_blocks(x.cpu(), bits, axis=axis, block_size=64, **extra)
    assert got.codes.is_cuda and got.codes.shape == want.codes.shape and got.scales.shape == want.scales.shape
    back, want_back = got.dequantize(), want.dequantize()
    assert relative_error(back.cpu(), want_back) < 0.01
    # what lies after the last token of the partial block is not specified
    for a, b in ((got.codes[:2], want.codes[:2]), (got.codes[2, :, :2], want.codes[2, :, :2])):
        assert (a.cpu() != b).float().mean() < 2 * tolerances.WRITE_BYTES
    assert relative_error(got.to("cpu").dequantize(), back.cpu()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_cache_on_cuda_gives_what_it_gives_on_cpu(dtype: torch.dtype) -> None:
    n = 400
    key, value = randn(n, HEADS, DIM, dtype=dtype), randn(n, HEADS, DIM, dtype=dtype, seed=1)
    query = randn(1, 3, 7 * HEADS, DIM, dtype=dtype, seed=2)
    table = torch.tensor([[6, 1, 0, 5, 4, 3, 2]], dtype=torch.int32)
    out = {}
    for device in ("cpu", "cuda"):
        cache = PagedKVCache(7, HEADS, DIM, "int4", PAGE, transform(), 3, dtype=dtype, device=device)
        assert cache.promote([6, 3, 2]) == [6, 3, 2]
        index = torch.arange(n)
        slots = table[0].long()[index // PAGE] * PAGE + index % PAGE
        cache.write(*(t.to(device) for t in (key, value, slots, index)))
        k, v = cache.gather(table[0].to(device), n)
        for hot in (slice(0, 64), slice(320, 400)):
            assert torch.equal(k[hot].cpu(), key[hot].cpu()) and torch.equal(v[hot].cpu(), value[hot].cpu())
        out[device] = paged_attention_decode(
            query.to(device), cache, table.to(device), torch.tensor([n], dtype=torch.int32, device=device),
            sliding_window=300,
        ).cpu()  # fmt: skip
    assert relative_error(out["cuda"], out["cpu"]) < 2 * tolerances.DECODE[dtype] + 2e-3


def test_strided_arguments_are_read_as_they_are() -> None:  # vLLM #48412
    layout = PageLayout(INT8, PAGE, HEADS, DIM)
    pages = torch.zeros(4, layout.page_bytes, dtype=torch.uint8, device="cuda")
    key = randn(HEADS, 100, DIM).transpose(0, 1)
    value = randn(100, HEADS, DIM, 2, seed=1)[..., 0]
    slots = torch.stack([torch.arange(100), torch.full((100,), 7)], 1).cuda()[:, 0]
    ops.write_pages(pages, layout, key, value, slots)
    table = torch.tensor([[0, 3], [1, 3]], device="cuda")[:, 0]
    for got, x in zip(ops.gather_pages(pages, layout, table, 100, dtype=torch.float32), (key, value)):
        assert relative_error(got, x) < 0.01


def test_float32_queries_are_refused_on_cuda() -> None:
    cache = PagedKVCache(2, HEADS, DIM, INT4, PAGE, device="cuda")
    tables, lens = torch.zeros(1, 2, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    with pytest.raises(TypeError, match=r"query is torch\.float32; allowed: float16, bfloat16"):
        paged_attention_decode(torch.zeros(1, 4, DIM, device="cuda"), cache, tables, lens)
