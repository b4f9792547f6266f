"""DecodePlan: buffers and schedule of a decode batch. ``update`` once a step, ``run`` once a layer; both graph-safe."""

from __future__ import annotations

import math

import torch

from kvq.kernels.device import dependent_launch
from kvq.page import PageLayout, tile_pages
from kvq.reference import HotPool, word_hadamard
from kvq.scheme import check_count, is_integer
from kvq.tuned import DecodeConfig, pick

MAX_Q_LEN = 8
ITEM = 8  # int32 fields of a work item
HOT_COST = 5  # quantized pages that take as long as one page in the model's precision


def check_skip_threshold(value: float) -> float:
    """log2 of a threshold. Raises ValueError outside (0, 1)."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"skip_threshold is {value}; it must be above 0 and below 1, or None")
    return math.log2(value)


class DecodePlan:
    """Everything decode needs besides tensors that change: allocated once, for at most the planned sizes.

    Args:
        layout: the page layout. heads: query heads. q_len: query tokens a sequence, 1 to 8.
        max_seqs, max_seq_len: bounds of the batch; ``run`` works for any lengths up to them without re-planning.
        sliding_window: of the layers this plan serves, or None. hot: whether pages may be hot.
        pairs: of the keys' transform (DeviceTransform.pairs). config: None picks the tuned one (kvq/tuned.py).
        skip_threshold: None, or in (0, 1): a quantized page may be left out whose probabilities are all smaller than
            this times the largest one seen (BLASST, arXiv 2512.12087). Its keys are read, its values are not.
            ``plan.skip_threshold = x`` changes it, also between replays of a captured graph.

    Raises ValueError for sizes and thresholds that are not allowed.
    """

    def __init__(
        self,
        layout: PageLayout,
        heads: int,
        max_seqs: int,
        max_seq_len: int,
        *,
        q_len: int = 1,
        sliding_window: int | None = None,
        hot: bool = False,
        pairs: int = 0,
        skip_threshold: float | None = None,
        device: torch.device | str = "cuda",
        config: DecodeConfig | None = None,
    ) -> None:
        for name, count in (("heads", heads), ("max_seqs", max_seqs), ("max_seq_len", max_seq_len)):
            check_count(name, count)
        if heads % layout.kv_heads:
            raise ValueError(f"heads is {heads}; it must be a multiple of kv_heads ({layout.kv_heads})")
        if not (is_integer(q_len) and 1 <= q_len <= MAX_Q_LEN):
            raise ValueError(f"q_len is {q_len!r}; allowed: 1 to {MAX_Q_LEN}")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window is {sliding_window}; it must be positive, or None")
        self.layout, self.heads, self.q_len = layout, heads, q_len
        self.max_seqs, self.max_seq_len, self.sliding_window, self.hot = max_seqs, max_seq_len, sliding_window, hot
        self.device = torch.device(device)
        self.max_pages = -(-max_seq_len // layout.page_size)
        processors = 1
        self.dependent_launch = dependent_launch(self.device)  # of the merge on decode
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.rows = q_len * heads // layout.kv_heads
        self.row_block = 8 if self.rows <= 8 else 16
        if config is None:
            config = pick(layout, self.row_block, max_seqs, pairs=pairs, device=self.device)
        self.config = config
        blocks = layout.kv_heads * -(-self.rows // self.row_block)
        self.places = max(1, int(self.config.programs * processors / blocks))
        self.max_items = self.places + max_seqs

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.items = empty(self.max_items, ITEM)
        self.place_item = empty(self.places + 1)
        self.seq_info = empty(max_seqs, 2)
        lists = (max_seqs, self.max_pages) if hot else (1, 1)
        self.page_list, self.page_index = empty(*lists), empty(*lists)
        self.hot_list, self.hot_index = empty(*lists), empty(*lists)
        self.counts = empty(max_seqs, 4)
        key, value = layout.scheme.key, layout.scheme.value
        self.k_hadamard = word_hadamard(layout.head_dim, key.planes, self.device)
        self.v_hadamard = word_hadamard(layout.head_dim, value.planes, self.device)
        self.part_out = empty(self.max_items, layout.kv_heads, self.rows, layout.head_dim, dtype=torch.float32)
        self.part_lse = empty(self.max_items, layout.kv_heads, self.rows, dtype=torch.float32)

        self.skip = skip_threshold is not None
        self.tile_pages = tile_pages(layout.page_size, self.skip)
        self.skip_log2 = empty(1, dtype=torch.float32)
        self.skipped = torch.zeros(2, dtype=torch.int64, device=self.device)
        if skip_threshold is not None:
            self.skip_threshold = skip_threshold

    @property
    def skip_threshold(self) -> float | None:
        return 2.0 ** float(self.skip_log2) if self.skip else None

    @skip_threshold.setter
    def skip_threshold(self, value: float) -> None:
        if not self.skip:
            raise ValueError("the plan was made without skip_threshold; its kernel skips nothing")
        self.skip_log2.fill_(check_skip_threshold(value))

    def skip_fraction(self) -> float:
        """Quantized pages left out, of those that might be, since the last call. Synchronises with the device."""
        skipped, total = self.skipped.tolist()
        self.skipped.zero_()
        return skipped / total if total else 0.0

    def check(
        self, layout: PageLayout, heads: int, num_seqs: int, q_len: int, sliding_window: int | None, hot: bool
    ) -> None:
        """Raise ValueError unless a call with these arguments is what was planned."""
        given = (layout, heads, q_len, sliding_window, hot)
        planned = (self.layout, self.heads, self.q_len, self.sliding_window, self.hot)
        for name, got, want in zip(("layout", "heads", "q_len", "sliding_window", "hot"), given, planned, strict=True):
            if got != want:
                raise ValueError(f"{name} is {got}; the plan was made for {want}")
        if num_seqs > self.max_seqs:
            raise ValueError(f"the batch has {num_seqs} sequences; the plan was made for at most {self.max_seqs}")

    def update(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, hot: HotPool | None = None) -> None:
        """Build this step's work items on the device, from int32 block_tables [num_seqs, ...] and seq_lens [num_seqs].

        No host synchronisation and no allocation. Rows beyond the batch have seq_len 0. The caller keeps to the bounds
        of the plan: num_seqs <= max_seqs, seq_lens <= max_seq_len. Raises ValueError for tensors not contiguous in
        their last dim.
        """
        for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens)):
            if tensor.stride(-1) != 1:
                raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dim; it must be 1")
        from kvq.kernels.schedule import schedule

        schedule(self, block_tables, seq_lens, hot)
