# SPDX-License-Identifier: BSD-3-Clause
"""The way of a completed step: its copy to the host, record, events, sinks, incident and actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .actions import ActionRunner
from .async_copy import AsyncCopy
from .detectors import Detector
from .incidents.capture import Capture
from .record import Event, Record
from .record_builder import RecordBuilder
from .sinks import SinkGroup
from .skip_latch import SkipLatch
from .step_in_progress import StepInProgress
from .suppress_errors import suppress_errors, warn_once

KEPT = 5000  # records, and events


class StepPipeline:
    """Takes each completed step from its numbers on the device to what is done about it.

    Args:
        builder: makes the records.
        detectors: look at each record, in this order.
        sinks: where records go.
        capture: saves the steps that closed the latch; None without incidents.
        latch: released when the record of a skipped step is there; None without, or where all processes
            release theirs together, see :class:`StepDecision`.
        actions: what events do.

    Attributes:
        records, events: the last KEPT.
    """

    def __init__(
        self,
        builder: RecordBuilder,
        detectors: Sequence[Detector],
        sinks: SinkGroup,
        capture: Capture | None,
        latch: SkipLatch | None,
        actions: ActionRunner,
    ) -> None:
        self._builder, self._detectors, self._sinks = builder, detectors, sinks
        self._capture, self._latch, self._actions = capture, latch, actions
        self._copy = AsyncCopy()
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.events: list[Event] = []
        self._not_acted_on: deque[Record] = deque()

    def run(self, step: StepInProgress) -> None:
        """Take a completed step as far as its numbers are on the host, and earlier ones that have come."""
        with suppress_errors("copy the numbers of a step"):
            self._copy.start(step, step.values)
        self.advance()

    def advance(self, wait: bool = False) -> None:
        """Record the steps whose numbers have reached the host, or all with `wait`; then act on them."""
        with suppress_errors("read the numbers of a step"):
            for step, values in self._copy.finished(wait):
                self._record(step, values)
        while self._not_acted_on:  # errors are not suppressed: a user's own functions are called
            self._actions.run(self._not_acted_on.popleft())

    def salvage(self) -> None:
        """Record what can be had of all steps after an error, which may have broken the device."""
        for step, values in self._copy.salvaged():
            self._record(step, values)
        self._sinks.flush()

    def _record(self, step: StepInProgress, values: dict[str, Any]) -> None:
        record = None
        with suppress_errors("record a step"):
            record = self._builder.build(step, values)
            self._detect(record)
            self.records.append(record)
            self.events += record.events
            del self.events[:-KEPT]
            self._not_acted_on.append(record)
            self._sinks.write(record.to_dict())
        reason = int(values.get("latch_reason", 0))
        if reason and record is not None and self._capture is not None:
            with suppress_errors("save an incident"):
                self._capture.save(reason, record, self.records)
        if values.get("skipped_by_latch") and self._latch is not None:
            self._latch.release(step.decision)

    def _detect(self, record: Record) -> None:
        for detector in self._detectors:
            try:  # a context manager for each would take longer than most detectors
                event = detector.update(record)
            except Exception as error:
                warn_once(f"run the detector {detector.kind!r}", error)
            else:
                if event is not None:
                    record.events.append(event)
