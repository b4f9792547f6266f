"""The reference is the specification, so it is held against first principles here."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import INT4, INT4_SYM, INT8, K8V4, PageLayout, TensorScheme, reference
from kvq.page import PAGE_SIZES
from kvq.scheme import HEAD_DIMS

KINDS = {
    "int4": INT4.key,
    "int4-sym": INT4_SYM.key,
    "int8": INT8.key,
    "int4-plain": TensorScheme(4, symmetric=False, rotate=False),
    "int4-sym-plain": TensorScheme(4, symmetric=True, rotate=False),
    "int8-asymmetric": TensorScheme(8, symmetric=False, rotate=False),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def round_trip(x: torch.Tensor, kind: TensorScheme) -> torch.Tensor:
    codes, scale, zero = reference.quantize_rows(reference.encode(x.float(), kind), kind)
    assert torch.isfinite(scale).all() and (zero is None or torch.isfinite(zero).all())
    packed = reference.pack(codes, kind.bits)
    assert packed.shape[-1] == kind.row_bytes(x.shape[-1])
    stored = reference.dequantize_rows(reference.unpack(packed, kind.bits), scale, zero, kind, torch.float32)
    return reference.decode(stored, kind)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)  # vLLM #56197
def test_hadamard_is_orthogonal_and_its_own_inverse(head_dim: int) -> None:
    h = reference.hadamard(head_dim, torch.float64)
    assert torch.allclose(h @ h, torch.eye(head_dim, dtype=torch.float64), atol=1e-12)
    assert torch.equal(h, h.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_dim_has_one_place_in_a_word(head_dim: int, bits: int) -> None:
    dims = reference.plane_dims(head_dim, 16 // bits)
    assert sorted(dims.flatten().tolist()) == list(range(head_dim))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), lead=st.lists(st.integers(0, 3), max_size=3))
def test_unpack_inverts_pack(head_dim: int, bits: int, seed: int, lead: list[int]) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (*lead, head_dim), generator=g, dtype=torch.uint8)
    packed = reference.pack(codes, bits)
    assert packed.shape == (*lead, head_dim * bits // 8)
    assert torch.equal(reference.unpack(packed, bits), codes)


def test_word_holds_the_dims_the_format_says() -> None:
    codes = torch.zeros(128, dtype=torch.uint8)
    codes[[3, 3 + 32, 3 + 64, 3 + 96]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    packed = reference.pack(codes, 4)
    assert packed[6:8].tolist() == [0x21, 0x43] and packed.sum() == 0x21 + 0x43


@every_kind
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e4, -65504.0, 6e-8])
def test_constant_and_zero_rows_keep_their_value(kind: TensorScheme, value: float) -> None:  # LMDeploy, KIVI
    x = torch.full((5, 2, 128), value)
    error = (round_trip(x, kind) - x).abs().max()
    if value == 0:
        assert error == 0
    elif not kind.symmetric and not kind.rotate:
        assert error <= max(abs(value) * 2**-10, 6e-8)
    else:  # a rotated constant row is one spike; the clip, and the end of fp16, take part of it
        lost = max(0.0, 1 - 65504 / (abs(value) * 128**0.5)) if kind.rotate else 0.0
        assert rms(round_trip(x, kind) - x) <= max(abs(value) * (0.06 + lost), 1e-6)


@every_kind
def test_single_outlier_does_not_zero_its_row(kind: TensorScheme) -> None:  # fused-int4: +-400 over a median of 2
    if kind.bits == 4 and not kind.rotate:
        pytest.skip("what the rotation is for")
    g = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(64, 1, 128, generator=g)
    x[..., 17] = 400 * torch.randn(64, 1, generator=g).sign()
    rest = torch.arange(128) != 17
    assert rms((round_trip(x, kind) - x)[..., rest]) < 0.8 * rms(x[..., rest])
    assert rms((round_trip(x, kind) - x)[..., 17]) < 0.02 * 400


@every_kind
def test_errors_are_within_half_a_step(kind: TensorScheme) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, 128, generator=g)
    codes, scale, zero = reference.quantize_rows(x, kind)
    error = (reference.dequantize_rows(codes, scale, zero, kind, torch.float32) - x).abs()
    inside = (codes > 0) & (codes < kind.levels - 1)
    # half a step, the fp16 rounding of scale and zero over the codes, and what the gain moves a value by
    moved = 0.15 if kind.unshrunk else 0.0
    assert (error <= scale.float().abs() * (0.5 + moved + kind.levels * 2.0**-10) + 4e-3)[inside].all()
    edge = (1 - kind.clip) / 2 * (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True))
    if kind.symmetric:  # the end opposite to the largest element has one code less
        edge = (1 - kind.clip) * x.abs().amax(-1, keepdim=True) + scale.float().abs()
    assert (error <= edge + scale.float().abs() * (0.5 + moved + kind.levels * 2.0**-10) + 4e-3).all()


@pytest.mark.parametrize("kind", [INT4.key, INT4_SYM.key], ids=["int4", "int4-sym"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_stored_keys_are_as_long_as_the_keys(kind: TensorScheme, head_dim: int) -> None:
    """A query along a key scores with the stored key what it scores with the key itself: else recent ones win."""
    x = torch.randn(20000, 1, head_dim, generator=torch.Generator().manual_seed(0))
    size = []
    for scheme in (kind, replace(kind, unshrunk=False)):
        stored = reference.dequantize_rows(*reference.quantize_rows(x, scheme), scheme, torch.float32)
        size.append(float((x * stored).sum() / x.square().sum()))
    assert abs(size[0] - 1) < 4e-4 and size[1] < 1 - 0.003
    if not kind.symmetric:
        high = x + 4
        stored = reference.dequantize_rows(*reference.quantize_rows(high, kind), kind, torch.float32)
        assert abs(float((stored.mean(-1) - high.mean(-1)).mean())) < 2e-3


def test_rows_far_from_zero_keep_the_zero_that_their_codes_were_made_for() -> None:
    x = 1000.0 + torch.rand(50, 2, 64, generator=torch.Generator().manual_seed(0))
    stored = reference.dequantize_rows(*reference.quantize_rows(x, INT4.key), INT4.key, torch.float32)
    assert (stored - x).abs().max() < 0.1  # fp16 steps at 1000 are 0.5


@every_kind
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_normal_rows_come_back_as_the_bits_allow(kind: TensorScheme, head_dim: int) -> None:
    x = torch.randn(256, 2, head_dim, generator=torch.Generator().manual_seed(0))
    limit = 0.01 if kind.bits == 8 else 0.13
    assert rms(round_trip(x, kind) - x) < limit


@every_kind
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([0.0, 6e-8, 1e-6, 1e-4, 1.0, 1e4, 6.5e4, 1e30]),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_no_row_gives_nan_or_inf(kind: TensorScheme, seed: int, size: float, head_dim: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (size * (2 * torch.rand(8, 1, head_dim, generator=g) - 1)).to(torch.bfloat16)
    back = round_trip(x, kind)
    assert torch.isfinite(back).all()
    if 1e-4 <= size <= 1e4:
        assert rms(back - x.float()) < 0.2 * max(rms(x.float()), 1e-6)
    if size <= 6e-8:
        assert back.abs().max() <= 16 * 6e-8 * head_dim


@pytest.mark.parametrize("scheme", [INT4, INT8, K8V4, INT4_SYM], ids=lambda s: s.name)
def test_rows_beyond_fp16_are_clamped_and_counted(scheme) -> None:  # vLLM #53334
    layout = PageLayout(scheme, 16, 2, 64)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    key = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    value = key.clone()
    key[1, 0] *= 1e6
    value[2] *= 1e30
    assert reference.write(pages, layout, key, value, torch.arange(4)) == 3
    views = reference.plane_views(pages, layout)
    assert torch.isfinite(views.k_scales).all() and torch.isfinite(views.v_scales).all()
    k, v = reference.gather(pages, layout, torch.tensor([0]), 4)
    assert torch.isfinite(k).all() and torch.isfinite(v).all()
    assert rms((k - key.float())[[0, 2, 3]]) < 0.2
    assert (k[1, 0].abs().max() <= 65504 * 8) and k[1, 0].abs().max() > 3e4


def test_near_fp16_max_survives() -> None:
    g = torch.Generator().manual_seed(0)
    x = 65504 * (2 * torch.rand(32, 1, 64, generator=g) - 1)
    x[:, :, 0] = 65504
    for kind in KINDS.values():
        limit = 0.25 if kind.rotate else 0.1  # rotated, the row goes beyond fp16 here and there and is clamped
        assert rms(round_trip(x, kind) - x) < limit * rms(x)


def test_fp16_zero_is_rounded_down() -> None:
    x = torch.tensor([1.0001, -1.0001, 0.0, -1e-9, 1e-9, 65504.0, -65504.0, 2049.0])
    down = reference.to_fp16_down(x)
    assert (down.float() <= x).all()
    above = torch.nextafter(down, torch.full_like(down, float("inf"))).float()
    assert (above > x).all()


def slots_of(table: torch.Tensor, page_size: int, start: int, stop: int) -> torch.Tensor:
    index = torch.arange(start, stop)
    return table[index // page_size] * page_size + index % page_size


@pytest.mark.parametrize("scheme", [INT4, INT8, K8V4, INT4_SYM], ids=lambda s: s.name)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_chunks_give_the_bytes_of_one_write(scheme, page_size: int) -> None:  # TensorRT-LLM #2699, omlx #1793
    layout = PageLayout(scheme, page_size, 2, 80)
    g = torch.Generator().manual_seed(0)
    n = 2 * page_size + 5
    key, value = torch.randn(n, 2, 80, generator=g).half(), torch.randn(n, 2, 80, generator=g).half()
    table = torch.tensor([3, 0, 2])
    whole = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
    reference.write(whole, layout, key, value, slots_of(table, page_size, 0, n))
    parts = torch.zeros_like(whole)
    for a, b in itertools.pairwise([0, 1, 2, page_size - 1, page_size + 3, n]):
        reference.write(parts, layout, key[a:b], value[a:b], slots_of(table, page_size, a, b))
    assert torch.equal(whole, parts)


def test_keys_and_values_keep_their_own_scales() -> None:  # vLLM #42580
    layout = PageLayout(INT4, 16, 2, 64)
    pages = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    g = torch.Generator().manual_seed(0)
    key, value = 100 * torch.randn(20, 2, 64, generator=g), torch.randn(20, 2, 64, generator=g)
    reference.write(pages, layout, key, value, torch.arange(20))
    k, v = reference.gather(pages, layout, torch.tensor([0, 1]), 20)
    assert rms(k - key) < 13 and rms(v - value) < 0.13


def test_an_all_zero_page_decodes_to_zeros() -> None:
    for scheme in (INT4, INT8, K8V4, INT4_SYM):
        layout = PageLayout(scheme, 16, 1, 64)
        k, v = reference.gather(torch.zeros(1, layout.page_bytes, dtype=torch.uint8), layout, torch.tensor([0]), 16)
        assert k.abs().max() == 0 and v.abs().max() == 0
