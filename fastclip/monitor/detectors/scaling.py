# SPDX-License-Identifier: BSD-3-Clause
"""The loss scale of mixed precision, and how far a step moves the weights."""

from __future__ import annotations

import math
from statistics import median

from ..record import Event, Record
from .base import Detector
from .trailing_window import TrailingWindow


class LossScale(Detector):
    """The loss scale collapses.

    It does after `streak` overflows in a row, a fall to 1/`fall` of its value within `window` steps, or below
    1. A scaler starts too high on purpose and halves until it fits: from torch's 65536 three or four times in
    most trainings, from DeepSpeed's 2^32 sixteen times. Therefore, until the first step without overflow,
    only overflows at a scale of `low` or less are an alarm, and later scales are not compared with those of
    the search. After it, losing a factor of 2 now and then is normal. The known collapses (fairseq #1529,
    pytorch #157436: 131072 to 5e-23) are dozens of overflows in a row.
    """

    kind = "loss_scale"
    STATE = ("window", "streak", "overflows", "found")

    def __init__(self, streak: int = 5, fall: float = 32.0, window: int = 100, low: float = 2048.0) -> None:
        super().__init__()
        self.limit, self.fall, self.low = streak, fall, low
        self.window = TrailingWindow(window)
        self.streak = 0
        self.overflows = 0
        self.found = False  # whether a step without overflow has been made

    def check(self, record: Record) -> Event | None:
        scale = record.loss_scale
        if scale is None:
            return None
        overflow = record.overflows > self.overflows
        self.streak = self.streak + 1 if overflow else 0
        self.overflows = record.overflows
        if not overflow and not self.found:
            self.found = True
            self.window.clear()
        self.window.add(scale)
        if 1.0 <= scale < math.inf and not self.streak and scale == self.window.largest():
            return None  # as high as ever, like nearly all steps
        largest = self.window.largest() if len(self.window) else math.nan
        numbers = {"loss_scale": scale, "streak": self.streak, "largest": largest}
        after = f"after {self.streak} overflows in a row" if self.streak > 1 else f"from {largest:g}"
        if not math.isfinite(scale):
            return self.event(record, "error", f"the loss scale is {scale}", **numbers)
        if scale < 1.0:
            message = f"the loss scale is {scale:g}, below 1, {after}: scaling no longer helps"
            return self.event(record, "error", message, **numbers)
        if self.found and (self.streak >= self.limit or scale * self.fall <= largest):
            return self.event(record, "warning", f"the loss scale is falling: {scale:g} {after}", **numbers)
        if not self.found and self.streak >= self.limit and scale <= self.low:
            message = f"no loss scale fits: {scale:g} {after}, and no step has succeeded yet"
            return self.event(record, "warning", message, **numbers)
        return None


class UpdateRatio(Detector):
    """A step changes the weights by too large or too small a share of their norm.

    The ratio is ``|change| / |weight|`` of each compared matrix in one step. Too large is a median above
    `high`, too small no ratio above `low` three times in a row. About 1e-3 is usual; the first steps of
    Adam are larger, learning rate / initial standard deviation (0.03 for 6e-4 and 0.02). From 0.2 on a step
    replaces the weights rather than improving them. Weights that start at zero, such as LoRA's, change by
    their whole norm, then a half, then a third: for the first `young` steps only those count that had a
    finite ratio in the first compared step. Frozen weights do not change and are ignored. Changes that
    vanish altogether are lost to rounding: bfloat16 weights lose what is below 1/256 of them. With a
    learning rate below 1e-7 nothing else is to be expected.
    """

    kind = "update_ratio"
    STATE = ("vanished", "settled", "first")

    def __init__(self, high: float = 0.2, low: float = 1e-8, young: int = 100) -> None:
        super().__init__()
        self.high, self.low, self.young = high, low, young
        self.vanished = 0
        self.settled: list[str] = []
        self.first: int | None = None

    def check(self, record: Record) -> Event | None:
        ratios = {name: r for name, r in record.update_ratio.items() if math.isfinite(r)}
        if not record.update_ratio or record.applied is False:
            return None
        if self.first is None:
            self.first, self.settled = record.step, list(ratios)
        if record.step < self.first + self.young:
            ratios = {name: ratios[name] for name in self.settled if name in ratios}
        if not ratios:
            return None
        largest = max(ratios, key=lambda name: ratios[name])
        moved = [r for r in ratios.values() if r > 0]
        middle = median(moved) if moved else 0.0
        numbers = {"median": middle, "largest": ratios[largest], "parameter": largest, "lr": record.lr}
        rate = max(record.lr, default=0.0)
        self.vanished = self.vanished + 1 if ratios[largest] < self.low and rate >= 1e-7 else 0
        if middle > self.high:
            return self.event(
                record,
                "warning",
                f"a step changes the weights by {middle:.2g} of their norm (median of {len(moved)}), "
                f"{largest} by {ratios[largest]:.2g}, at learning rate {rate:.3g}",
                **numbers,
            )
        if self.vanished >= 3:
            return self.event(
                record,
                "warning",
                f"the steps do not change the weights: by at most {ratios[largest]:.1g} of their norm "
                f"(maximum of {len(ratios)}) at learning rate {rate:.3g}",
                **numbers,
            )
        return None
