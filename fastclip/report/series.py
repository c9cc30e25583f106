# SPDX-License-Identifier: BSD-3-Clause
"""Series of numbers over the steps: trailing statistics, gaps, and thinning that keeps every spike."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..monitor.detectors.trailing_window import TrailingWindow, quantile

WINDOW = 200  # steps of the trailing statistics, the same as those of the event clip_share
MINIMUM = 20  # fewer steps have no trailing statistics


@dataclass
class Series:
    """Numbers at some of the steps.

    Attributes:
        label: its name in the chart.
        at: places on the axis of the steps, in ascending order.
        values: one for each place, NaN and Inf included; steps without a measurement have no place.
        breaks: the place of the first value after each gap.
        role: how it is drawn: "main", "faint" behind it, "limit", "guide", or "rank".
        shown: whether it is drawn at first; a click on its name in the legend changes that.
    """

    label: str
    at: list[int]
    values: list[float]
    breaks: list[int] = field(default_factory=list)
    role: str = "main"
    shown: bool = True

    def __bool__(self) -> bool:
        return bool(self.at)

    def finite(self) -> list[float]:
        """Return the values that are neither NaN nor Inf."""
        return [value for value in self.values if math.isfinite(value)]


class Axis:
    """The steps of all ranks, plus an empty place after each gap that all of them have."""

    def __init__(self, steps: Iterable[int]) -> None:
        known = sorted(set(steps))
        limit = gap_limit(known)
        self.steps: list[int] = []
        for step in known:
            if self.steps and step - self.steps[-1] > limit:
                self.steps.append(self.steps[-1] + 1)
            self.steps.append(step)
        self._is_plain = bool(known) and known[-1] - known[0] == len(known) - 1
        self._places = {} if self._is_plain else {step: place for place, step in enumerate(self.steps)}

    def __len__(self) -> int:
        return len(self.steps)

    def place(self, step: int) -> int:
        """Return the place of one of the steps."""
        return step - self.steps[0] if self._is_plain else self._places[step]

    def series(
        self, label: str, numbers: Iterable[tuple[int, float | None]], role: str = "main", shown: bool = True
    ) -> Series:
        """Return a series of (step, number) pairs in the order of the steps; numbers may be None."""
        steps: list[int] = []
        values: list[float] = []
        for step, number in numbers:
            if number is not None:
                steps.append(step)
                values.append(float(number))
        first = self.steps[0] if self.steps else 0
        at = [step - first for step in steps] if self._is_plain else [self._places[step] for step in steps]
        limit = gap_limit(steps)
        breaks = [place for place, a, b in zip(at[1:], steps, steps[1:], strict=False) if b - a > limit]
        return Series(label, at, values, breaks, role, shown)


def gap_limit(steps: Sequence[int]) -> float:
    """Return how far apart two steps may be without a gap between them.

    It is twice the 90th percentile of the distances, since what is measured every few steps is measured more
    often at first.
    """
    apart = sorted(b - a for a, b in itertools.pairwise(steps))
    return 2 * quantile(apart, 0.9) if apart else math.inf


def trailing_quantiles(
    series: Series, shares: dict[str, float], size: int = WINDOW, minimum: int = MINIMUM
) -> list[Series]:
    """Return a series for each label: a quantile of the last `size` finite values, linearly interpolated."""
    window = TrailingWindow(size)
    found = [Series(label, [], [], series.breaks, "guide") for label in shares]
    for place, value in zip(series.at, series.values, strict=True):
        window.add(value)
        if len(window) >= minimum:
            for one, share in zip(found, shares.values(), strict=True):
                one.at.append(place)
                one.values.append(window.quantile(share))
    return found


def trailing_share(series: Series, label: str, size: int = WINDOW, minimum: int = MINIMUM) -> Series:
    """Return the mean of the last `size` values, which are 0 or 1."""
    last: deque[float] = deque()
    found, total = Series(label, [], [], series.breaks), 0.0
    for place, value in zip(series.at, series.values, strict=True):
        last.append(value)
        total += value
        if len(last) > size:
            total -= last.popleft()
        if len(last) >= minimum:
            found.at.append(place)
            found.values.append(total / len(last))
    return found


def without_repeats(series: Series) -> Series:
    """Remove the inner values of runs of equal values, which does not change the line."""
    values, last = series.values, len(series.values) - 1
    edges = set(series.breaks)
    kept = [
        i
        for i, value in enumerate(values)
        if i in (0, last)
        or not (values[i - 1] == value == values[i + 1])
        or series.at[i] in edges
        or series.at[i + 1] in edges
    ]
    return _subset(series, kept)


def thinned(series: Series, budget: int) -> Series:
    """Return a series of about `budget` values at most, with every spike.

    Of each block the first, lowest, highest and last value are kept, and the first NaN, Inf and -Inf.
    """
    count = len(series.values)
    if count <= budget:
        return series
    size = math.ceil(4 * count / max(budget, 4))
    kept = set()
    for start in range(0, count, size):
        its = range(start, min(start + size, count))
        kept |= {its[0], its[-1]}
        finite = [i for i in its if math.isfinite(series.values[i])]
        if finite:
            kept.add(min(finite, key=series.values.__getitem__))
            kept.add(max(finite, key=series.values.__getitem__))
        if len(finite) < len(its):
            kinds = {repr(series.values[i]): i for i in reversed(its) if not math.isfinite(series.values[i])}
            kept.update(kinds.values())
    return _subset(series, sorted(kept))


def _subset(series: Series, kept: Sequence[int]) -> Series:
    at, values = [series.at[i] for i in kept], [series.values[i] for i in kept]
    return Series(series.label, at, values, series.breaks, series.role, series.shown)
