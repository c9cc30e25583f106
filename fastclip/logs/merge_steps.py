# SPDX-License-Identifier: BSD-3-Clause
"""Records put together from rows: several rows may tell of one step, and a resumed run repeats steps."""

from __future__ import annotations

import math
from typing import Any

from ..monitor.record import Record

_UNIX = 1e9  # a time below it is seconds since the start, not since 1970


class Steps:
    """Takes rows in the order of the file and gives records in the order of the steps.

    Rows in a row with one step, as Lightning writes them, are put together. A step that comes again later is
    that of a resumed run: what was written last is kept.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._last: int | None = None
        self.repeated = 0
        self.restarts = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Fields of a record by name."""
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
    def counts_anew(self) -> bool:
        """Whether the steps begin anew again and again, as those within an epoch do: they name no step."""
        return self.restarts > 1 and self.repeated > len(self._records) / 2

    def records(self) -> list[Record]:
        found = [self._records[step] for step in sorted(self._records)]
        for record in found:
            complete(record)
        return found


def complete(record: Record) -> None:
    """What follows from the numbers that are there, and what they cannot mean taken out."""
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
    """Seconds since 1970, or 0 for a time that is none, such as that since the start of the run."""
    return seconds if _UNIX < seconds < math.inf else 0.0


def repeats_told(path: object, repeated: int) -> str:
    return f"{path}: {repeated} steps come again, as in a resumed run; of each the one written last was kept"
