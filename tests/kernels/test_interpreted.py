"""The Triton kernels under the interpreter against kvq.reference; tests/gpu runs them compiled, at real sizes."""

from __future__ import annotations

import pytest
import torch
import triton

from kvq import reference
from tests import tolerances
from tests.kernels import cases

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) is -inf on a GPU as well
    pytest.mark.usefixtures("poison"),
]

BY_NAME = {case.name: case for case in cases.SMALL}
WRITTEN = ["d64-g3-bf16", "d80-g5-hot", "d96-g12-k8v4", "d112-g7-q2", "d128-g4", "d192-g1-symmetric", "d256-g4-bf16",
           "page32-k8v4-hot", "everything", "offset-interleaved-partial-rotary", "offset-int8-d96",
           "offset-200"]  # fmt: skip


def some(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [BY_NAME[name] for name in names], ids=str)


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_decode_matches_float64_attention_over_the_dequantized_cache(case: cases.Case) -> None:
    batch = cases.make_batch(case, "cpu")
    cases.write_reference(batch)
    out, lse = cases.decode_kernel(batch, torch.float32)
    want, want_lse = cases.decode_reference(batch)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    limit = tolerances.LSE_LARGE_OFFSET if case.mu >= 100 else tolerances.LSE
    assert (lse - want_lse)[seen].abs().max() < limit
    assert (out[~seen] == 0).all()


@some(*WRITTEN)
def test_write_stores_what_the_reference_stores(case: cases.Case) -> None:
    batch, want = cases.make_batch(case, "cpu"), cases.make_batch(case, "cpu")
    before = batch.pages.clone()
    if case.shifts and min(case.shifts) < 0:
        pytest.skip("positions before 0 are refused")
    assert cases.write_kernel(batch).tolist() == [0, 0, 0, 0]
    cases.write_reference(want)
    assert (batch.pages != want.pages).float().mean() < tolerances.WRITE_BYTES
    assert torch.equal(batch.pages[want.pages == before], want.pages[want.pages == before])
    if batch.hot is not None and want.hot is not None:
        assert torch.equal(batch.hot.pool.view(torch.int16), want.hot.pool.view(torch.int16))
    for i in range(len(case.lens)):
        for a, b in zip(*(reference.gather(x.pages, x.layout, x.block_tables[i], case.lens[i], x.transform, x.hot,
                                           x.shift(i)) for x in (batch, want))):  # fmt: skip
            assert case.lens[i] == 0 or cases.relative_error(a, b) < 0.01


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
