# SPDX-License-Identifier: BSD-3-Clause
"""A trailing window of numbers with its median and spread."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile `q` of one or more numbers in ascending order, linearly interpolated."""
    position = q * (len(ordered) - 1)
    low = int(position)
    part = position - low
    return ordered[low] if part == 0.0 else ordered[low] + (ordered[low + 1] - ordered[low]) * part


class TrailingWindow:
    """The last `size` finite numbers. NaN and Inf are ignored: they would spoil every later statistic."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self._values: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        values, ordered = self._values, self._sorted
        if len(values) == self.size:
            del ordered[bisect_left(ordered, values[0])]
        values.append(value)
        insort(ordered, value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_full(self) -> bool:
        return len(self._values) == self.size

    def values(self) -> list[float]:
        """Return the numbers from the oldest to the newest."""
        return list(self._values)

    def oldest(self) -> float:
        return self._values[0]

    def newest(self) -> float:
        return self._values[-1]

    def count_from(self, value: float) -> int:
        """Count the numbers that are at least `value`."""
        return len(self._sorted) - bisect_left(self._sorted, value)

    def quantile(self, q: float) -> float:
        """Return the quantile `q`, linearly interpolated. The window must not be empty."""
        return quantile(self._sorted, q)

    def median(self) -> float:
        return self.quantile(0.5)

    def smallest(self) -> float:
        return self._sorted[0]

    def largest(self, place: int = 1) -> float:
        """Return the largest number, or with `place` 2 the second largest."""
        return self._sorted[-place]

    def sigma(self) -> float:
        """Return a standard deviation that single outliers do not move.

        It is the interquartile range divided by that of the standard normal distribution.
        """
        return (self.quantile(0.75) - self.quantile(0.25)) / 1.349

    def clear(self) -> None:
        self._values.clear()
        self._sorted.clear()
