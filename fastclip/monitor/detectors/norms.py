# SPDX-License-Identifier: BSD-3-Clause
"""Precursors in the gradient norm before clipping, which moves before the loss does.

The thresholds were checked against the public log of a healthy GPT-2 124M training (19,560 steps) and the
first spike of BLOOM-176B: norms 0.242, 0.947, 2.39, 15.9, 145, 960 while the loss was 2.20, 2.22, 2.60, 2.24,
2.35, 5.10.
"""

from __future__ import annotations

import math

from ..record import Event, Record
from .base import Detector
from .trailing_window import TrailingWindow


class NormGrowth(Detector):
    """The norm is far above its trailing median for `steps` steps in a row.

    Far above means by the factor `factor` and by `z` robust standard deviations of its logarithm. It reports
    none of the 19,560 healthy GPT-2 steps, and on the BLOOM numbers it is three steps ahead of the loss. The
    z-score is for small batches, whose norms scatter by a factor of 2 and would exceed the factor alone twice
    in a row every few dozen steps. Until the window is full, the norms of a young training may grow steadily,
    as those behind a zero-initialised layer do: then the factor applies to the median of the last 8 steps
    too.
    """

    kind = "norm_growth"
    STATE = ("window", "recent", "streak")

    def __init__(
        self, factor: float = 2.0, steps: int = 2, z: float = 3.0, window: int = 128, minimum: int = 16
    ) -> None:
        super().__init__()
        self.factor, self.steps, self.z, self.minimum = factor, steps, z, minimum
        self.window = TrailingWindow(window)
        self.recent = TrailingWindow(8)
        self.streak = 0

    def check(self, record: Record) -> Event | None:
        if not record.has_finite_norm:
            return None
        norm = record.total_norm
        assert norm is not None
        median = self.window.median() if len(self.window) >= self.minimum else math.inf
        # The first comparison settles nearly all steps.
        above = norm > self.factor * median > 0 and self.stands_out(norm, median)
        self.streak = self.streak + 1 if above else 0
        before = len(self.window)
        self.window.add(norm)
        self.recent.add(norm)
        if self.streak < self.steps:
            return None
        return self.event(
            record,
            "warning",
            f"the gradient norm is {norm:.3g}, {norm / median:.1f} times the median of the last "
            f"{before} steps, for {self.streak} steps in a row",
            total_norm=norm,
            median=median,
            streak=self.streak,
        )

    def stands_out(self, norm: float, median: float) -> bool:
        """Return whether a norm above `factor` times the median is unusual for this training."""
        if not self.window.is_full and norm <= self.factor * self.recent.median():
            return False
        low, high = self.window.quantile(0.25), self.window.quantile(0.75)
        sigma = math.log(high / low) / 1.349 if low > 0 else math.inf
        return math.log(norm / median) > self.z * sigma


class NormSpike(Detector):
    """The norm of one step is `factor` times the trailing median and `z` robust standard deviations above it.

    The standard deviations are those of its logarithm. A z-score alone is no alarm: 6 standard deviations are
    exceeded in 57 of the healthy steps, 8 in more than a hundred, when the norms lie close together. The
    largest healthy norm is 7.5 times its median.
    """

    kind = "norm_spike"
    STATE = ("window",)

    def __init__(self, z: float = 8.0, factor: float = 8.0, window: int = 128, minimum: int = 16) -> None:
        super().__init__()
        self.z, self.factor, self.minimum = z, factor, minimum
        self.window = TrailingWindow(window)

    def check(self, record: Record) -> Event | None:
        if not record.has_finite_norm or not record.total_norm or record.total_norm < 0:
            return None
        value = math.log(record.total_norm)
        event = None
        if len(self.window) >= self.minimum:
            above = value - self.window.median()
            z = above / max(self.window.sigma(), 1e-3) if above > math.log(self.factor) else 0.0
            if z > self.z:
                median = math.exp(self.window.median())
                event = self.event(
                    record,
                    "warning",
                    f"the gradient norm is {record.total_norm:.3g}, {math.exp(above):.1f} times its median "
                    f"{median:.3g}; robust z-score {z:.0f}",
                    total_norm=record.total_norm,
                    median=median,
                    z=z,
                )
        self.window.add(value)
        return event


class NormDrift(Detector):
    """The norm creeps upwards: a one-sided CUSUM of the logarithm of the norm (Page, 1954).

    Each step adds (log norm - reference) / sigma - `slack` to a sum that stays at 0 or above. The alarm is a
    sum of `limit` while the recent norms are at least `factor` times the reference. Reference and sigma are
    those of the `window` steps before the last `lag`, so that a drift does not hide in what it is compared
    with.

    It is silent in the 19,560 healthy GPT-2 steps. With their norms multiplied by exp(r t) from step 5000 on
    it reports after 277, 144 and 105 steps for r = 0.001, 0.002 and 0.003, when they have grown by a third.
    While the learning rate rises by a tenth in 200 steps or more, the norms of healthy models may grow with
    it, and the factor is `warm_up_factor`.
    """

    kind = "norm_drift"
    STATE = ("window", "recent", "sum", "rate")

    def __init__(
        self,
        slack: float = 1.5,
        limit: float = 60.0,
        factor: float = 1.2,
        warm_up_factor: float = 3.0,
        window: int = 256,
        lag: int = 128,
    ) -> None:
        super().__init__()
        self.slack, self.limit, self.factor, self.warm_up_factor = slack, limit, factor, warm_up_factor
        self.window = TrailingWindow(window)
        self.recent = TrailingWindow(lag)
        self.sum = 0.0
        self.rate: float | None = None  # trailing average of the learning rate over 200 steps

    def check(self, record: Record) -> Event | None:
        if not record.has_finite_norm or not record.total_norm or record.total_norm < 0:
            return None
        rising = self._is_rising(max(record.lr)) if record.lr else False
        value = math.log(record.total_norm)
        if self.recent.is_full:
            self.window.add(self.recent.oldest())
        self.recent.add(value)
        if not self.window.is_full:
            return None
        reference = self.window.median()
        if value <= reference and not self.sum:
            return None
        sigma = max(self.window.sigma(), 0.05)
        # One spike is not a drift: a single step counts for 4 standard deviations at most. The sum stops at
        # the limit, so that a persistent drift is one event.
        self.sum += min((value - reference) / sigma, 4.0) - self.slack
        self.sum = min(max(0.0, self.sum), self.limit)
        factor = self.warm_up_factor if rising else self.factor
        if self.sum < self.limit or self.recent.quantile(0.75) < reference + math.log(factor):
            return None
        return self.event(
            record,
            "warning",
            f"the gradient norm is drifting upwards: median {math.exp(self.recent.median()):.3g} in the last "
            f"{len(self.recent)} steps, {math.exp(reference):.3g} before",
            recent=math.exp(self.recent.median()),
            reference=math.exp(reference),
        )

    def _is_rising(self, rate: float) -> bool:
        if not math.isfinite(rate):
            return False
        before = rate if self.rate is None else self.rate
        self.rate = 0.995 * before + 0.005 * rate
        return rate > 1.1 * before


class ClipShare(Detector):
    """More than `share` of the last `window` steps were clipped at one limit.

    The healthy GPT-2 run clips 1.2 % of its steps at 1.0, nearly all of them in the first 700. A limit that
    moves from step to step is that of a policy such as a percentile, which clips a share on purpose, and is
    not reported.
    """

    kind = "clip_share"
    STATE = ("window", "limit")
    COOLDOWN = 1000

    def __init__(self, share: float = 0.9, window: int = 200) -> None:
        super().__init__()
        self.share = share
        self.window = TrailingWindow(window)
        self.limit: float | None = None

    def check(self, record: Record) -> Event | None:
        if record.clipped is None:
            return None
        if record.max_norm != self.limit:
            self.window.clear()
            self.limit = record.max_norm
        self.window.add(float(record.clipped))
        if not self.window.is_full:
            return None
        share = self.window.count_from(1.0) / len(self.window)
        if share <= self.share:
            return None
        return self.event(
            record,
            "warning",
            f"{share:.0%} of the last {len(self.window)} steps were clipped, the last one to "
            f"{record.clip_coef:.2g} of its norm",
            share=share,
            clip_coef=record.clip_coef,
            max_norm=record.max_norm,
        )


class ClippedBefore(Detector):
    """Another clip comes before the one that is monitored, which sees norms that are already clipped.

    Of the last `window` norms none was above the limit, and `pinned` of them equal it to one part in 1,000.
    A loop that still calls ``clip_grad_norm_`` beside the monitor looks like this.
    """

    kind = "clipped_before"
    STATE = ("ratios",)
    COOLDOWN = 1000
    CLOSE = 1e-3

    def __init__(self, window: int = 20, pinned: int = 10) -> None:
        super().__init__()
        self.pinned = pinned
        self.ratios = TrailingWindow(window)

    def check(self, record: Record) -> Event | None:
        limit, norm = record.max_norm, record.total_norm
        if limit is None or norm is None or not (0 < limit < math.inf and math.isfinite(norm)):
            return None
        self.ratios.add(norm / limit)
        if not self.ratios.is_full or self.ratios.largest() > 1 + self.CLOSE:
            return None
        count = self.ratios.count_from(1 - self.CLOSE)
        if count < self.pinned:
            return None
        return self.event(
            record,
            "warning",
            f"{count} of the last {self.ratios.size} gradient norms equal max_norm {limit:.3g} and none "
            "exceeds it: the gradients were already clipped. Remove the other call to clip_grad_norm_",
            pinned=count,
            max_norm=limit,
        )
