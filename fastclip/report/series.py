# SPDX-License-Identifier: BSD-3-Clause
"""Numbers over the steps: trailing statistics, gaps, and fewer of them without losing a spike."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..monitor.detectors.trailing_window import TrailingWindow, quantile

WINDOW = 200  # steps of the trailing statistics, as of the event clip_share
MINIMUM = 20  # steps before there is one


@dataclass
class Series:
    """Numbers at some of the steps.

    Attributes:
        label: what it is called in the chart.
        at: places on the axis of the steps, rising.
        values: one for each place; NaN and Inf are values, what was not measured has no place.
        breaks: places of the first value after each gap.
        role: how it is drawn: "main", "faint" behind it, "limit", "guide", or "rank".
        shown: whether it is drawn before anybody asks for it.
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
        return [value for value in self.values if math.isfinite(value)]


class Axis:
    """The steps of all ranks, with one more after each gap that all of them have, which stays empty."""

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
        """Of a step that was given."""
        return step - self.steps[0] if self._is_plain else self._places[step]

    def nearest(self, step: int) -> int:
        """Of the first step that is not before this one, else of the last."""
        return min(bisect_left(self.steps, step), len(self.steps) - 1)

    def series(
        self, label: str, numbers: Iterable[tuple[int, float | None]], role: str = "main", shown: bool = True
    ) -> Series:
        """From (step, number) in the order of the steps; None where it was not measured."""
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
    """How far apart two steps may be without a gap between them: twice as far as nine of ten are, since what
    is measured every few steps is measured more often at first.
    """
    apart = sorted(b - a for a, b in itertools.pairwise(steps))
    return 2 * quantile(apart, 0.9) if apart else math.inf


def trailing_quantiles(
    series: Series, shares: dict[str, float], size: int = WINDOW, minimum: int = MINIMUM
) -> list[Series]:
    """Of the last `size` finite values at each place, by linear interpolation: a series for each label."""
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
    """The mean of the last `size` values of 0 and 1."""
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
    """Without the inner ones of equal values in a row: the line is the same."""
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
    return _only(series, kept)


def thinned(series: Series, budget: int) -> Series:
    """At most about `budget` values: of so many in a row the first, the lowest, the highest, the last, and
    the first of each kind that is not finite.
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
    return _only(series, sorted(kept))


def _only(series: Series, kept: Sequence[int]) -> Series:
    at, values = [series.at[i] for i in kept], [series.values[i] for i in kept]
    return Series(series.label, at, values, series.breaks, series.role, series.shown)
