"""PagedKVCache: the pages of one layer with their hot pool. It owns tensors; kvq.ops does the work."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvq import ops
from kvq.kernels.device import DeviceTransform
from kvq.page import PageLayout
from kvq.plan import DecodePlan
from kvq.reference import HotPool
from kvq.scheme import QuantScheme, check_count, is_integer
from kvq.transform import KeyTransform, format_name


class PagedKVCache:
    """Quantized KV pages of one layer, with a pool of hot pages in the model's own precision.

    Args:
        num_pages, page_size: pages, and tokens of one (16, 32, 64 or 128).
        kv_heads, head_dim: of the layer.
        scheme: a QuantScheme or its name ("int4", "int8", "k8v4", "int4-sym").
        transform: the layer's KeyTransform, or None.
        hot_pages: slots of the hot pool.
        dtype: of the hot pool and of what ``gather`` returns: the model's. None takes that of the first write.
        max_position: highest position a transform with an offset has tables for.
        device: default CUDA where there is one.

    ``hot_index`` int32 [num_pages] names the hot slot of a page, -1 for none. ``status`` counts tokens that
    ``check="flag"`` skipped (ops.STATUS_FIELDS). Raises ValueError for counts that are no such integers and for shapes
    the format has no place for.
    """

    def __init__(
        self,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        scheme: QuantScheme | str = "int4",
        page_size: int = 64,
        transform: KeyTransform | None = None,
        hot_pages: int = 0,
        *,
        dtype: torch.dtype | None = None,
        max_position: int = 131072,
        device: torch.device | str | None = None,
    ) -> None:
        check_count("num_pages", num_pages)
        check_count("hot_pages", hot_pages, 0)
        check_count("max_position", max_position, 0)
        if dtype is not None and dtype not in ops.FLOATS:
            raise TypeError(f"dtype is {dtype}; allowed: float16, bfloat16, float32")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        scheme = QuantScheme.parse(scheme)
        if transform is not None:
            if (transform.kv_heads, transform.head_dim) != (kv_heads, head_dim):
                raise ValueError(
                    f"transform is for {transform.kv_heads} heads of {transform.head_dim}; the cache has {kv_heads} of "
                    f"{head_dim}"
                )
            scheme = transform.scheme_for(scheme)
        self.layout = PageLayout(scheme, page_size, kv_heads, head_dim)
        self.dtype = dtype
        self.source = transform
        self.transform = (
            None if transform is None else DeviceTransform.build(transform, page_size, max_position, device)
        )
        self.pages = torch.zeros(num_pages, self.layout.page_bytes, dtype=torch.uint8, device=device)
        shape = (hot_pages, 2, kv_heads, page_size, head_dim)
        self._pool = torch.zeros(shape, dtype=dtype or torch.float16, device=device)
        self.hot_index = torch.full((num_pages,), -1, dtype=torch.int32, device=device)
        # one entry more takes skipped tokens
        self._written = torch.zeros(num_pages + 1, dtype=torch.bool, device=device)
        self._free_slots = list(range(hot_pages))
        self._slot_of: dict[int, int] = {}
        self.status = ops.new_status(device)

    @property
    def format_name(self) -> str:
        """Name of the stored format; caches of different names must never share pages."""
        return format_name(self.layout.scheme, self.source)

    @property
    def hot(self) -> HotPool | None:
        """The hot pool, None when it has no slots."""
        return HotPool(self._pool, self.hot_index) if self._pool.shape[0] else None

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized pages and of the whole hot pool."""
        return self.pages.nbytes + self._pool.nbytes

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        check: ops.Check = "sync",
        on_nonfinite: ops.OnNonfinite = "raise",
    ) -> None:
        """Quantize tokens [tokens, kv_heads, head_dim] into their slots; see ops.write_pages."""
        if self.dtype is None and key.dtype in ops.FLOATS:
            self.dtype = key.dtype
            self._pool = self._pool.to(key.dtype)
        ops.write_pages(
            self.pages, self.layout, key, value, slot_mapping, positions, self.transform, self.hot,
            check=check, on_nonfinite=on_nonfinite, status=self.status,
        )  # fmt: skip
        page = torch.where(slot_mapping < 0, self.pages.shape[0], slot_mapping // self.layout.page_size)
        self._written.index_fill_(0, page.clamp(max=self.pages.shape[0]).long(), True)

    def gather(
        self,
        block_table: torch.Tensor,
        seq_len: int,
        *,
        start: int = 0,
        position_offset: int = 0,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens start..seq_len of a sequence, [tokens, kv_heads, head_dim] in ``dtype``; hot: exact."""
        return ops.gather_pages(
            self.pages, self.layout, block_table, seq_len, self.transform, self.hot,
            start=start, position_offset=position_offset, dtype=dtype or self._pool.dtype,
        )  # fmt: skip

    def plan(
        self, heads: int, max_seqs: int, max_seq_len: int, *, q_len: int = 1, sliding_window: int | None = None
    ) -> DecodePlan:
        """A DecodePlan for this cache: at most max_seqs sequences of max_seq_len tokens, ``heads`` query heads."""
        return DecodePlan(
            self.layout, heads, max_seqs, max_seq_len, q_len=q_len, sliding_window=sliding_window,
            hot=self.hot is not None, pairs=0 if self.transform is None else self.transform.pairs,
            device=self.device,
        )  # fmt: skip

    def promote(self, pages: Iterable[int]) -> list[int]:
        """Give ``pages`` hot slots before they are first written; returns those that got one.

        A page that already holds tokens stays quantized: promoting never up-converts. Pages beyond the free slots are
        left quantized too. Synchronises.
        """
        pages = list(pages)
        for page in pages:
            self._check_page(page)
        written = self._written.tolist()
        taken = []
        for page in pages:
            if page in self._slot_of or written[page] or not self._free_slots:
                continue
            self._slot_of[page] = self._free_slots.pop()
            taken.append(page)
        self._set_index(taken)
        return taken

    def demote(self, pages: Iterable[int]) -> None:
        """Take the hot slots of ``pages`` back: what is left was quantized when written. Others are ignored."""
        gone = [page for page in dict.fromkeys(pages) if page in self._slot_of]
        self._free_slots.extend(self._slot_of.pop(page) for page in gone)
        self._set_index(gone)

    def release(self, pages: Iterable[int]) -> None:
        """``pages`` are free for another sequence: not hot, and counted as never written."""
        pages = list(pages)
        for page in pages:
            self._check_page(page)
        self.demote(pages)
        if pages:
            self._written[torch.tensor(pages, device=self.device)] = False

    def set_hot(self, block_table: list[int], wanted: Iterable[int]) -> None:
        """Make the hot pages of a sequence those at the indices ``wanted`` of its block table (TurnBook.hot_pages).

        Raises ValueError for indices beyond the table.
        """
        wanted = list(wanted)
        for i in wanted:
            if not (is_integer(i) and 0 <= i < len(block_table)):
                raise ValueError(f"wanted holds {i!r}; the block table has {len(block_table)} pages, counted from 0")
        keep = {block_table[i] for i in wanted}
        self.demote(page for page in block_table if page not in keep)
        self.promote(sorted(keep))

    def hot_pages(self) -> int:
        """Pages that are hot now."""
        return len(self._slot_of)

    def _check_page(self, page: int) -> None:
        if not (is_integer(page) and 0 <= page < self.pages.shape[0]):
            raise ValueError(f"page is {page!r}; allowed: 0..{self.pages.shape[0] - 1}")

    def _set_index(self, pages: list[int]) -> None:
        if pages:
            slots = [self._slot_of.get(page, -1) for page in pages]
            where = torch.tensor(pages, device=self.device)
            self.hot_index[where] = torch.tensor(slots, dtype=torch.int32, device=self.device)


def paged_attention_decode(
    query: torch.Tensor,
    cache: PagedKVCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    plan: DecodePlan | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    position_offset: torch.Tensor | None = None,
    skip_threshold: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    check: ops.Check = "sync",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence over ``cache``; arguments as in ops.decode_pages.

    ``plan = cache.plan(...)``, updated once a step, makes it safe to capture in a CUDA graph.
    """
    return ops.decode_pages(
        query, cache.pages, cache.layout, block_tables, seq_lens, plan=plan, scale=scale, transform=cache.transform,
        hot=cache.hot, sliding_window=sliding_window, softcap=softcap, sinks=sinks, position_offset=position_offset,
        skip_threshold=skip_threshold, out=out, return_lse=return_lse, check=check,
    )  # fmt: skip
