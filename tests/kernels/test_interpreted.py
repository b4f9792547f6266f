"""The Triton kernels under the interpreter against kvq.reference; tests/gpu runs them compiled, at real sizes."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvq import DecodeConfig, reference
from kvq.kernels import quantize
from kvq.ops import new_status, write_pages
from kvq.page import PAGE_SIZES, PageLayout
from kvq.reference import HotPool
from kvq.scheme import INT4, INT4_SYM, INT8, K8V4, QuantScheme
from kvq.tuned import WriteConfig
from tests import tolerances
from tests.kernels import cases

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) is -inf on a GPU as well
    pytest.mark.filterwarnings("ignore:(All-NaN|invalid value):RuntimeWarning"),  # NaN is written on purpose
    pytest.mark.usefixtures("poison"),
]

BY_NAME = {case.name: case for case in cases.SMALL}
WRITTEN = ["d64-g3-bf16", "d80-g5-hot", "d96-g12-k8v4", "d112-g7-q2", "d128-g4", "d192-g1-symmetric", "d256-g4-bf16",
           "page32-k8v4-hot", "everything", "offset-interleaved-partial-rotary", "offset-int8-d96",
           "offset-200"]  # fmt: skip


def some(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [BY_NAME[name] for name in names], ids=str)


def check_decode(case: cases.Case, config: DecodeConfig | None = None) -> None:
    batch = cases.make_batch(case, "cpu")
    cases.write_reference(batch)
    out, lse = cases.decode_kernel(batch, torch.float32, config)
    want, want_lse = cases.decode_reference(batch)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    limit = tolerances.LSE_LARGE_OFFSET if case.mu >= 100 else tolerances.LSE
    assert (lse - want_lse)[seen].abs().max() < limit
    assert (out[~seen] == 0).all()


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_decode_matches_float64_attention_over_the_dequantized_cache(case: cases.Case) -> None:
    check_decode(case)


@st.composite
def any_case(draw: st.DrawFn) -> cases.Case:
    """A decode batch of any kind; its KV heads, and what it takes from the cache, are few."""
    lengths = st.one_of(st.integers(0, 40), st.integers(0, 400), st.integers(1, 6).map(lambda n: 64 * n))
    pairs = draw(st.sampled_from([0, 0, 6]))
    return cases.Case(
        "any",
        draw(st.sampled_from([INT4, INT4_SYM, INT8, K8V4])),
        head_dim=draw(st.sampled_from([64, 80, 128])),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3, 4, 7, 12])),
        q_len=draw(st.sampled_from([1, 1, 2, 5])),
        lens=tuple(draw(st.lists(lengths, min_size=1, max_size=4).filter(any))),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        hot=draw(st.booleans()),
        also_hot=tuple(draw(st.lists(st.integers(1, 25), max_size=2))),
        window=draw(st.none() | st.integers(1, 300)),
        softcap=draw(st.sampled_from([None, 20.0])),
        sinks=draw(st.booleans()),
        pairs=pairs,
        mu=3.0 if pairs else 0.0,
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_case(), places=st.integers(1, 16), min_chunk=st.integers(1, 2), start_cost=st.integers(0, 4))
def test_decode_of_any_batch(case: cases.Case, places: int, min_chunk: int, start_cost: int) -> None:
    check_decode(case, DecodeConfig(programs=places * case.kv_heads, min_chunk=min_chunk, start_cost=start_cost))


@some(*WRITTEN)
def test_write_stores_what_the_reference_stores(case: cases.Case) -> None:
    batch, want, zeroed = (cases.make_batch(case, "cpu") for _ in range(3))
    before = batch.pages.clone()
    if case.shifts and min(case.shifts) < 0:
        pytest.skip("positions before 0 are refused")
    assert cases.write_kernel(batch).tolist() == [0, 0, 0, 0]
    zeroed.pages.zero_()
    cases.write_reference(want)
    cases.write_reference(zeroed)
    assert (batch.pages != want.pages).float().mean() < tolerances.WRITE_BYTES
    untouched = (want.pages == before) & (zeroed.pages == 0)
    assert torch.equal(batch.pages[untouched], before[untouched])
    if batch.hot is not None and want.hot is not None:
        assert torch.equal(batch.hot.pool.view(torch.int16), want.hot.pool.view(torch.int16))
    for i in range(len(case.lens)):
        for a, b in zip(*(reference.gather(x.pages, x.layout, x.block_tables[i], case.lens[i], x.transform, x.hot,
                                           x.shift(i)) for x in (batch, want))):  # fmt: skip
            assert case.lens[i] == 0 or cases.relative_error(a, b) < 0.01


@some("d128-g4", "page32-k8v4-hot", "everything")
def test_what_is_stored_does_not_depend_on_when_values_are_read(case: cases.Case) -> None:
    first = cases.make_batch(case, "cpu")
    cases.write_kernel(first, WriteConfig(16, 4, "late"))
    for tokens, values in ((16, "early"), (32, "early"), (64, "apart"), (16, "prefetch")):
        batch = cases.make_batch(case, "cpu")
        assert cases.write_kernel(batch, WriteConfig(tokens, 4, values)).tolist() == [0, 0, 0, 0]
        assert torch.equal(batch.pages, first.pages), (tokens, values)
        if batch.hot is not None and first.hot is not None:
            assert torch.equal(batch.hot.pool.view(torch.int16), first.hot.pool.view(torch.int16))


@pytest.mark.parametrize("values", ["early", "apart"])
@pytest.mark.parametrize("clamp", [False, True], ids=["skip", "clamp"])
@pytest.mark.parametrize(
    ("scheme", "head_dim"), [(INT4, 64), (INT4, 96), (INT4_SYM, 80), (INT8, 64), (K8V4, 128)], ids=str
)
def test_write_counts_bad_rows_and_leaves_them_out(
    scheme: QuantScheme, head_dim: int, clamp: bool, values: str
) -> None:
    """NaN and inf in any part of a row, rows beyond fp16, slots that do not exist; counted as on CPU."""
    layout, g = PageLayout(scheme, 16, 2, head_dim), torch.Generator().manual_seed(0)
    key, value = (torch.randn(20, 2, head_dim, generator=g).to(torch.bfloat16) for _ in range(2))
    key[1, 0, 0], key[2, 1, head_dim - 1], value[3, 0, head_dim // 2 + 1] = torch.nan, torch.inf, -torch.inf
    value[4, 1, 5], key[4, 1, 7], value[5, 0, 3] = torch.nan, torch.nan, 1e6
    slots = torch.arange(20)
    slots[6], slots[7] = 32, -1
    got, want = (torch.zeros(2, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
    status, want_status = new_status("cpu"), new_status("cpu")
    hot = HotPool(torch.zeros(1, 2, 2, 16, head_dim, dtype=key.dtype), torch.tensor([0, -1], dtype=torch.int32))
    quantize.write(got, layout, key, value, slots, status, hot=hot, clamp=clamp, config=WriteConfig(16, 4, values))
    write_pages(
        want, layout, key, value, slots, check="flag", on_nonfinite="clamp" if clamp else "raise", status=want_status
    )
    assert status.tolist() == want_status.tolist()
    table = torch.arange(2)
    stored = reference.gather(got, layout, table, 20)
    for a, b in zip(stored, reference.gather(want, layout, table, 20)):
        assert cases.relative_error(a[[0, *range(8, 20)]], b[[0, *range(8, 20)]]) < 0.01
        assert torch.isfinite(a).all() and not a[6:8].any()
    assert stored[0][1, 0].any() == clamp  # left out, or with zeros in place of NaN
    assert stored[1][1, 0].any()  # the other tensor of that head
    for tensor, x in enumerate((key, value)):
        rows = hot.pool[0, tensor].transpose(0, 1)[:6]
        whole = torch.isfinite(x[:6]).all(-1)
        assert torch.equal(rows[whole], x[:6][whole])
        assert rows[~whole].any(-1).all() if clamp else not rows[~whole].any()
        assert torch.isfinite(rows).all()


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=str)
def test_a_nan_with_the_sign_bit_is_found(scheme: QuantScheme) -> None:
    """x86 gives inf - inf, which rotating infinities takes, the sign bit."""
    layout = PageLayout(scheme, 16, 1, 64)
    negative = torch.tensor([0xFFC0 - 0x10000], dtype=torch.int16).view(torch.bfloat16)
    for first, second in ((negative, 1.0), (torch.inf, -torch.inf)):
        key = torch.ones(4, 1, 64, dtype=torch.bfloat16)
        key[1, 0, 0], key[1, 0, 1] = first, second
        pages, status = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), new_status("cpu")
        quantize.write(pages, layout, key, torch.ones_like(key), torch.arange(4), status)
        assert status.tolist() == [0, 1, 0, 0]
        assert torch.isfinite(reference.gather(pages, layout, torch.arange(1), 4)[0]).all()


@some(*WRITTEN)
def test_gather_matches_the_reference(case: cases.Case) -> None:
    batch = cases.make_batch(case, "cpu")
    cases.write_reference(batch)
    n, start = case.lens[0], case.lens[0] // 3
    want = reference.gather(
        batch.pages, batch.layout, batch.block_tables[0], n, batch.transform, batch.hot, batch.shift(0)
    )
    for got, full in zip(cases.gather_kernel(batch, 0, start, torch.float32), want):
        assert cases.relative_error(got, full[start:]) < tolerances.GATHER[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gather_and_decode_write_the_models_dtype(dtype: torch.dtype) -> None:
    batch = cases.make_batch(BY_NAME["d64-g4"], "cpu")
    cases.write_reference(batch)
    out, _ = cases.decode_kernel(batch, dtype)
    assert cases.relative_error(out, cases.decode_reference(batch)[0]) < tolerances.DECODE[dtype]
    key, value = cases.gather_kernel(batch, 0, 0, dtype)
    want_key, want_value = reference.gather(batch.pages, batch.layout, batch.block_tables[0], 37)
    assert cases.relative_error(key, want_key) < tolerances.GATHER[dtype]
    assert cases.relative_error(value, want_value) < tolerances.GATHER[dtype]
