"""Block-sparse decode: what a threshold may leave out, and that the kernel leaves out no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from kvq import INT4, INT8, DecodePlan, reference
from kvq.kernels import decode
from kvq.tuned import DecodeConfig
from tests.kernels import cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")

# Keys 4 times as large as usual: attention that concentrates, so that pages can be left out.
PEAKED = cases.Case("peaked", INT4, head_dim=64, kv_heads=2, lens=(300, 150), key_size=6.0)
CASES = [
    PEAKED,
    replace(PEAKED, name="hot", hot=True),
    replace(PEAKED, name="sinks-q2", sinks=True, q_len=2),
    replace(PEAKED, name="int8-window", scheme=INT8, group=2, window=200),
    replace(PEAKED, name="offset", mu=3.0, pairs=16, pair_scale=True),
]


def run(batch: cases.Batch, threshold: float | None) -> tuple[torch.Tensor, float]:
    """Output of the kernel, and the fraction of pages that it left out."""
    case = batch.case
    plan = DecodePlan(
        batch.layout, case.kv_heads * case.group, len(case.lens) + 1, max(case.lens), q_len=case.q_len,
        sliding_window=case.window, hot=case.hot, pairs=case.pairs, skip_threshold=threshold, device="cpu",
        config=DecodeConfig(programs=4, min_chunk=1),
    )  # fmt: skip
    plan.update(batch.block_tables, batch.seq_lens, batch.hot)
    out = torch.full(batch.query.shape, float("nan"))
    decode.decode(
        plan, batch.query, batch.pages, batch.block_tables, batch.seq_lens, case.softmax_scale, out,
        torch.empty(batch.query.shape[:3]), batch.tables, batch.hot, case.softcap, batch.sinks, batch.position_offset,
    )  # fmt: skip
    return out, plan.skip_fraction()


def ideal(batch: cases.Batch, threshold: float | None) -> torch.Tensor:
    case = batch.case
    return reference.paged_attention_decode(
        batch.query, batch.pages, batch.layout, batch.block_tables, batch.seq_lens, case.softmax_scale, batch.transform,
        batch.hot, case.window, case.softcap, batch.sinks, batch.position_offset, torch.float64, threshold,
    )[0]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pages_are_left_out_at_an_error_within_that_of_the_reference(case: cases.Case) -> None:
    batch = cases.make_batch(case, "cpu")
    cases.write_reference(batch)
    exact = ideal(batch, None)
    for threshold in (1e-6, 0.02):
        out, skipped = run(batch, threshold)
        allowed = cases.relative_error(ideal(batch, threshold), exact)
        assert cases.relative_error(out, exact) <= allowed + 1e-3
        if threshold == 0.02:
            assert skipped > 0.0


def test_nothing_is_left_out_of_flat_attention() -> None:
    batch = cases.make_batch(replace(PEAKED, key_size=0.01), "cpu")
    cases.write_reference(batch)
    out, skipped = run(batch, 0.5)
    assert skipped == 0.0
    assert cases.relative_error(out, ideal(batch, None)) < 1e-3


def test_seeds_let_every_part_skip() -> None:
    """With one key far above all others, hot on the first page, every quantized page may go, whatever part it is in."""
    batch = cases.make_batch(replace(PEAKED, hot=True, lens=(300, 300)), "cpu")
    cases.write_reference(batch)
    assert batch.hot is not None
    first = batch.hot.index[batch.block_tables[:2, 0].long()]
    assert bool((first >= 0).all())
    group = batch.query.shape[2] // batch.layout.kv_heads
    for i in range(2):  # the first key of each head points along the mean query of its group
        mean = batch.query[i, 0].view(batch.layout.kv_heads, group, -1).float().mean(1)
        batch.query[i, 0] = mean.repeat_interleave(group, 0).to(batch.query.dtype)
        batch.hot.pool[first[i], 0, :, 0] = (40.0 * mean).to(batch.hot.pool.dtype)
    _, skipped = run(batch, 1e-3)
    assert skipped == 1.0


def test_thresholds_that_are_not_allowed_are_refused() -> None:
    batch = cases.make_batch(PEAKED, "cpu")
    for bad in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="skip_threshold"):
            run(batch, bad)
    plan = DecodePlan(batch.layout, 8, 1, 64, device="cpu")
    with pytest.raises(ValueError, match="made without skip_threshold"):
        plan.skip_threshold = 0.1
