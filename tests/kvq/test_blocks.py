from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kvq import KeyTransform, QuantizedBlocks, quantize_blocks, reference
from kvq.scheme import HEAD_DIMS


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(blocks: QuantizedBlocks, x: torch.Tensor) -> float:
    got = blocks.dequantize(torch.float32)
    assert got.shape == x.shape
    return float((got - x.float()).norm() / x.float().norm())


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The values of ``x`` [tokens, heads, dim] in another memory order."""
    if how == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "dims first":
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if how == "slice of qkv":
        wide = torch.full((x.shape[0] + 2, 3, *x.shape[1:]), torch.nan, dtype=x.dtype)
        wide[1:-1, 1] = x
        return wide[1:-1, 1]
    if how == "every second token":
        return torch.stack([x, torch.full_like(x, torch.nan)], 1).flatten(0, 1)[::2]
    return x


ORDERS = ["contiguous", "heads first", "dims first", "slice of qkv", "every second token"]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 150),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from(HEAD_DIMS),
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([1, 5, 16, 32, 64, 100, 128]),
    axis=st.sampled_from(["token", "channel"]),
    symmetric=st.sampled_from([None, True, False]),
    rotate=st.sampled_from([None, True, False]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    order=st.sampled_from(ORDERS),
)
def test_any_shape_stride_and_dtype_comes_back(
    tokens, heads, head_dim, bits, block_size, axis, symmetric, rotate, dtype, order
) -> None:
    x = randn(tokens, heads, head_dim).to(dtype)
    view = strided(x, order)
    blocks = quantize_blocks(view, bits, block_size=block_size, axis=axis, symmetric=symmetric, rotate=rotate)
    count = -(-tokens // block_size)
    assert blocks.codes.shape == (count, heads, block_size, head_dim * bits // 8)
    scales = (count, heads, block_size) if axis == "token" else (count, heads, head_dim)
    assert blocks.scales.shape == scales and blocks.scales.dtype == torch.float16
    assert (blocks.zeros is None) == (bits == 8 if symmetric is None else symmetric)
    assert blocks.zeros is None or blocks.zeros.shape == scales
    assert blocks.dequantize().dtype == dtype
    if axis == "token" or block_size > 8:
        assert relative_error(blocks, x) < (0.16 if bits == 4 else 0.012)
    same = quantize_blocks(x, bits, block_size=block_size, axis=axis, symmetric=symmetric, rotate=rotate)
    assert torch.equal(same.codes, blocks.codes) and torch.equal(same.scales, blocks.scales)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([0.0, 6e-8, 3e-5, 1.0, 1e4, 65504.0]),
    outlier=st.sampled_from([0.0, 400.0, -400.0, 65504.0]),
    bits=st.sampled_from([4, 8]),
    axis=st.sampled_from(["token", "channel"]),
    symmetric=st.booleans(),
)
def test_no_values_give_nan_or_inf(seed, size, outlier, bits, axis, symmetric) -> None:
    x = (size * (2 * torch.rand(20, 2, 64, generator=torch.Generator().manual_seed(seed)) - 1)).half()
    x[3, 1, 7] += outlier
    x = x.clamp(-65504, 65504)
    blocks = quantize_blocks(x, bits, axis=axis, symmetric=symmetric, block_size=16)
    assert torch.isfinite(blocks.scales).all() and (blocks.zeros is None or torch.isfinite(blocks.zeros).all())
    back = blocks.dequantize(torch.float32)
    assert torch.isfinite(back).all()
    if not x.any():
        assert not back.any()


def test_blocks_given_as_blocks_come_back_as_blocks() -> None:
    x = randn(3, 32, 2, 64)
    blocks = quantize_blocks(x, 4)
    assert blocks.block_size == 32 and blocks.codes.shape == (3, 2, 32, 32)
    flat = quantize_blocks(x.flatten(0, 1), 4, block_size=32)
    assert torch.equal(blocks.codes, flat.codes)
    assert torch.equal(blocks.dequantize(), flat.dequantize().view(3, 32, 2, 64))


def test_bits_per_element_count_scales() -> None:
    assert quantize_blocks(randn(128, 2, 128), 4).bits_per_element == 4.25
    assert quantize_blocks(randn(128, 2, 128), 4, symmetric=True).bits_per_element == 4.125
    assert quantize_blocks(randn(128, 2, 128), 8).bits_per_element == 8.125
    assert quantize_blocks(randn(128, 2, 128), 4, axis="channel").bits_per_element == 4.5
    assert quantize_blocks(randn(96, 2, 128), 4).bits_per_element == 4.25 * 128 / 96  # a partial block is stored whole


def test_nbytes_is_what_the_tensors_take() -> None:
    blocks = quantize_blocks(randn(64, 2, 128), 4)
    assert blocks.nbytes == 64 * 2 * (64 + 4)


def test_a_partial_block_does_not_change_the_tokens_before_it() -> None:
    x = randn(100, 2, 64)
    assert torch.equal(quantize_blocks(x).dequantize()[:64], quantize_blocks(x[:64]).dequantize())


def test_channel_axis_keeps_a_channel_100_times_the_rest() -> None:  # KIVI
    x = randn(128, 2, 64)
    x[..., 11] *= 100
    other = torch.arange(64) != 11

    def error(axis: str) -> float:
        return float((quantize_blocks(x, axis=axis, rotate=False).dequantize() - x)[..., other].norm())

    assert error("channel") < 0.12 * float(x[..., other].norm()) < 0.5 * error("token")


@pytest.fixture
def transform() -> KeyTransform:
    freq = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    return KeyTransform(2, 64, 20 * randn(2, 64, seed=1), torch.rand(2, 32) + 0.5, freq)


def test_dequantize_gives_back_the_original_space(transform: KeyTransform) -> None:
    positions = torch.arange(1000, 1100)
    x = reference.offset(transform, positions) + randn(100, 2, 64)
    blocks = quantize_blocks(x, transform=transform, positions=positions)
    assert relative_error(blocks, x) < 0.01 < relative_error(quantize_blocks(x), x)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("with_transform", [False, True], ids=["plain", "transform"])
def test_files_hold_scheme_version_and_transform(tmp_path, axis, with_transform, transform) -> None:
    x = randn(70, 2, 64).to(torch.bfloat16)
    extra = {"transform": transform, "positions": torch.arange(70)} if with_transform else {}
    blocks = quantize_blocks(x, 4, axis=axis, symmetric=False, block_size=32, **extra)
    path = tmp_path / "blocks.safetensors"
    blocks.save(path)
    again = QuantizedBlocks.load(path)
    assert (again.scheme, again.axis, again.version, again.dtype) == (blocks.scheme, axis, 1, torch.bfloat16)
    assert (again.transform.digest if with_transform else None) == (transform.digest if with_transform else None)
    assert torch.equal(again.dequantize(), blocks.dequantize())


def rewrite(path, change) -> None:
    with safe_open(path, framework="pt") as f:
        meta = json.loads(f.metadata()["kvq_blocks"])
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    change(meta, tensors)
    save_file(tensors, path, {"kvq_blocks": json.dumps(meta)})


def test_another_format_version_is_refused_on_load(tmp_path) -> None:
    path = tmp_path / "blocks.safetensors"
    quantize_blocks(randn(16, 1, 64)).save(path)
    rewrite(path, lambda meta, tensors: meta.update(version=2))
    with pytest.raises(ValueError, match=r"has version 2; this kvq reads 1"):
        QuantizedBlocks.load(path)


def test_a_tampered_transform_is_refused_on_load(tmp_path, transform) -> None:
    path = tmp_path / "blocks.safetensors"
    quantize_blocks(randn(16, 2, 64), transform=transform, positions=torch.arange(16)).save(path)
    rewrite(path, lambda meta, tensors: tensors["transform.mu"].mul_(2))
    with pytest.raises(ValueError, match=f"the file says {transform.digest}"):
        QuantizedBlocks.load(path)


def test_a_file_of_something_else_is_refused(tmp_path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not hold kvq blocks"):
        QuantizedBlocks.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_blocks_keep_no_gradients(axis: str, transform: KeyTransform) -> None:
    x = randn(16, 2, 64).requires_grad_()
    blocks = quantize_blocks(x, symmetric=False, axis=axis, transform=transform, positions=torch.arange(16))
    for tensor in (blocks.codes, blocks.scales, blocks.zeros, blocks.dequantize()):
        assert not tensor.requires_grad


def test_to_moves_every_tensor(transform: KeyTransform) -> None:
    blocks = quantize_blocks(randn(16, 2, 64), transform=transform, positions=torch.arange(16)).to("meta")
    assert {t.device.type for t in (blocks.codes, blocks.scales, blocks.zeros, blocks.positions)} == {"meta"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_named_or_clamped(value: float) -> None:
    x = randn(70, 2, 64)
    x[65, 1, 3] = value
    with pytest.raises(ValueError, match=rf"x holds {value} at \[65, 1, 3\]; pass on_nonfinite='clamp'"):
        quantize_blocks(x)
    back = quantize_blocks(x, 8, on_nonfinite="clamp").dequantize()
    assert torch.isfinite(back).all()
    want = 0.0 if value != value else 65504.0 if value > 0 else -65504.0
    assert back[65, 1, 3] == pytest.approx(want, abs=0.02, rel=0.01)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(8, 64)}, ValueError, r"x has shape \(8, 64\); expected \[tokens, kv_heads, head_dim\]"),
        ({"x": torch.zeros(8, 2, 72)}, ValueError, "head_dim is 72; allowed: 64"),
        ({"x": torch.zeros(0, 2, 64)}, ValueError, "x has no tokens"),
        ({"x": torch.zeros(8, 2, 64, dtype=torch.int32)}, TypeError, r"x is torch\.int32; allowed: float16"),
        ({"x": torch.zeros(8, 2, 64, dtype=torch.float64)}, TypeError, r"x is torch\.float64"),
        ({"bits": 3}, ValueError, "bits is 3; allowed: 4 or 8"),
        ({"axis": "head"}, ValueError, "axis is 'head'; allowed: 'token', 'channel'"),
        ({"block_size": 0}, ValueError, "block_size is 0; it must be an integer of at least 1"),
        ({"block_size": 16.0}, ValueError, r"block_size is 16\.0; it must be an integer"),
        ({"on_nonfinite": "zero"}, ValueError, "on_nonfinite is 'zero'; allowed: 'raise', 'clamp'"),
        ({"transform": KeyTransform(3, 64)}, ValueError, "transform is for 3 heads of 64; x has 2 of 64"),
    ],
)
def test_bad_arguments_are_named(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_blocks(**{"x": torch.zeros(8, 2, 64), **change})


def test_bad_positions_are_named(transform: KeyTransform) -> None:
    x = torch.zeros(8, 2, 64)
    with pytest.raises(ValueError, match="positions is None"):
        quantize_blocks(x, transform=transform)
    with pytest.raises(ValueError, match=r"positions has shape \(7,\); expected \[8\]"):
        quantize_blocks(x, transform=transform, positions=torch.arange(7))
    with pytest.raises(ValueError, match="positions holds -1"):
        quantize_blocks(x, transform=transform, positions=torch.arange(8) - 1)
    with pytest.raises(TypeError, match=r"positions is torch\.float32"):
        quantize_blocks(x, transform=transform, positions=torch.arange(8.0))
