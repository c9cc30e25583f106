# SPDX-License-Identifier: BSD-3-Clause
"""Events of a run without a monitor, inferred from its log by the detectors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ..monitor.detectors import (
    ClipShare,
    Detector,
    LossScale,
    LossSpike,
    NonFinite,
    NormDrift,
    NormGrowth,
    NormSpike,
)
from ..monitor.record import Event, Record

_COUNTED = re.compile(r"(\d) steps")
_UNKNOWN = " though every element is finite"


class _RecentGrowth(NormGrowth):
    """NormGrowth for logs that do not have every step.

    128 rows of them may be the whole run, in which healthy norms change by more than a factor of 2.
    Therefore the median of the last 8 rows must always be exceeded too, not only in the beginning.
    """

    def stands_out(self, norm: float, median: float) -> bool:
        return norm > self.factor * self.recent.median() and super().stands_out(norm, median)


def stride_of(records: Sequence[Record]) -> int:
    """Return how many steps apart records are: 1 if every step was logged, 10 if every tenth."""
    steps = [r.step for r in records if r.loss is not None or r.total_norm is not None]
    return max(1, round(median([b - a for a, b in pairwise(steps)]))) if len(steps) > 1 else 1


def infer_events(records: Sequence[Record], counted: bool = False) -> None:
    """Add the events that a monitor would have reported, from loss, norm, limit and loss scale.

    Windows count records. If not every step was logged, a creeping norm is not an event, since over thousands
    of steps healthy norms creep too.

    Args:
        records: the records of one rank, in the order of the steps, without events.
        counted: whether NaN and Inf in the gradients were counted, so that a count of 0 means none.
    """
    stride = stride_of(records)
    _infer_overflows(records)
    detectors = _detectors(stride)
    for place, record in enumerate(records):
        step = record.step
        record.step = place if stride > 1 else step  # a condition persists over neighbouring records
        found = [event for detector in detectors if (event := detector.update(record)) is not None]
        record.step = step
        for event in found:
            event.step = step
            event.message = _message_without_unknowns(event, stride, counted)
        record.events = found
    _downgrade_harmless_norms(records)


def _detectors(stride: int) -> list[Detector]:
    if stride == 1:
        return [LossScale(), NormGrowth(), NormSpike(), NormDrift(), ClipShare(), LossSpike(), NonFinite()]
    # 50 records drawn from 500 steps or more say as much about them as 200 in a row.
    return [LossScale(), _RecentGrowth(), NormSpike(), ClipShare(window=50), LossSpike(), NonFinite()]


def _message_without_unknowns(event: Event, stride: int, counted: bool) -> str:
    """Return the message without what such a log does not show; removes it from the values as well."""
    message = _COUNTED.sub(r"\1 logged steps", event.message) if stride > 1 else event.message
    if event.kind == "nonfinite" and not counted:
        for key in ("nan_count", "inf_count", "parameters"):
            event.values.pop(key, None)
        message = message.replace(_UNKNOWN, "")
    return message


def _infer_overflows(records: Sequence[Record]) -> None:
    """Mark the steps that a loss scaler skipped, which its falling scale shows, and count them.

    Of the two records between which the scale falls, the skipped one has a norm that is not finite. Whether
    the scale was logged before the step or after it is decided from the norms of all falls together.
    """
    if any(r.overflows for r in records):
        return  # they were counted
    scaled = [r for r in records if r.loss_scale is not None]
    falls = [(a, b) for a, b in pairwise(scaled) if (b.loss_scale or 0.0) < (a.loss_scale or 0.0)]
    before = sum(_norm_is_bad(a) for a, _ in falls) > sum(_norm_is_bad(b) for _, b in falls)
    for pair in falls:
        first, second = pair if before else pair[::-1]
        bad = first if _norm_is_bad(first) else second if _norm_is_bad(second) else pair[1]
        bad.applied = False
    overflows = 0
    for record in scaled:
        overflows += record.applied is False
        record.overflows = overflows


def _norm_is_bad(record: Record) -> bool:
    return record.total_norm is not None and not math.isfinite(record.total_norm)


def _loss_is_bad(record: Record) -> bool:
    return record.loss is not None and not math.isfinite(record.loss)


def _downgrade_harmless_norms(records: Sequence[Record]) -> None:
    """Turn the error of a norm that is not finite into a warning if later norms are finite.

    Parameters that have become NaN never give a finite norm again. So the step was skipped, as loss scalers
    do, whether or not the log has the scale.
    """
    healthy = max((i for i, r in enumerate(records) if r.has_finite_norm and not _loss_is_bad(r)), default=-1)
    for record in records[:healthy]:
        for event in record.events:
            if event.kind == "nonfinite" and event.severity == "error" and not _loss_is_bad(record):
                event.severity = "warning"
                event.message += "; later norms are finite, so the step was skipped or changed nothing"
