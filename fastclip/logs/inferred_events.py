# SPDX-License-Identifier: BSD-3-Clause
"""Events of a run that nobody watched: found afterwards by the detectors, in the numbers that were logged."""

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
    """For logs that leave steps out: 128 rows may be the whole run, in which healthy norms change by more
    than a factor of 2. The median of the last 8 rows must be exceeded as well, not only in the beginning.
    """

    def stands_out(self, norm: float, median: float) -> bool:
        return norm > self.factor * self.recent.median() and super().stands_out(norm, median)


def stride_of(records: Sequence[Record]) -> int:
    """How many steps lie between a record and the next: 1 if every step was logged, 10 if every tenth."""
    steps = [r.step for r in records if r.loss is not None or r.total_norm is not None]
    return max(1, round(median([b - a for a, b in pairwise(steps)]))) if len(steps) > 1 else 1


def judge(records: Sequence[Record], counted: bool = False) -> None:
    """Give the records the events that a monitor would have told, as far as loss, norm, limit and loss scale
    show them. Windows count records. Where steps are left out a creeping norm is no event, since over
    thousands of steps healthy norms creep too.

    Args:
        records: of one rank, in the order of the steps, without events.
        counted: whether NaN and Inf in the gradients were counted, so that a count of 0 means none.
    """
    stride = stride_of(records)
    _infer_overflows(records)
    looking = _detectors(stride)
    for place, record in enumerate(records):
        step = record.step
        record.step = place if stride > 1 else step  # an event lasts over neighbouring records
        found = [event for detector in looking if (event := detector.update(record)) is not None]
        record.step = step
        for event in found:
            event.step = step
            event.message = _told(event, stride, counted)
        record.events = found
    _look_back(records)


def _detectors(stride: int) -> list[Detector]:
    if stride == 1:
        return [LossScale(), NormGrowth(), NormSpike(), NormDrift(), ClipShare(), LossSpike(), NonFinite()]
    # 50 records that were drawn from 500 steps or more say as much of them as 200 in a row.
    return [LossScale(), _RecentGrowth(), NormSpike(), ClipShare(window=50), LossSpike(), NonFinite()]


def _told(event: Event, stride: int, counted: bool) -> str:
    """The message, without what is not known of such a log."""
    message = _COUNTED.sub(r"\1 logged steps", event.message) if stride > 1 else event.message
    if event.kind == "nonfinite" and not counted:
        for key in ("nan_count", "inf_count", "parameters"):
            event.values.pop(key, None)
        message = message.replace(_UNKNOWN, "")
    return message


def _infer_overflows(records: Sequence[Record]) -> None:
    """A loss scale that falls tells that a scaler has left a step out: the one whose norm is not finite, of
    the two records between which it falls. Whether the scale is logged before a step or after it, the norms
    of all falls tell together.
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


def _look_back(records: Sequence[Record]) -> None:
    """A norm that is not finite did no harm where later ones are finite: parameters that have become NaN give
    no finite norm again. The step was left out, as loss scalers do, whether or not the log tells the scale.
    """
    healthy = max((i for i, r in enumerate(records) if r.has_finite_norm and not _loss_is_bad(r)), default=-1)
    for record in records[:healthy]:
        for event in record.events:
            if event.kind == "nonfinite" and event.severity == "error" and not _loss_is_bad(record):
                event.severity = "warning"
                event.message += "; later norms are finite, so the step was left out or changed nothing"
