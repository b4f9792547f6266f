"""Which pages of a sequence stay in the model's own precision: its most recent turns, and its first page."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from kvq.scheme import check_count, is_integer


class TurnBook:
    """Turn boundaries of live sequences.

    The first page of a sequence holds the attention sinks: without them native, the divergence of INT4 doubles.
    A window of turns is rounded outward to pages.

    Args:
        page_size: tokens of a page.
        recent_turns: newest turns of each sequence that stay hot; 0 for none, "all" for every page.
        first_page: keep the first page hot too.
    """

    def __init__(self, page_size: int, recent_turns: int | Literal["all"] = 2, first_page: bool = True) -> None:
        if recent_turns != "all" and not (is_integer(recent_turns) and recent_turns >= 0):
            raise ValueError(f"recent_turns is {recent_turns!r}; allowed: 0, 1, 2, ... or 'all'")
        check_count("page_size", page_size)
        self.page_size = page_size
        self.recent_turns = recent_turns
        self.first_page = first_page
        self._starts: dict[Hashable, list[int]] = {}

    def start_turn(self, sequence: Hashable, token: int) -> None:
        """A turn of ``sequence`` starts at index ``token``. Raises ValueError when that is before the last start."""
        starts = self._starts.setdefault(sequence, [])
        if token < (starts[-1] if starts else 0):
            last = starts[-1] if starts else 0
            raise ValueError(f"token is {token}; the turn before it starts at {last}, turns cannot go back")
        if starts and starts[-1] == token:
            return
        starts.append(token)
        if self.recent_turns != "all":
            del starts[: -max(1, self.recent_turns)]

    def hot_pages(self, sequence: Hashable, seq_len: int) -> range | list[int]:
        """Indices, in the sequence, of the pages that should be hot when it is ``seq_len`` tokens long, ascending."""
        count = -(-seq_len // self.page_size)
        if self.recent_turns == "all":
            return range(count)
        first = [0] if self.first_page and count else []
        starts = self._starts.get(sequence, [0])
        if self.recent_turns == 0:
            return first
        # fewer starts than that were noted: what came before the first is a turn too
        window = (starts[-self.recent_turns] if len(starts) >= self.recent_turns else 0) // self.page_size
        return first + [page for page in range(window, count) if page or not first]

    def drop(self, sequence: Hashable) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._starts.pop(sequence, None)
