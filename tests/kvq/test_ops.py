"""write_pages, gather_pages and decode_pages on pages as an engine hands them over: views into a bigger buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import INT4, INT8, KeyTransform, PageLayout, ops
from kvq.kernels.device import DeviceTransform
from kvq.plan import DecodePlan
from kvq.scheme import PRESETS

HEADS, DIM, PAGE = 2, 64, 16
LAYOUT = PageLayout(INT4, PAGE, HEADS, DIM)


def buffer(num_pages: int = 4, layout: PageLayout = LAYOUT, before: int = 32, after: int = 48) -> torch.Tensor:
    """All bits set: fp16 0xFFFF is NaN."""
    return torch.full((num_pages, before + layout.page_bytes + after), 255, dtype=torch.uint8)


def view_of(whole: torch.Tensor, layout: PageLayout = LAYOUT, before: int = 32) -> torch.Tensor:
    return whole[:, before : before + layout.page_bytes]


def tokens(n: int = 20, dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, HEADS, DIM, generator=g).to(dtype), torch.randn(n, HEADS, DIM, generator=g).to(dtype)


def transform(max_position: int = 1023) -> DeviceTransform:
    freq = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    mu = torch.ones(HEADS, DIM)
    return DeviceTransform.build(KeyTransform(HEADS, DIM, mu, None, freq), PAGE, max_position, "cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_strided_and_offset_views_give_what_contiguous_pages_give(name: str) -> None:  # vLLM #48412
    layout = PageLayout(PRESETS[name], PAGE, HEADS, DIM)
    key, value = tokens(30)
    slots = torch.cat([torch.arange(40, 56), torch.arange(0, 14)])
    plain = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
    whole = buffer(4, layout)
    ops.write_pages(plain, layout, key, value, slots)
    ops.write_pages(view_of(whole, layout), layout, key, value, slots)
    page_of = torch.tensor([0, 2, 3])
    for a, b in zip(
        ops.gather_pages(plain, layout, page_of, 14), ops.gather_pages(view_of(whole, layout), layout, page_of, 14)
    ):
        assert torch.equal(a, b)
    assert (whole[:, :32] == 255).all() and (whole[:, 32 + layout.page_bytes :] == 255).all()
    assert (whole[1] == 255).all()  # a page nobody wrote


@settings(max_examples=30, deadline=None)
@given(data=st.data(), n=st.integers(0, 40))
def test_a_write_touches_its_slots_and_nothing_else(data, n: int) -> None:
    slots = torch.tensor(data.draw(st.permutations(range(4 * PAGE)))[:n], dtype=torch.int64)
    skipped = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    slots[skipped] = -data.draw(st.integers(1, 100))
    key, value = tokens(n)
    pages = view_of(buffer())
    ops.write_pages(pages, LAYOUT, key, value, slots.to(data.draw(st.sampled_from([torch.int32, torch.int64]))))
    k, v = ops.gather_pages(pages, LAYOUT, torch.arange(4), 4 * PAGE, dtype=torch.float32)
    written = torch.zeros(4 * PAGE, dtype=torch.bool)
    written[slots[~skipped]] = True
    assert torch.isfinite(k[written]).all() and torch.isfinite(v[written]).all()
    assert k[~written].isnan().all() and v[~written].isnan().all()
    for x, back in ((key, k), (value, v)):
        assert ((back[slots[~skipped]] - x[~skipped].float()).abs() < 1.2).all()


def test_keys_of_any_stride_give_the_same_bytes() -> None:
    key, value = tokens(20)
    plain, other = (torch.zeros(4, LAYOUT.page_bytes, dtype=torch.uint8) for _ in range(2))
    slots = torch.arange(20)
    ops.write_pages(plain, LAYOUT, key, value, slots)
    turned = key.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    qkv = torch.stack([value, key, value], 1)
    ops.write_pages(other, LAYOUT, turned, qkv[:, 2], torch.stack([slots, slots], 1)[:, 0])
    assert torch.equal(plain, other)


def test_tokens_beyond_the_slots_are_padding() -> None:
    key, value = tokens(20)
    key[12:], value[12:] = torch.nan, torch.nan
    pages = view_of(buffer())
    ops.write_pages(pages, LAYOUT, key, value, torch.arange(12))
    k, _ = ops.gather_pages(pages, LAYOUT, torch.arange(4), 16)
    assert torch.isfinite(k[:12]).all() and k[12:].isnan().all()


BAD_TOKENS = [
    ("slots", lambda t: t["slot_mapping"].__setitem__(3, 64), ValueError, "slot_mapping holds 64; there are 64 slots"),
    ("nan", lambda t: t["key"].__setitem__((3, 1, 5), torch.nan), ValueError, r"key holds nan at \[3, 1, 5\]"),
    ("inf", lambda t: t["value"].__setitem__((3, 0, 6), -torch.inf), ValueError, r"value holds -inf at \[3, 0, 6\]"),
    (
        "far",
        lambda t: t["positions"].__setitem__(3, 1024),
        ValueError,
        r"positions holds 0\.\.1024; allowed: 0\.\.1023",
    ),
    ("negative", lambda t: t["positions"].__setitem__(3, -1), ValueError, r"positions holds -1\.\.19; allowed: 0\.\."),
]


@pytest.mark.parametrize(("change", "error", "message"), [c[1:] for c in BAD_TOKENS], ids=[c[0] for c in BAD_TOKENS])
def test_sync_raises_before_anything_is_written(change, error, message) -> None:
    key, value = tokens()
    call = {"key": key, "value": value, "slot_mapping": torch.arange(20), "positions": torch.arange(20)}
    change(call)
    pages = view_of(buffer())
    with pytest.raises(error, match=message):
        ops.write_pages(pages, LAYOUT, **call, transform=transform(), check="sync")
    assert (pages == 255).all()


@pytest.mark.parametrize("change", [c[1] for c in BAD_TOKENS], ids=[c[0] for c in BAD_TOKENS])
def test_flag_skips_the_slot_and_counts_it(change) -> None:
    key, value = tokens()
    call = {"key": key, "value": value, "slot_mapping": torch.arange(20), "positions": torch.arange(20)}
    change(call)
    pages, status = view_of(buffer()), ops.new_status("cpu")
    ops.write_pages(pages, LAYOUT, **call, transform=transform(), check="flag", status=status)
    counted = dict(zip(ops.STATUS_FIELDS, status.tolist()))
    want = {
        BAD_TOKENS[0][1]: "bad_slots", BAD_TOKENS[1][1]: "not_finite", BAD_TOKENS[2][1]: "not_finite",
        BAD_TOKENS[3][1]: "bad_positions", BAD_TOKENS[4][1]: "bad_positions",
    }[change]  # fmt: skip
    assert counted == {name: int(name == want) for name in ops.STATUS_FIELDS}
    k, v = ops.gather_pages(pages, LAYOUT, torch.arange(4), 20, dtype=torch.float32)
    good = torch.arange(20) != 3
    assert k[3].isnan().all() and v[3].isnan().all()
    assert torch.isfinite(k[good]).all() and torch.isfinite(v[good]).all()


def test_flag_changes_none_of_its_arguments() -> None:
    key, value = tokens()
    key[3] = torch.nan
    slots = torch.arange(20)
    ops.write_pages(view_of(buffer()), LAYOUT, key, value, slots, check="flag")
    assert torch.equal(slots, torch.arange(20))


def test_negative_slots_may_hold_anything() -> None:
    key, value = tokens()
    key[3] = torch.nan
    slots, positions = torch.arange(20), torch.arange(20)
    slots[3], positions[3] = -7, -1
    status = ops.new_status("cpu")
    for check in ("sync", "flag"):
        ops.write_pages(
            view_of(buffer()), LAYOUT, key, value, slots, positions, transform(), check=check, status=status
        )
    assert status.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("check", ["sync", "flag"])
def test_clamp_writes_zero_for_nan_and_the_largest_for_inf(check) -> None:
    layout = PageLayout(INT8, PAGE, HEADS, DIM)
    key, value = tokens()
    key[3, 0, 5], value[4, 1, 6], value[5, 1, 7] = torch.nan, torch.inf, -torch.inf
    pages, status = view_of(buffer(4, layout), layout), ops.new_status("cpu")
    ops.write_pages(pages, layout, key, value, torch.arange(20), check=check, on_nonfinite="clamp", status=status)
    k, v = ops.gather_pages(pages, layout, torch.arange(4), 20, dtype=torch.float32)
    assert k[3, 0, 5] == 0
    assert v[4, 1, 6] == pytest.approx(65504, rel=1e-3) and v[5, 1, 7] == pytest.approx(-65504, rel=1e-3)
    assert status.tolist() == [0, 3 if check == "flag" else 0, 0, 0]


@pytest.mark.parametrize("check", ["sync", "flag"])
def test_rows_beyond_fp16_are_counted(check) -> None:  # vLLM #53334
    key, value = tokens(dtype=torch.bfloat16)
    key[3, 0] *= 1e6
    value[4] *= 1e20
    status = ops.new_status("cpu")
    ops.write_pages(view_of(buffer()), LAYOUT, key, value, torch.arange(20), check=check, status=status)
    assert status.tolist() == [0, 0, 3, 0]


def test_nothing_to_write_is_fine() -> None:
    pages = view_of(buffer())
    key, value = tokens(0)
    ops.write_pages(pages, LAYOUT, key, value, torch.arange(0))
    ops.write_pages(pages, LAYOUT, *tokens(3), torch.full((3,), -1))
    assert (pages == 255).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pages": torch.zeros(4, LAYOUT.page_bytes)}, ValueError, r"pages is torch\.float32 .*; expected uint8"),
        ({"pages": torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8)}, ValueError, "pages is torch.uint8 .*expected"),
        (
            {"pages": torch.zeros(4, LAYOUT.page_bytes - 16, dtype=torch.uint8)},
            ValueError,
            "the layout needs 2304 contiguous",
        ),
        ({"pages": torch.zeros(LAYOUT.page_bytes, 4, dtype=torch.uint8).T}, ValueError, "stride 4; the layout needs"),
        ({"pages": buffer(after=40)[:, 32:-40]}, ValueError, "page stride .* that is not a multiple of 16 bytes"),
        ({"pages": buffer(before=8, after=56)[:, 8:-56]}, ValueError, "a base that is not a multiple of 16 bytes"),
        ({"key": torch.zeros(20, 3, 64)}, ValueError, r"key has shape \(20, 3, 64\); expected \[tokens, 2, 64\]"),
        ({"value": torch.zeros(20, 2, 80)}, ValueError, r"value has shape \(20, 2, 80\); expected"),
        ({"key": torch.zeros(20, 128)}, ValueError, r"key has shape \(20, 128\)"),
        ({"key": torch.zeros(20, 2, 64, dtype=torch.int8)}, TypeError, r"key is torch\.int8; allowed: float16"),
        ({"value": torch.zeros(20, 2, 64)}, TypeError, r"value is torch\.float32; key is torch\.float16"),
        ({"key": torch.zeros(20, 2, 64, device="meta")}, ValueError, "key is on meta; the pages are on cpu"),
        ({"slot_mapping": torch.arange(21)}, ValueError, "slot_mapping has 21 slots; key has 20 and value 20 tokens"),
        ({"slot_mapping": torch.arange(20.0)}, TypeError, r"slot_mapping is torch\.float32; allowed: int32, int64"),
        ({"slot_mapping": torch.zeros(4, 5, dtype=torch.int64)}, ValueError, r"slot_mapping has shape \(4, 5\)"),
        ({"positions": None}, ValueError, "positions is None; a transform with an offset needs"),
        ({"positions": torch.arange(19)}, ValueError, r"positions has shape \(19,\); expected \[20\]"),
        ({"positions": torch.arange(20.0)}, TypeError, r"positions is torch\.float32"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite is 'ignore'; allowed: 'raise', 'clamp'"),
        ({"check": "none"}, ValueError, "check is 'none'; allowed: 'sync', 'flag'"),
    ],
)
def test_bad_arguments_of_write_are_named(change: dict, error: type[Exception], message: str) -> None:
    key, value = tokens()
    pages = torch.full((4, LAYOUT.page_bytes), 255, dtype=torch.uint8)
    call = {"pages": pages, "layout": LAYOUT, "key": key, "value": value, "slot_mapping": torch.arange(20),
            "positions": torch.arange(20), "transform": transform()}  # fmt: skip
    with pytest.raises(error, match=message):
        ops.write_pages(**{**call, **change})
    assert (pages == 255).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seq_len": 65}, ValueError, "seq_len is 65; block_table has 4 pages of 16"),
        ({"seq_len": -1}, ValueError, r"start is 0; it must be in 0\.\.-1 \(seq_len\)"),
        ({"start": 21}, ValueError, r"start is 21; it must be in 0\.\.20"),
        ({"block_table": torch.tensor([0, 4])}, ValueError, r"block_table holds page 4; allowed: 0\.\.3"),
        ({"block_table": torch.tensor([-1, 0])}, ValueError, "block_table holds page -1"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"block_table has shape \(2, 2\)"),
        ({"block_table": torch.arange(4.0)}, TypeError, r"block_table is torch\.float32"),
        ({"position_offset": 1005}, ValueError, r"positions are 1005\.\.1024; allowed: 0\.\.1023"),
        ({"position_offset": -1}, ValueError, r"positions are -1\.\.18; allowed: 0\.\.1023"),
        ({"dtype": torch.int32}, TypeError, r"dtype is torch\.int32; it must be a floating type"),
    ],
)
def test_bad_arguments_of_gather_are_named(change: dict, error: type[Exception], message: str) -> None:
    call = {"pages": view_of(buffer()), "layout": LAYOUT, "block_table": torch.arange(4), "seq_len": 20,
            "transform": transform()}  # fmt: skip
    with pytest.raises(error, match=message):
        ops.gather_pages(**{**call, **change})


def test_unused_entries_of_a_block_table_may_hold_anything() -> None:
    pages = view_of(buffer())
    ops.write_pages(pages, LAYOUT, *tokens(10), torch.arange(10))
    k, _ = ops.gather_pages(pages, LAYOUT, torch.tensor([0, -1, 9999]), 10)
    assert torch.isfinite(k).all()


def test_gather_in_chunks_needs_no_buffer_of_the_whole_context() -> None:  # vLLM #40420
    pages = view_of(buffer())
    ops.write_pages(pages, LAYOUT, *tokens(60), torch.arange(60))
    table = torch.arange(4)
    whole = ops.gather_pages(pages, LAYOUT, table, 60)
    for start, stop in ((0, 7), (7, 32), (32, 60), (60, 60)):
        chunk = ops.gather_pages(pages, LAYOUT, table, stop, start=start)
        assert all(torch.equal(c, w[start:stop]) for c, w in zip(chunk, whole))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(2, 4, 80)}, ValueError, r"query has shape .*; expected \[num_seqs, q_len, heads, 64\]"),
        ({"query": torch.zeros(4, 64)}, ValueError, r"query has shape \(4, 64\)"),
        ({"query": torch.zeros(2, 5, 64)}, ValueError, "query has 5 heads; it must be a multiple of the 2 kv heads"),
        ({"query": torch.zeros(2, 9, 4, 64)}, ValueError, "query has q_len 9; allowed: 1 to 8"),
        ({"query": torch.zeros(2, 4, 64, dtype=torch.int32)}, TypeError, r"query is torch\.int32; allowed"),
        ({"query": torch.zeros(2, 4, 64, device="meta")}, ValueError, "query is on meta; the pages are on cpu"),
        ({"block_tables": torch.arange(4)}, ValueError, r"block_tables has shape \(4,\); expected \[num_seqs, max_"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, ValueError, r"block_tables has shape \(3, 4\)"),
        ({"block_tables": torch.zeros(2, 4)}, TypeError, r"block_tables is torch\.float32"),
        ({"block_tables": torch.tensor([[0, 4], [0, 1]])}, ValueError, r"block_tables holds page 4; allowed: 0\.\.3"),
        ({"block_tables": torch.tensor([[0, 1], [-2, 1]])}, ValueError, "block_tables holds page -2"),
        ({"seq_lens": torch.tensor([20])}, ValueError, r"seq_lens has shape \(1,\); expected \[2\]"),
        ({"seq_lens": torch.tensor([20.0, 3.0])}, TypeError, r"seq_lens is torch\.float32"),
        ({"seq_lens": torch.tensor([20, 65])}, ValueError, r"seq_lens holds 65; allowed: 0\.\.64"),
        ({"seq_lens": torch.tensor([-1, 3])}, ValueError, r"seq_lens holds -1; allowed: 0\.\.64"),
        ({"sliding_window": 0}, ValueError, "sliding_window is 0; it must be positive, or None"),
        ({"softcap": 0.0}, ValueError, r"softcap is 0\.0; it must be positive, or None"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks is torch\.float32 \(2,\); expected float \[4\]"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, ValueError, r"sinks is torch\.int32 \(4,\)"),
        ({"position_offset": torch.zeros(3, dtype=torch.int32)}, ValueError, r"position_offset has shape \(3,\)"),
        ({"position_offset": torch.zeros(2)}, TypeError, r"position_offset is torch\.float32"),
        ({"position_offset": torch.tensor([1010, 0])}, ValueError, "positions reach 1029; the tables end at 1023"),
        ({"out": torch.zeros(2, 4, 80)}, ValueError, r"out has shape \(2, 4, 80\)"),
        ({"out": torch.zeros(2, 64, 4).transpose(1, 2)}, ValueError, "out has shape .* contiguous in its last dim"),
        ({"out": torch.zeros(2, 4, 64, dtype=torch.int32)}, TypeError, r"out is torch\.int32; allowed"),
        ({"scale": float("inf")}, ValueError, "scale is inf; it must be finite"),
        ({"scale": -0.1}, ValueError, "scale is -0.1; it must be finite and at least 0"),
        ({"check": "none"}, ValueError, "check is 'none'; allowed: 'sync', 'flag'"),
    ],
)
def test_bad_arguments_of_decode_are_named(change: dict, error: type[Exception], message: str) -> None:
    call = {"query": torch.zeros(2, 4, 64), "pages": view_of(buffer()), "layout": LAYOUT,
            "block_tables": torch.zeros(2, 4, dtype=torch.int32), "seq_lens": torch.tensor([20, 3]),
            "transform": transform()}  # fmt: skip
    with pytest.raises(error, match=message):
        ops.decode_pages(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"heads is 5; it must be a multiple of kv_heads \(2\)"),
        ({"q_len": 9}, "q_len is 9; allowed: 1 to 8"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"heads": 4.0}, r"heads is 4\.0; it must be an integer of at least 1"),
        ({"q_len": True}, "q_len is True; allowed: 1 to 8"),
        ({"max_seqs": 0}, "max_seqs is 0; it must be an integer of at least 1"),
        ({"max_seq_len": 2.5}, r"max_seq_len is 2\.5; it must be an integer of at least 1"),
    ],
)
def test_bad_arguments_of_a_plan_are_named(change: dict, message: str) -> None:
    call = {"layout": LAYOUT, "heads": 4, "max_seqs": 2, "max_seq_len": 100, "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        DecodePlan(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": PageLayout(INT8, PAGE, HEADS, DIM)}, "layout is .*; the plan was made for"),
        ({"heads": 8}, "heads is 8; the plan was made for 4"),
        ({"num_seqs": 3}, "the batch has 3 sequences; the plan was made for at most 2"),
        ({"q_len": 2}, "q_len is 2; the plan was made for 1"),
        ({"sliding_window": 7}, "sliding_window is 7; the plan was made for None"),
        ({"hot": True}, "hot is True; the plan was made for False"),
    ],
)
def test_a_plan_refuses_a_batch_it_was_not_made_for(change: dict, message: str) -> None:  # vLLM #41726, #46767
    plan = DecodePlan(LAYOUT, 4, 2, 100, device="cpu")
    call = {"layout": LAYOUT, "heads": 4, "num_seqs": 2, "q_len": 1, "sliding_window": None, "hot": False}
    plan.check(**call)
    with pytest.raises(ValueError, match=message):
        plan.check(**{**call, **change})
