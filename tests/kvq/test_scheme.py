from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from kvq import INT4, INT4_SYM, INT8, K8V4, QuantScheme, TensorScheme
from kvq.scheme import HEAD_DIMS


@pytest.mark.parametrize("name", ["int4", "INT4", " kvq-int4-v1 "])
def test_parse_reads_names_in_any_spelling(name: str) -> None:
    assert QuantScheme.parse(name) is INT4
    assert QuantScheme.parse(INT4) is INT4


def test_parse_reads_every_preset() -> None:
    assert [QuantScheme.parse(n) for n in ("int8", "k8v4", "int4_sym")] == [INT8, K8V4, INT4_SYM]


def test_parse_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"scheme is 'int3'; allowed: int4, int4-sym, int8, k8v4"):
        QuantScheme.parse("int3")


def test_schemes_are_frozen_and_hashable() -> None:
    assert len({INT4, INT8, K8V4, INT4_SYM, QuantScheme.parse("int4")}) == 4
    with pytest.raises(FrozenInstanceError):
        INT4.name = "other"  # type: ignore[misc]


def test_bits_per_element_include_scales() -> None:
    assert INT4.bits_per_element(128) == 4.25
    assert INT4_SYM.bits_per_element(128) == 4.125
    assert INT8.bits_per_element(128) == 8.125
    assert K8V4.bits_per_element(64) == (8.25 + 4.5) / 2


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("scheme", [INT4, INT8, K8V4, INT4_SYM], ids=lambda s: s.name)
def test_page_bytes_are_bits_per_element_of_every_element(scheme: QuantScheme, head_dim: int) -> None:
    bits = scheme.bits_per_element(head_dim) * 64 * 3 * head_dim * 2
    assert scheme.page_bytes(64, 3, head_dim) * 8 == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits is {bits}; allowed: 4 or 8"):
        TensorScheme(bits, symmetric=True, rotate=False)


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version is 2"):
        replace(INT4, version=2)


def test_clip_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip is 0\.3"):
        replace(INT4.key, clip=0.3)


@pytest.mark.parametrize("head_dim", [0, 63, 72, 160, 512])
def test_other_head_sizes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}; allowed: 64, 80, 96, 112, 128, 192, 256"):
        INT4.bits_per_element(head_dim)


def test_gain_is_known_for_one_clip_only() -> None:
    with pytest.raises(ValueError, match=r"unshrunk with bits 4 and clip 0\.9"):
        replace(INT4.key, clip=0.9)
    assert INT4.value.gain(64) == INT8.key.gain(64) == K8V4.value.gain(64) == 1.0
    assert 1.005 < INT4.key.gain(128) < INT4.key.gain(64) < 1.01


def test_digest_names_how_values_are_quantized() -> None:
    assert len({s.digest for s in (INT4, INT8, K8V4, INT4_SYM, replace(INT4, key=INT4.value))}) == 5
    assert replace(INT4, name="other").digest == INT4.digest
