# SPDX-License-Identifier: BSD-3-Clause
"""The smallest subsets that fail, of any kind of things and for any reason."""

import pytest

from fastclip.replay.bisect import DeltaDebugging


@pytest.mark.parametrize("guilty", [{0}, {63}, {3, 60}, {1, 2}, {0, 20, 40, 63}, set(range(8))])
def test_items_that_fail_together(guilty):
    search = DeltaDebugging(lambda items: guilty <= set(items))
    found, rest = search.all_smallest(range(64))
    assert [set(subset) for subset in found] == [guilty] and not rest
    if len(guilty) == 1:
        assert search.asked <= 14


def test_all_fail():
    found, rest = DeltaDebugging(bool).all_smallest(range(64), most=3)
    assert [len(subset) for subset in found] == [1, 1, 1] and rest


def test_a_question_is_asked_once_and_not_without_end():
    asked = []
    search = DeltaDebugging(lambda items: asked.append(items) or len(items) > 32, most=50)
    smallest = search.smallest(range(64))
    assert len(asked) == len(set(map(frozenset, asked))) <= 50 and len(smallest) >= 33
