"""The compiled kernels against kvq.reference on the GPU: the interpreter's cases at real lengths, and long ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvq import INT4, INT4_SYM, INT8, K8V4, reference
from tests import tolerances
from tests.kernels import cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def at_real_length(case: cases.Case) -> cases.Case:
    """``case`` with every sequence about 60 times as long; short ones and empty ones stay."""
    return replace(case, lens=tuple(n if n < 10 else 61 * n + 3 for n in case.lens))


REAL = {case.name: at_real_length(case) for case in cases.SMALL}
WRITTEN = ["d64-g3-bf16", "d80-g5-hot", "d96-g12-k8v4", "d112-g7-q2", "d192-g1-symmetric", "d256-g4-bf16", "everything",
           "offset-interleaved-partial-rotary", "offset-int8-d96", "offset-200"]  # fmt: skip

BASE = cases.Case("", head_dim=128, page_size=64, group=4)
LONG = [
    replace(BASE, name="131072-tokens", lens=(131072, 0, 1, 65537)),
    replace(BASE, name="131072-tokens-hot-q4-bf16", lens=(131072, 3), hot=True, q_len=4, dtype=torch.bfloat16),
    # one program for each sequence and kv head: nothing is merged, sums run over the whole context
    replace(BASE, name="32768-tokens-in-one-split", lens=(32768, 64), programs=0.001),
    replace(BASE, name="32768-tokens-in-one-split-int8", scheme=INT8, lens=(32768, 64), programs=0.001),
    replace(BASE, name="32768-tokens-in-one-split-k8v4", scheme=K8V4, lens=(32768, 64), programs=0.001),
    replace(BASE, name="32768-tokens-in-one-split-symmetric", scheme=INT4_SYM, lens=(32768, 64), programs=0.001),
    replace(BASE, name="page-128", page_size=128, lens=(5000, 128, 129), pairs=16, mu=5.0, pair_scale=True),
    replace(BASE, name="offset-200-at-131071", lens=(131072, 131072), mu=200.0, pairs=4, kv_heads=1),
    replace(BASE, name="offset-200-one-split-bf16", lens=(32768,), mu=200.0, pairs=4, shifts=(98304,),
            dtype=torch.bfloat16, programs=0.001),
    replace(BASE, name="window-4096-of-100000", lens=(100000, 4096, 50), window=4096, q_len=2),
    replace(BASE, name="page-16-offset-hot", page_size=16, hot=True, also_hot=(100,), lens=(5000, 128, 1000), pairs=16,
            mu=5.0, pair_scale=True),
    replace(BASE, name="page-32-g16-offset", page_size=32, group=16, lens=(3000, 77), pairs=16, mu=5.0),
    replace(BASE, name="many-sequences", lens=tuple(range(0, 2000, 37)), page_size=16, group=8),
]  # fmt: skip


def check_decode(case: cases.Case, *dtypes: torch.dtype) -> None:
    batch = cases.make_batch(case, "cuda")
    cases.write_reference(batch)
    want, want_lse = cases.decode_reference(batch)
    seen = torch.isfinite(want_lse)
    for dtype in dtypes:
        out, lse = cases.decode_kernel(batch, dtype)
        assert cases.relative_error(out, want) < tolerances.DECODE[dtype]
        assert torch.equal(torch.isfinite(lse), seen)
        limit = tolerances.LSE_LARGE_OFFSET if case.mu >= 100 else tolerances.LSE
        assert (lse - want_lse)[seen].abs().max() < limit
        assert (out[~seen] == 0).all()


@pytest.mark.parametrize("case", REAL.values(), ids=str)
def test_decode_matches_float64_attention_over_the_dequantized_cache(case: cases.Case) -> None:
    check_decode(case, torch.float32)


@pytest.mark.parametrize("name", ["d64-g3-bf16", "d80-g5-hot"])
def test_outputs_of_16_bits_add_their_rounding(name: str) -> None:
    check_decode(REAL[name], torch.float16, torch.bfloat16)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_contexts_lose_no_accuracy(case: cases.Case) -> None:  # vLLM #55610
    check_decode(case, torch.float32)


@pytest.mark.parametrize("name", WRITTEN)
def test_write_stores_what_the_reference_stores(name: str) -> None:
    batch, want = (cases.make_batch(REAL[name], "cuda") for _ in range(2))
    before = batch.pages.clone()
    assert cases.write_kernel(batch).tolist() == [0, 0, 0, 0]
    cases.write_reference(want)
    assert (batch.pages != want.pages).float().mean() < tolerances.WRITE_BYTES
    untouched = (want.pages == before).all(1)
    assert untouched.any() and torch.equal(batch.pages[untouched], want.pages[untouched])
    if batch.hot is not None and want.hot is not None:
        assert torch.equal(batch.hot.pool.view(torch.int16), want.hot.pool.view(torch.int16))
    for i, n in enumerate(REAL[name].lens):
        pairs = zip(*(reference.gather(x.pages, x.layout, x.block_tables[i], n, x.transform, x.hot, x.shift(i))
                      for x in (batch, want)))  # fmt: skip
        assert n == 0 or all(cases.relative_error(a, b) < 0.01 for a, b in pairs)


@pytest.mark.parametrize("name", WRITTEN)
def test_gather_matches_the_reference(name: str) -> None:
    batch = cases.make_batch(REAL[name], "cuda")
    cases.write_reference(batch)
    n = REAL[name].lens[0]
    want = reference.gather(
        batch.pages, batch.layout, batch.block_tables[0], n, batch.transform, batch.hot, batch.shift(0)
    )
    for got, full in zip(cases.gather_kernel(batch, 0, n // 3, torch.float32), want):
        assert cases.relative_error(got, full[n // 3 :]) < tolerances.GATHER[torch.float32]


def test_pages_and_hot_slots_beyond_2_31_bytes() -> None:  # vLLM #47671, #50427
    case = replace(BASE, name="", scheme=INT4, kv_heads=8, page_size=64, lens=(700, 64), hot=True, spare=31000)
    batch = cases.make_batch(case, "cuda")
    assert int(batch.block_tables[0, 0]) * batch.pages.stride(0) > 2**31
    assert batch.hot is not None and batch.hot.pool.numel() > 2**31
    assert cases.write_kernel(batch).tolist() == [0, 0, 0, 0]
    key, value, _, _ = batch.tokens[0]
    got_key, got_value = cases.gather_kernel(batch, 0, 0, torch.float16)
    assert torch.equal(got_key[:64], key[:64]) and torch.equal(got_value[:64], value[:64])  # the first page is hot
    assert cases.relative_error(got_key, key) < 0.12
    out, _ = cases.decode_kernel(batch, torch.float32)
    assert cases.relative_error(out, cases.decode_reference(batch)[0]) < tolerances.DECODE[torch.float32]
