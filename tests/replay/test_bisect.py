# SPDX-License-Identifier: BSD-3-Clause
"""Delta debugging finds minimal failing subsets."""

import pytest

from fastclip.replay.bisect import DeltaDebugging


@pytest.mark.parametrize("guilty", [{0}, {63}, {3, 60}, {1, 2}, {0, 20, 40, 63}, set(range(8))])
def test_all_smallest_finds_items_that_fail_together(guilty):
    search = DeltaDebugging(lambda items: guilty <= set(items))
    found, rest = search.all_smallest(range(64))
    assert [set(subset) for subset in found] == [guilty] and not rest
    if len(guilty) == 1:
        assert search.asked <= 14


def test_all_smallest_of_items_that_all_fail():
    found, rest = DeltaDebugging(bool).all_smallest(range(64), most=3)
    assert [len(subset) for subset in found] == [1, 1, 1] and rest


def test_subsets_are_evaluated_once_and_at_most_most_times():
    asked = []
    search = DeltaDebugging(lambda items: asked.append(items) or len(items) > 32, most=50)
    smallest = search.smallest(range(64))
    assert len(asked) == len(set(map(frozenset, asked))) <= 50 and len(smallest) >= 33
