"""Bytes of a page: where the codes and scales of each head lie, and how many tokens a budget holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvq.scheme import QuantScheme, check_count, check_head_dim, is_integer

PAGE_SIZES = (16, 32, 64, 128)
TILE = 64  # tokens that decode takes at once where pages are not larger
ALIGN = 16  # bytes; narrower strides make Triton fall back to narrow loads without cp.async


def tile_pages(page_size: int, skip: bool) -> int:
    """Pages that decode takes at once: small ones together, unless they may be left out one by one."""
    return 1 if skip else max(1, TILE // page_size)


@dataclass(frozen=True)
class PageLayout:
    """Layout v1: a page is ``kv_heads`` contiguous planes, one (page, head) tile is one contiguous read.

    A plane is ``K codes | V codes | K scales | V scales``, each part ``page_size`` rows, one a token:

    ======== ===================================================== =====================
    part     row                                                   bytes of a row
    ======== ===================================================== =====================
    K codes  uint16 words; word j holds dims j, j+W, ... (planes)  head_dim * bits / 8
    V codes  the same                                              head_dim * bits / 8
    K scales fp16 scale, then fp16 zero unless symmetric           2 or 4
    V scales the same                                              2 or 4
    ======== ===================================================== =====================
    """

    scheme: QuantScheme
    page_size: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check_head_dim(self.head_dim)
        if not is_integer(self.page_size) or self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size is {self.page_size!r}; allowed: {', '.join(map(str, PAGE_SIZES))}")
        check_count("kv_heads", self.kv_heads)

    @property
    def v_codes(self) -> int:
        """Offset in bytes of the V codes in a head's plane (K codes are at 0)."""
        return self.page_size * self.scheme.key.row_bytes(self.head_dim)

    @property
    def k_scales(self) -> int:
        return self.v_codes + self.page_size * self.scheme.value.row_bytes(self.head_dim)

    @property
    def v_scales(self) -> int:
        return self.k_scales + self.page_size * self.scheme.key.scale_bytes()

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's plane; a multiple of 16 for every allowed shape."""
        return self.v_scales + self.page_size * self.scheme.value.scale_bytes()

    @property
    def page_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def native_page_bytes(self) -> int:
        """Bytes of the same page in fp16 or bf16: what a hot page costs."""
        return 2 * 2 * self.page_size * self.kv_heads * self.head_dim

    def num_pages(self, budget_bytes: int, layers: int = 1) -> int:
        """Pages that ``budget_bytes`` hold when each page exists in ``layers`` layers."""
        return budget_bytes // (layers * self.page_bytes)
