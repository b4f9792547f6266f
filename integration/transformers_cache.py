"""KVQCache: a transformers cache of quantized pages, with sinks and the most recent turns in native precision.

    cache = KVQCache.from_model(model, scheme="int4", recent_turns=2)
    model.generate(**inputs, past_key_values=cache)

Every token is quantized once, from its original values, when it is first seen. Pages of the most recent turns and the
first page of each sequence are kept in native precision besides, and are read in its place; when a turn grows old its
native copy is dropped. Attention itself runs in transformers, on keys and values that exist for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakSet

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvq import KeyTransform, PageLayout, QuantScheme, TurnBook, ops
from kvq.kernels.device import DeviceTransform
from kvq.reference import HotPool
from kvq.scheme import check_count

NEW = -1  # source of a page or slot that holds nothing yet


class Sequences:
    """Where the batch is stored, the same for all layers: a table of pages for each sequence, and the native pages.

    A sequence is a row of the batch without its left padding. Its token i lies in row i % page_size of its page
    i // page_size. Page ids and native slots are dense: layers store nothing that is not used.
    """

    def __init__(self, page_size: int, recent_turns: int | Literal["all"]) -> None:
        TurnBook(page_size, recent_turns)  # refuses what it has no rule for
        self.page_size, self.recent_turns = page_size, recent_turns
        self.width = 0  # tokens of a row of the batch, padding included
        self.turn_starts: list[int] = []  # first token of each turn, in tokens of a row
        self.padding: list[int] = []
        self.offsets: list[int] = []  # position of each sequence's first token
        self.tables: list[list[int]] = []
        self.index = torch.empty(0, dtype=torch.int32)  # native slot of each page, or -1

    def length(self, row: int) -> int:
        return self.width - self.padding[row]

    def wanted(self, row: int) -> set[int]:
        """Pages of a sequence that should be native, by their number in it."""
        book = TurnBook(self.page_size, self.recent_turns)
        for start in self.turn_starts:
            book.start_turn(row, max(0, start - self.padding[row]))
        return set(book.hot_pages(row, self.length(row)))

    def arrange(self, tables: list[list[int]]) -> tuple[list[int], list[int]]:
        """Give the pages of ``tables`` (old ids, or NEW) new dense ids; return the source of each page and native slot.

        A page is native when it is wanted and is new or was native before: lost originals do not come back.
        """
        index = self.index.tolist()
        pages: list[int] = []
        slots: list[int] = []
        new_index: list[int] = []
        self.tables = []
        for row, table in enumerate(tables):
            wanted = self.wanted(row)
            self.tables.append(list(range(len(pages), len(pages) + len(table))))
            for number, source in enumerate(table):
                slot = NEW if source == NEW else index[source]
                native = number in wanted and (source == NEW or slot >= 0)
                new_index.append(len(slots) if native else -1)
                if native:
                    slots.append(slot)
                pages.append(source)
        self.index = torch.tensor(new_index, dtype=torch.int32)
        return pages, slots

    def grow(self, tokens: int) -> tuple[list[int], list[int]]:
        """Room for exactly ``tokens`` more in every row; returns the sources as ``arrange`` does."""
        self.width += tokens
        tables = []
        for row, table in enumerate(self.tables):
            pages = -(-max(self.length(row), 0) // self.page_size)
            tables.append((table + [NEW] * (pages - len(table)))[:pages])
        return self.arrange(tables)

    def slots(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot, -1 for padding, and position of the last ``tokens`` tokens of all rows: int64 [rows * tokens] each."""
        slots, positions = [], []
        for table, padding, offset in zip(self.tables, self.padding, self.offsets, strict=True):
            at = torch.arange(self.width - tokens, self.width) - padding
            page = torch.tensor(table)[at.clamp(min=0) // self.page_size]
            slots.append(torch.where(at >= 0, page * self.page_size + at % self.page_size, -1))
            positions.append(at + offset)
        return torch.cat(slots), torch.cat(positions)


def taken(tensor: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
    """Rows ``sources`` of a tensor, zeros where the source is NEW; the tensor itself when nothing changes."""
    if list(sources) == list(range(tensor.shape[0])):
        return tensor
    source = torch.tensor(sources, dtype=torch.int64, device=tensor.device)
    out = tensor.new_zeros(len(sources), *tensor.shape[1:])
    out[source >= 0] = tensor[source[source >= 0]]
    return out


class KVQLayer(CacheLayerMixin):
    """Keys and values of one layer: ``pages`` uint8 [pages, page_bytes] and a ``pool`` of native pages."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        sequences: Sequences,
        scheme: QuantScheme,
        transform: KeyTransform,
        native_dtype: torch.dtype | None,
        max_position: int,
    ) -> None:
        super().__init__()
        self.sequences = sequences
        self.source, self.max_position = transform, max_position
        self.native_dtype = native_dtype
        self.layout = PageLayout(
            transform.scheme_for(scheme), sequences.page_size, transform.kv_heads, transform.head_dim
        )
        self.width = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, head_dim = key_states.shape
        expected = (self.layout.kv_heads, self.layout.head_dim)
        for name, states in (("key", key_states), ("value", value_states)):
            if (states.shape[1], states.shape[3]) != expected:
                shape = tuple(states.shape)
                raise ValueError(f"{name} states have shape {shape}; heads and head_dim must be {expected}")
        index, device = self.sequences.index, key_states.device
        self.transform = DeviceTransform.build(self.source, self.layout.page_size, self.max_position, device)
        self.pages = torch.zeros(len(index), self.layout.page_bytes, dtype=torch.uint8, device=device)
        native = (int((index >= 0).sum()), 2, heads, self.layout.page_size, head_dim)
        self.pool = torch.zeros(native, dtype=self.native_dtype or key_states.dtype, device=device)
        self.is_initialized = True

    def arrange(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Move pages and native pages to new places (``Sequences.arrange``)."""
        self.pages, self.pool = taken(self.pages, pages), taken(self.pool, slots)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens [batch, kv_heads, tokens, head_dim] and return all keys and values in their dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        book = self.sequences
        batch, heads, tokens, head_dim = key_states.shape
        self.width += tokens
        if self.width != book.width:
            raise ValueError(f"a layer was given {self.width} tokens and the first layer {book.width}")
        device = key_states.device
        hot = HotPool(self.pool, book.index.to(device))
        slots, positions = (x.to(device) for x in book.slots(tokens))
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        ops.write_pages(self.pages, self.layout, key, value, slots, positions, self.transform, hot)
        keys = key_states.new_zeros(batch, heads, book.width, head_dim)
        values = torch.zeros_like(keys)
        for row, table in enumerate(book.tables):
            padding = book.padding[row]
            key, value = ops.gather_pages(
                self.pages,
                self.layout,
                torch.tensor(table, device=device),
                book.length(row),
                self.transform,
                hot,
                position_offset=book.offsets[row],
                dtype=key_states.dtype,
            )
            keys[row, :, padding:] = key.transpose(0, 1)
            values[row, :, padding:] = value.transpose(0, 1)
        return keys, values

    def get_seq_length(self) -> int:
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + self.pool.nbytes if self.is_initialized else 0


class KVQCache(Cache):
    """A transformers cache of quantized pages. Make it with ``from_model``.

    A turn starts with the first token, with ``start_turn()``, and by itself with every forward pass of several tokens
    that follows one of a single token: a new prompt after generated tokens. One ``generate`` call is thus one turn.
    """

    layers: list[KVQLayer]

    def __init__(
        self,
        transforms: Sequence[KeyTransform],
        scheme: str | QuantScheme = "int4",
        recent_turns: int | Literal["all"] = 2,
        *,
        page_size: int = 64,
        native_dtype: torch.dtype | None = None,
        max_position: int = 131072,
    ) -> None:
        if native_dtype is not None and native_dtype not in ops.FLOATS:
            raise TypeError(f"native_dtype is {native_dtype!r}; allowed: float16, bfloat16, float32, or None")
        check_count("max_position", max_position, 0)
        self.scheme = QuantScheme.parse(scheme)
        self.sequences = Sequences(page_size, recent_turns)
        super().__init__(
            layers=[KVQLayer(self.sequences, self.scheme, t, native_dtype, max_position) for t in transforms]
        )
        self._positions: torch.Tensor | None = None  # of the tokens of the next update, where the model is told them
        self._last_step = 0

    @classmethod
    def from_model(
        cls,
        model: Any,
        scheme: str | QuantScheme = "int4",
        recent_turns: int | Literal["all"] = 2,
        *,
        transforms: Sequence[KeyTransform] | None = None,
        page_size: int = 64,
        native_dtype: torch.dtype | None = None,
    ) -> KVQCache:
        """An empty cache for ``model``, a transformers causal language model with full attention in every layer.

        Args:
            scheme: "int4", "int8", "k8v4" or a QuantScheme.
            recent_turns: turns kept in native precision; 0 for none (the first page stays native), "all" for all.
            transforms: one a layer; default: from the model's weights alone, which takes no time.
                ``kvq.calibrate(model).transforms`` takes two forward passes and no text, and leaves INT4 a third of the
                error, with recent turns native two thirds (docs/accuracy.md).
            page_size: tokens of a page.
            native_dtype: of the native pages; default: that of the keys, which makes them exact.

        Raises ValueError for models with sliding windows or other layers, and for transforms of another model, and
        ValueError or TypeError for arguments that are not as above.
        """
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} has layers of kind {', '.join(sorted(kinds))}; KVQCache stores decoder-only "
                "models with full attention in every layer"
            )
        if transforms is None:
            transforms = KeyTransform.from_model(model)
        if len(transforms) != config.num_hidden_layers:
            layers = config.num_hidden_layers
            raise ValueError(f"transforms has {len(transforms)} entries; the model has {layers} layers")
        if model not in _watched:
            model.register_forward_pre_hook(_note_positions, with_kwargs=True)
            _watched.add(model)
        return cls(
            transforms,
            scheme,
            recent_turns,
            page_size=page_size,
            native_dtype=native_dtype,
            max_position=config.max_position_embeddings,
        )

    def start_turn(self) -> None:
        """The next token starts a turn. Calling it twice in a row starts one turn."""
        starts = self.sequences.turn_starts
        if not starts or starts[-1] != self.sequences.width:
            starts.append(self.sequences.width)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KVQLayer.update``. The first layer of a forward pass makes room in all of them."""
        if layer_idx == 0:
            self._begin_step(key_states.shape[0], key_states.shape[2])
        return self.layers[layer_idx].update(key_states, value_states)

    def _begin_step(self, batch: int, tokens: int) -> None:
        book, positions = self.sequences, self._positions
        self._positions = None
        if not book.width:
            self._place(batch, tokens, positions)
        elif batch != len(book.tables):
            raise ValueError(f"the batch has {batch} rows; this cache holds {len(book.tables)}")
        elif positions is not None:
            expected = torch.arange(book.width, book.width + tokens) - torch.tensor(book.padding)[:, None]
            if not torch.equal(positions.cpu().expand(batch, -1), expected + torch.tensor(book.offsets)[:, None]):
                raise ValueError("position_ids do not continue those of the tokens in the cache, one a token")
        if not book.turn_starts or (tokens > 1 and self._last_step == 1):
            self.start_turn()
        self._last_step = tokens
        self._arrange(*book.grow(tokens))

    def _place(self, batch: int, tokens: int, positions: torch.Tensor | None) -> None:
        """Find the left padding and the first position of every row of the first forward pass."""
        book = self.sequences
        book.padding, book.offsets, book.tables = [0] * batch, [0] * batch, [[] for _ in range(batch)]
        if positions is None:
            return
        if positions.dim() != 2 or positions.shape[1] != tokens:
            raise ValueError(f"position_ids have shape {tuple(positions.shape)}; expected [batch, {tokens}]")
        for row, at in enumerate(positions.cpu().expand(batch, -1).tolist()):
            # transformers counts positions from the first token that is not padding; padding has any position.
            padding = max(tokens - 1 - at[-1], 0)
            if at[padding:] != list(range(at[padding], at[padding] + tokens - padding)):
                raise ValueError(f"position_ids of row {row} do not count up by one a token after left padding")
            book.padding[row], book.offsets[row] = padding, at[padding]

    def _arrange(self, pages: list[int], slots: list[int]) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                layer.arrange(pages, slots)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens; a positive value is the number of tokens that stay.

        Native pages that were dropped with older turns do not come back.
        """
        book = self.sequences
        count = int(tokens_to_remove)  # assisted generation passes a tensor in some releases
        removed = -count if count <= 0 else max(book.width - count, 0)
        if not removed:
            return
        if removed > min(book.length(row) for row in range(len(book.tables))):
            raise ValueError(f"crop by {removed} tokens; the cache holds {book.width}, padding included")
        book.width -= removed
        book.turn_starts = [start for start in book.turn_starts if start < book.width]
        for layer in self.layers:
            layer.width = book.width
        self._arrange(*book.grow(0))

    def reset(self) -> None:
        """Forget everything."""
        self.sequences = Sequences(self.sequences.page_size, self.sequences.recent_turns)
        self._last_step = 0
        for layer in self.layers:
            layer.sequences, layer.width, layer.is_initialized = self.sequences, 0, False

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch, in that order; a row taken twice is copied."""
        book = self.sequences
        rows = torch.arange(len(book.tables))[indices.cpu()].tolist()
        book.padding = [book.padding[row] for row in rows]
        book.offsets = [book.offsets[row] for row in rows]
        self._arrange(*book.arrange([book.tables[row] for row in rows]))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self.batch_select_indices(torch.arange(len(self.sequences.tables)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows of the next beam search step."""
        self.batch_select_indices(beam_idx)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        raise ValueError("KVQCache does not offload; quantized pages stay on the device of their layer")

    @property
    def nbytes(self) -> int:
        """Bytes held: quantized pages, native pages, and the table of native pages, padding of pages included."""
        return sum(layer.nbytes for layer in self.layers) + self.sequences.index.nbytes

    @property
    def bits_per_element(self) -> float:
        """``nbytes`` over the keys and values of the tokens held, scales and native copies included; 0 when empty."""
        width = sum(2 * layer.layout.kv_heads * layer.layout.head_dim for layer in self.layers)
        elements = width * sum(self.sequences.length(row) for row in range(len(self.sequences.tables)))
        return 8 * self.nbytes / elements if elements else 0.0


_watched: WeakSet[torch.nn.Module] = WeakSet()


def _note_positions(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a KVQCache among the arguments of a forward pass the positions, which show the padding.

    Layers are not told them in every supported release of transformers.
    """
    for value in kwargs.values():
        if isinstance(value, KVQCache):
            value._positions = kwargs.get("position_ids")
