from __future__ import annotations

import itertools

import pytest

from kvq import INT4, INT4_SYM, INT8, K8V4, PageLayout, QuantScheme, TensorScheme
from kvq.page import PAGE_SIZES
from kvq.scheme import HEAD_DIMS

SCHEMES = [INT4, INT8, K8V4, INT4_SYM, QuantScheme("mixed", TensorScheme(8, False, False), TensorScheme(4, True, True))]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_every_plane_and_stride_is_a_multiple_of_16_bytes(scheme: QuantScheme) -> None:
    for head_dim, page_size, heads in itertools.product(HEAD_DIMS, PAGE_SIZES, (1, 3, 8)):
        layout = PageLayout(scheme, page_size, heads, head_dim)
        offsets = [0, layout.v_codes, layout.k_scales, layout.v_scales, layout.head_bytes]
        assert all(offset % 16 == 0 for offset in offsets)
        sizes = [b - a for a, b in itertools.pairwise(offsets)]
        key, value = scheme.key, scheme.value
        rows = [key.row_bytes(head_dim), value.row_bytes(head_dim), key.scale_bytes(), value.scale_bytes()]
        assert sizes == [page_size * row for row in rows]
        assert layout.page_bytes == heads * layout.head_bytes


@pytest.mark.parametrize("page_size", [0, 8, 48, 256, 848, 1072])
def test_page_sizes_that_do_not_divide_are_refused(page_size: int) -> None:  # vLLM #40388, #40128
    with pytest.raises(ValueError, match=f"page_size is {page_size}; allowed: 16, 32, 64, 128"):
        PageLayout(INT4, page_size, 8, 128)


def test_no_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_heads is 0"):
        PageLayout(INT4, 64, 0, 128)


def test_native_page_is_what_the_models_dtype_takes() -> None:
    assert PageLayout(INT4, 64, 8, 128).native_page_bytes == 2 * 64 * 8 * 128 * 2


def test_capacity_counts_whole_pages_of_all_layers() -> None:
    layout = PageLayout(INT4, 64, 8, 128)
    assert layout.num_pages(32 * layout.page_bytes * 10, layers=32) == 10
    assert layout.num_pages(32 * layout.page_bytes * 10 - 1, layers=32) == 9
