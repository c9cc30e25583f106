# SPDX-License-Identifier: BSD-3-Clause
"""Merging of rows into records: a step may have several rows, and a resumed run repeats steps."""

from __future__ import annotations

import math
from typing import Any

from ..monitor.record import Record

_UNIX = 1e9  # a smaller time counts seconds since the start, not since 1970


class StepMerger:
    """Takes rows in the order of the file and returns records in the order of the steps.

    Adjacent rows of one step, as Lightning writes them, are merged. A step that appears again later belongs
    to a resumed run: what was written last is kept.

    Attributes:
        repeated: how many steps appeared again later.
        restarts: how often a step was followed by a smaller one.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._last: int | None = None
        self.repeated = 0
        self.restarts = 0

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Add a row: its step, and the values of the record's fields by name."""
        record = self._records.get(step)
        if self._last is not None and step < self._last:
            self.restarts += 1
        if record is None or step != self._last:
            self.repeated += record is not None
            record = self._records[step] = Record(step)
        self._last = step
        for name, value in values.items():
            setattr(record, name, value)

    @property
    def restarts_often(self) -> bool:
        """Whether the numbers restart again and again, since they count within an epoch."""
        return self.restarts > 1 and self.repeated > len(self._records) / 2

    def records(self) -> list[Record]:
        """Return the completed records in the order of the steps."""
        found = [self._records[step] for step in sorted(self._records)]
        for record in found:
            complete_record(record)
        return found


def complete_record(record: Record) -> None:
    """Add the clip coefficient, which follows from norm and limit, and remove meaningless numbers."""
    limit, norm = record.max_norm, record.total_norm
    if limit is not None and not 0 < limit < math.inf:
        record.max_norm = limit = None  # trainers write 0 or -1 for no clipping
    if record.clip_coef is None and limit is not None and norm is not None and math.isfinite(norm):
        record.clip_coef = min(1.0, limit / (norm + 1e-6))
    record.time = unix_time(record.time)
    for name in ("nan_count", "inf_count"):
        count = getattr(record, name)
        setattr(record, name, int(count) if math.isfinite(count) else 0)


def unix_time(seconds: float) -> float:
    """Return the seconds since 1970, or 0 if they count from elsewhere, such as the start of the run."""
    return seconds if _UNIX < seconds < math.inf else 0.0


def repeated_steps_warning(path: object, repeated: int) -> str:
    """Return the warning that steps appear more than once."""
    return f"{path}: {repeated} steps appear more than once, as in a resumed run; the last of each was kept"
