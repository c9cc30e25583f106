# SPDX-License-Identifier: BSD-3-Clause
"""Spikes of the loss, NaN and Inf anywhere, and steps that raised."""

from __future__ import annotations

import math

from ..record import Event, Record
from .base import Detector
from .trailing_window import TrailingWindow


class LossSpike(Detector):
    """The loss is far above its trailing median.

    It has to be above by all of these: `z` robust standard deviations; `beyond` times as far as the second
    largest loss of the window; a thousandth of what the run began with; and, if losses are positive, `share`
    of the median and 6 robust standard deviations of the logarithm.

    Each rule protects a kind of healthy run. The z-score alone exceeds 8 in 5 healthy GPT-2 steps, whose loss
    is at most 11 % above the median. The loss of small batches has long tails near its end, mostly 0.001 and
    now and then 0.5; the second largest is compared, so that one spike does not hide the next (one false
    alarm in 2,000 such steps). A hinge loss is 0 in most steps. Log-likelihoods are negative and have no
    meaningful share.

    In the first `minimum` steps a spike is a loss that exceeds the largest so far by 4 times the range so
    far, and by the factor `early`.
    """

    kind = "loss_spike"
    STATE = ("window", "start")

    def __init__(
        self,
        z: float = 8.0,
        share: float = 0.2,
        beyond: float = 3.0,
        early: float = 1.5,
        window: int = 128,
        minimum: int = 16,
    ) -> None:
        super().__init__()
        self.z, self.share, self.beyond, self.early, self.minimum = z, share, beyond, early, minimum
        self.window = TrailingWindow(window)
        self.start: float | None = None  # median size of the first losses

    def check(self, record: Record) -> Event | None:
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return None
        limit = math.inf
        event = None
        # No limit is below the second largest loss of the window.
        if len(self.window) >= 4 and loss > self.window.largest(2):
            limit = self._limit()
        if loss > limit:
            median = self.window.median()
            z = (loss - median) / max(self.window.sigma(), 1e-12)
            event = self.event(
                record,
                "warning",
                f"the loss is {loss:.4g}; the median of the last {len(self.window)} steps is {median:.4g}",
                loss=loss,
                median=median,
                z=z,
            )
        self.window.add(loss)
        if self.start is None and len(self.window) == self.minimum:
            self.start = max(abs(self.window.quantile(0.25)), abs(self.window.quantile(0.75)))
        return event

    def _limit(self) -> float:
        window = self.window
        median, largest, smallest = window.median(), window.largest(2), window.smallest()
        if len(window) < self.minimum:
            largest = window.largest()
            return largest + max((self.early - 1) * abs(largest), 4 * (largest - smallest))
        above = max(self.z * window.sigma(), 1e-3 * (self.start or 0.0))
        if median == 0:
            return 10 * largest if largest > 0 else math.inf
        limit = median + max(above, self.beyond * (largest - median))
        if smallest > 0:
            sigma = math.log(window.quantile(0.75) / window.quantile(0.25)) / 1.349
            limit = max(limit, (1 + self.share) * median, median * math.exp(min(6 * sigma, 700.0)))
        return limit


class NonFinite(Detector):
    """NaN or Inf in the loss, a gradient or the norm of the parameters.

    Each step is reported, up to `limit` in a row, and then every `COOLDOWN`. An overflow that a loss scaler
    skips is how it finds its scale: the severity is "info", unless the loss itself is not finite.
    """

    kind = "nonfinite"
    STATE = ("streak",)

    def __init__(self, limit: int = 3) -> None:
        super().__init__()
        self.limit = limit
        self.streak = 0

    def update(self, record: Record) -> Event | None:
        self.streak = 0 if record.is_finite and not _lost(record) else self.streak + 1
        if self.streak == 0 or (self.streak > self.limit and self.streak % self.COOLDOWN):
            return None
        return self.check(record)

    def check(self, record: Record) -> Event | None:
        bad_loss = record.loss is not None and not math.isfinite(record.loss)
        found = []
        if bad_loss:
            found.append(f"the loss is {record.loss}")
        if _lost(record):
            found.append(f"the parameter norm is {record.param_norm}: the weights are no longer finite")
        names = [t["name"] for t in record.worst if t.get("nan_count", 0) + t.get("inf_count", 0)]
        if record.nan_count + record.inf_count:
            found.append(f"the gradients hold {record.nan_count} NaN and {record.inf_count} Inf")
            if names:
                found.append(f"most of them in {', '.join(names[:3])}")
        elif record.total_norm is not None and not math.isfinite(record.total_norm):
            found.append(f"the gradient norm is {record.total_norm} though every element is finite")
        handled = record.loss_scale is not None and record.applied is False
        handled = handled and not bad_loss and not _lost(record)
        if record.applied is False:
            found.append("the step was skipped")
        return self.event(
            record,
            "info" if handled else "error",
            "; ".join(found),
            loss=record.loss,
            nan_count=record.nan_count,
            inf_count=record.inf_count,
            parameters=names,
            applied=record.applied,
            streak=self.streak,
        )


def _lost(record: Record) -> bool:
    return record.param_norm is not None and not math.isfinite(record.param_norm)


class Failed(Detector):
    """The step ended in an exception. Each one is reported."""

    kind = "exception"
    COOLDOWN = 1

    def check(self, record: Record) -> Event | None:
        if record.error is None:
            return None
        return self.event(record, "error", f"the step ended in {record.error}", error=record.error)
