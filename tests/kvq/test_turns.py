from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq import TurnBook


def book(recent_turns, *starts: int, page_size: int = 16, first_page: bool = True) -> TurnBook:
    out = TurnBook(page_size, recent_turns, first_page)
    for start in starts:
        out.start_turn("s", start)
    return out


def test_last_two_turns_and_the_first_page_are_hot() -> None:
    assert list(book(2, 0, 48, 80, 100).hot_pages("s", 130)) == [0, 5, 6, 7, 8]


def test_windows_round_outward_to_pages() -> None:
    assert list(book(1, 0, 47).hot_pages("s", 49)) == [0, 2, 3]
    assert list(book(1, 0, 48).hot_pages("s", 49)) == [0, 3]


def test_no_recent_turns_leave_the_first_page() -> None:
    assert list(book(0, 0, 48, 80).hot_pages("s", 130)) == [0]
    assert list(book(0, 0, 48, first_page=False).hot_pages("s", 130)) == []


def test_all_turns_keep_every_page() -> None:
    assert list(book("all", 0, 48, 80).hot_pages("s", 130)) == list(range(9))


def test_without_the_first_page_only_the_window_is_hot() -> None:
    assert list(book(2, 0, 48, 80, first_page=False).hot_pages("s", 100)) == [3, 4, 5, 6]


def test_fewer_turns_than_the_window_keep_the_whole_sequence() -> None:
    assert list(book(2, 0).hot_pages("s", 40)) == [0, 1, 2]
    assert list(book(2).hot_pages("s", 40)) == [0, 1, 2]
    assert list(book(2, 64).hot_pages("s", 100)) == list(range(7))  # what came before the first start is a turn
    assert list(book(1, 64).hot_pages("s", 100)) == [0, 4, 5, 6]


def test_an_empty_sequence_has_no_hot_pages() -> None:
    for recent in (0, 2, "all"):
        assert list(book(recent, 0).hot_pages("s", 0)) == []


def test_a_turn_noted_twice_counts_once() -> None:
    assert list(book(2, 0, 48, 80, 80, 80).hot_pages("s", 100)) == [0, 3, 4, 5, 6]


def test_sequences_do_not_share_turns_and_drop_forgets() -> None:
    turns = book(1, 0, 48)
    turns.start_turn("other", 16)
    assert list(turns.hot_pages("other", 20)) == [0, 1]
    turns.drop("s")
    turns.drop("never seen")
    assert list(turns.hot_pages("s", 64)) == [0, 1, 2, 3]


@pytest.mark.parametrize("recent_turns", [-1, 1.5, "some", None, True])
def test_other_windows_are_refused(recent_turns) -> None:
    with pytest.raises(ValueError, match=r"recent_turns is .*; allowed: 0, 1, 2, ... or 'all'"):
        TurnBook(16, recent_turns)


def test_turns_cannot_go_back() -> None:
    with pytest.raises(ValueError, match="token is 10; the turn before it starts at 48"):
        book(2, 0, 48).start_turn("s", 10)
    with pytest.raises(ValueError, match="token is -1"):
        book(2).start_turn("s", -1)
    with pytest.raises(ValueError, match="page_size is 0"):
        TurnBook(0)
    with pytest.raises(ValueError, match="page_size is '64'; it must be an integer of at least 1"):
        TurnBook("64")


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    recent=st.integers(0, 9),
    page_size=st.sampled_from([16, 32, 64, 128]),
)
def test_hot_pages_cover_exactly_the_window(lengths: list[int], recent: int, page_size: int) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    total = sum(lengths)
    first = starts[-recent] if 0 < recent <= len(starts) else (total if recent == 0 else 0)
    want = {0} | {token // page_size for token in range(first, total)}
    assert list(book(recent, *starts, page_size=page_size).hot_pages("s", total)) == sorted(want)
