# SPDX-License-Identifier: BSD-3-Clause
"""Records as they come in, looked at by the detectors and handed to the sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .detectors import Detector
from .open_step import OpenStep
from .record import Event, Record
from .record_builder import RecordMaker
from .sinks import SinkGroup
from .suppress import guarded

KEPT = 5000


class History:
    """The last records and events.

    Attributes:
        records, events: the last KEPT.
        new: records that nobody has acted on yet.
    """

    def __init__(self, maker: RecordMaker, detectors: Sequence[Detector], sinks: SinkGroup) -> None:
        self._maker, self._detectors, self._sinks = maker, detectors, sinks
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.events: list[Event] = []
        self.new: deque[Record] = deque()

    def add(self, step: OpenStep, values: dict[str, Any]) -> None:
        """The record of a step whose numbers have arrived."""
        record = self._maker.make(step, values)
        found = [guarded(detector.update, record) for detector in self._detectors]
        record.events = [event for event in found if event is not None]
        self.records.append(record)
        self.events += record.events
        del self.events[:-KEPT]
        self.new.append(record)
        self._sinks.write(record.to_dict())
