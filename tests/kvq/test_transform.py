from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import INT4, INT8, KeyTransform, PageLayout, reference
from kvq.kernels.device import DeviceTransform
from kvq.transform import format_name


def inv_freq(rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def make(heads: int = 2, dim: int = 64, size: float = 3.0, rotary_dim: int | None = None, **kwargs) -> KeyTransform:
    g = torch.Generator().manual_seed(0)
    mu = size * torch.randn(heads, dim, generator=g)
    scale = torch.rand(heads, dim // 2, generator=g) + 0.5
    return KeyTransform(heads, dim, mu, scale, inv_freq(rotary_dim or dim), rotary_dim, **kwargs)


def rope(x: list[float], position: int, freq: list[float], interleaved: bool) -> list[float]:
    """Rotary embedding of one vector, in plain Python."""
    out, half = list(x), len(freq)
    for j, f in enumerate(freq):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        c, s = math.cos(position * f), math.sin(position * f)
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [64, 32], ids=["all", "partial"])
@pytest.mark.parametrize("position", [0, 1, 777, 131071])
def test_offset_is_the_rotary_embedding_of_mu(interleaved: bool, rotary_dim: int, position: int) -> None:
    t = make(rotary_dim=rotary_dim, interleaved=interleaved)
    got = reference.offset(t, torch.tensor([position]), torch.float64)[0]
    for head in range(2):
        want = rope(t.mu[head].double().tolist(), position, t.inv_freq.tolist(), interleaved)
        assert torch.allclose(got[head], torch.tensor(want, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_device_tables_compose_to_the_exact_angle_at_any_position(page_size: int) -> None:
    t = make()
    tables = DeviceTransform.build(t, page_size, 131071, "cpu")
    for p in (0, 1, page_size, 4097, 70001, 131071):
        far, near = tables.far[p // page_size].double(), tables.near[p % page_size].double()
        cos = far[0] * near[0] - far[1] * near[1]
        sin = far[1] * near[0] + far[0] * near[1]
        assert (cos - (p * t.pair_freq).cos()).abs().max() < 2e-7
        assert (sin - (p * t.pair_freq).sin()).abs().max() < 2e-7


@settings(max_examples=20)
@given(position=st.integers(0, 131071), size=st.sampled_from([0.1, 10.0, 200.0]), rotate=st.booleans())
def test_decode_inverts_encode_at_any_position(position: int, size: float, rotate: bool) -> None:
    t = make(size=size)
    x = torch.randn(3, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kind = replace(INT4.key, rotate=rotate)
    positions = torch.arange(3) + position
    back = reference.decode(reference.encode(x, kind, t, positions), kind, t, positions)
    assert torch.allclose(back, x, atol=1e-4)


def test_a_channel_100_times_the_rest_costs_int4_nothing_once_offset() -> None:  # transformers #35185, llama.cpp #21385
    heads, dim, tokens = 2, 64, 256
    g = torch.Generator().manual_seed(0)
    mu = torch.randn(heads, dim, generator=g)
    mu[:, 5] *= 100
    t = KeyTransform(heads, dim, mu, None, inv_freq(dim))
    positions = torch.arange(tokens)
    noise = torch.randn(tokens, heads, dim, generator=g)
    key = reference.offset(t, positions) + noise
    layout = PageLayout(INT4, 64, heads, dim)

    def error(transform: KeyTransform | None) -> float:
        pages = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
        reference.write(pages, layout, key, key, positions, positions, transform)
        back, _ = reference.gather(pages, layout, torch.arange(4), tokens, transform)
        return float((back - key).norm() / noise.norm())

    assert error(t) < 0.11
    assert error(None) > 0.3  # what the offset is for


def test_heads_are_sliced_as_tensor_parallel_ranks_need() -> None:  # transformers #48307
    t = make(heads=4)
    positions = torch.arange(20)
    key = 3 * torch.randn(20, 4, 64, generator=torch.Generator().manual_seed(0))
    value = key.flip(0)
    whole = PageLayout(INT4, 16, 4, 64)
    pages = torch.zeros(2, whole.page_bytes, dtype=torch.uint8)
    reference.write(pages, whole, key, value, positions, positions, t)
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        part = PageLayout(INT4, 16, stop - start, 64)
        rank = torch.zeros(2, part.page_bytes, dtype=torch.uint8)
        reference.write(rank, part, key[:, start:stop], value[:, start:stop], positions, positions,
                        t.slice_heads(start, stop))  # fmt: skip
        assert torch.equal(rank, pages[:, start * whole.head_bytes : stop * whole.head_bytes])
    assert t.slice_heads(0, 2).digest != t.slice_heads(2, 4).digest


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 2), (0, 5)])
def test_slices_outside_the_heads_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"heads {start}\.\.{stop} are not within 0\.\.4"):
        make(heads=4).slice_heads(start, stop)


def test_digest_names_the_content() -> None:
    t = make()
    same = make()
    assert t.digest == same.digest and len(t.digest) == 12
    mu = t.mu.clone()
    mu[1, 3] += 1e-3
    others = [
        replace(t, mu=mu),
        replace(t, pair_scale=t.pair_scale * 2),
        replace(t, inv_freq=t.inv_freq * 2),
        replace(t, interleaved=True),
        replace(t, rotate=False),
        replace(t, pair_scale=None),
        replace(t, mu=None),
        t.keep_pairs(4),
    ]
    assert len({t.digest, *(o.digest for o in others)}) == 1 + len(others)


def test_format_name_carries_version_and_digest() -> None:
    t = make()
    assert format_name(INT4, None) == "kvq-int4-v1"
    assert format_name(INT8, t) == f"kvq-int8-v1+{t.digest}"


def test_keep_pairs_keeps_the_largest_of_each_head() -> None:
    t = replace(make(), pair_scale=None)
    kept = t.keep_pairs(5)
    assert kept.num_pairs == 5
    size, left = t.pair_mu.norm(dim=-1), kept.pair_mu.norm(dim=-1)
    for head in range(2):
        assert torch.equal(left[head] > 0, size[head] >= size[head].sort(descending=True).values[4])
    assert torch.equal(kept.pair_mu[left > 0], t.pair_mu[left > 0])
    assert t.keep_pairs(32) is t
    assert t.keep_pairs(0).mu is None


def test_keep_pairs_ranks_by_mu_over_the_pair_scale() -> None:
    mu = torch.zeros(1, 64)
    mu[0, 0], mu[0, 1] = 10.0, 5.0
    scale = torch.ones(1, 32)
    scale[0, 0] = 4.0
    kept = KeyTransform(1, 64, mu, scale, inv_freq(64)).keep_pairs(1)
    assert kept.mu.nonzero().tolist() == [[0, 1]]


def test_an_offset_of_zeros_is_none() -> None:
    t = KeyTransform(2, 64, torch.zeros(2, 64), None, inv_freq(64))
    assert t.mu is None and t.num_pairs == 0
    assert t.digest == KeyTransform(2, 64, None, None, inv_freq(64)).digest


def test_rotate_overrides_the_scheme() -> None:
    assert make().scheme_for(INT4) is INT4
    off = make(rotate=False).scheme_for(INT4)
    assert not off.key.rotate and not off.value.rotate and off.key.bits == 4


def test_tensors_and_metadata_rebuild_the_transform() -> None:
    for t in (make(), make(rotary_dim=32, interleaved=True, rotate=True), KeyTransform(2, 64)):
        again = KeyTransform.from_tensors(t.tensors("layer."), t.metadata(), "layer.")
        assert again.digest == t.digest and again.metadata() == t.metadata()


def test_a_tampered_file_is_refused() -> None:
    t = make()
    tensors = t.tensors()
    tensors["mu"] = tensors["mu"] + 1
    with pytest.raises(ValueError, match=rf"digest is .*; the file says {t.digest}"):
        KeyTransform.from_tensors(tensors, t.metadata())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mu": torch.zeros(2, 32), "inv_freq": inv_freq(64)}, r"mu has shape \(2, 32\); expected \(2, 64\)"),
        ({"mu": torch.ones(2, 64)}, "mu is given without inv_freq"),
        ({"mu": torch.full((2, 64), torch.nan), "inv_freq": inv_freq(64)}, "mu holds NaN or inf"),
        ({"pair_scale": torch.ones(2, 64)}, r"pair_scale has shape \(2, 64\); expected \(2, 32\)"),
        ({"pair_scale": torch.zeros(2, 32)}, "pair_scale holds values that are not positive"),
        ({"inv_freq": inv_freq(32)}, r"inv_freq has shape \(16,\); expected \(32,\)"),
        ({"rotary_dim": 33}, r"rotary_dim is 33; it must be even, in 2\.\.64"),
        ({"rotary_dim": 66}, "rotary_dim is 66"),
        ({"head_dim": 72}, "head_dim is 72; allowed"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyTransform(**{"kv_heads": 2, "head_dim": 64, **kwargs})
