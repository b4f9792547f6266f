"""The schedule: every page of every sequence is in exactly one item, and the places share the work."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.kernels.schedule import SLACK, schedule
from kvq.page import PageLayout
from kvq.plan import HOT_COST, DecodePlan
from kvq.reference import HotPool
from kvq.scheme import INT4
from kvq.tuned import DecodeConfig

LAYOUT = PageLayout(INT4, 16, 2, 64)


def make(lens: list[int], places: int, hot_pages: set[int] = frozenset(), window: int | None = None) -> DecodePlan:  # type: ignore[assignment]
    """The schedule of a batch with tables of consecutive pages, the sequences one after the other."""
    width = max(1, max(-(-n // 16) for n in lens))
    plan = DecodePlan(
        LAYOUT, 4, len(lens), width * 16, hot=bool(hot_pages), sliding_window=window, device="cpu",
        config=DecodeConfig(programs=2 * places, min_chunk=1),
    )  # fmt: skip
    assert plan.places == places
    tables = torch.arange(len(lens) * width, dtype=torch.int32).view(len(lens), width)
    hot = None
    if hot_pages:
        index = torch.full((len(lens) * width,), -1, dtype=torch.int32)
        index[sorted(hot_pages)] = torch.arange(len(hot_pages), dtype=torch.int32)
        hot = HotPool(torch.zeros(len(hot_pages), 2, 2, 16, 64), index)
    for buffer in (plan.items, plan.place_item, plan.seq_info):
        buffer.fill_(-7)
    schedule(plan, tables, torch.tensor(lens, dtype=torch.int32), hot)
    return plan


def costs(plan: DecodePlan) -> list[int]:
    """Cost of each place."""
    bounds = plan.place_item.tolist()
    assert bounds[0] == 0 and bounds == sorted(bounds)
    items = plan.items.tolist()
    cost = [(hi - lo) + HOT_COST * (hot_hi - hot_lo) for _, _, lo, hi, hot_lo, hot_hi, _, _ in items[: bounds[-1]]]
    return [sum(cost[a:b]) for a, b in pairwise(bounds)]


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2000)), min_size=1, max_size=9),
    places=st.integers(1, 24),
    first_hot=st.booleans(),
)
def test_every_page_is_in_one_item(lens: list[int], places: int, first_hot: bool) -> None:
    width = max(1, max(-(-n // 16) for n in lens))
    plan = make(lens, places, {i * width for i in range(len(lens))} if first_hot else set())
    items, info = plan.items.tolist(), plan.seq_info.tolist()
    assert plan.place_item[-1] == sum(parts for parts, _ in info) <= plan.max_items
    for i, n in enumerate(lens):
        parts, first = info[i]
        mine = items[first : first + parts]
        assert all(item[:2] == [i, parts] for item in mine)
        pages = -(-n // 16)
        hot = int(first_hot and pages > 0)
        assert [p for item in mine for p in range(item[2], item[3])] == list(range(pages - hot))
        assert [p for item in mine for p in range(item[4], item[5])] == list(range(hot))
        assert all(item[2] % plan.tile_pages == 0 for item in mine)
    assert sum(costs(plan)) == sum(-(-n // 16) + (HOT_COST - 1) * first_hot * (n > 0) for n in lens)


@pytest.mark.parametrize(
    ("lens", "places"),
    [([2000] * 4, 9), ([16, 40, 90, 200, 450, 1000, 2200], 16), ([300] * 7, 4), ([64] * 30 + [4000], 8)],
)
def test_places_share_the_work(lens: list[int], places: int) -> None:
    plan = make(lens, places)
    share = -(-sum(-(-n // 16) for n in lens) // places)
    tile = plan.tile_pages
    assert tile == 4  # cuts are between tiles
    assert max(costs(plan)) <= SLACK.value * share + tile * (DecodeConfig().start_cost * len(lens) / places + 1)


def test_a_window_leaves_out_pages_that_nobody_sees() -> None:
    plan = make([100, 1000], 4, window=64)
    pages = [p for item in plan.items[: int(plan.place_item[-1])].tolist() for p in range(item[2], item[3])]
    assert pages == [*range(2, 7), *range((1000 - 64) // 16, 63)]
