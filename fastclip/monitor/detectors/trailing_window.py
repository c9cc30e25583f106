# SPDX-License-Identifier: BSD-3-Clause
"""What the detectors remember: a trailing window with its median and spread."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of numbers in ascending order, at least one; by linear interpolation."""
    position = q * (len(ordered) - 1)
    low = int(position)
    part = position - low
    return ordered[low] if part == 0.0 else ordered[low] + (ordered[low + 1] - ordered[low]) * part


class Window:
    """The last `size` finite numbers. A NaN or Inf never gets in: it would spoil every later statistic."""

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
        """From the oldest to the newest."""
        return list(self._values)

    def oldest(self) -> float:
        return self._values[0]

    def newest(self) -> float:
        return self._values[-1]

    def count_from(self, value: float) -> int:
        """How many are not smaller."""
        return len(self._sorted) - bisect_left(self._sorted, value)

    def quantile(self, q: float) -> float:
        """By linear interpolation. The window must not be empty."""
        return quantile(self._sorted, q)

    def median(self) -> float:
        return self.quantile(0.5)

    def smallest(self) -> float:
        return self._sorted[0]

    def largest(self, place: int = 1) -> float:
        """The largest, or the second largest with place 2."""
        return self._sorted[-place]

    def sigma(self) -> float:
        """A standard deviation that single outliers do not move: from the quartiles of a normal
        distribution.
        """
        return (self.quantile(0.75) - self.quantile(0.25)) / 1.349

    def clear(self) -> None:
        self._values.clear()
        self._sorted.clear()
