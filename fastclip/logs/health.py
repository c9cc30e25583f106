# SPDX-License-Identifier: BSD-3-Clause
"""Verdict on whether a run went well, from its log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ..monitor.record import Event, Record
from .reader import Run

STATUS_NAMES = ("healthy", "warnings", "exploded", "no steps")
NO_STEPS = 3
_BLOCK = 16  # losses that a median is taken of
_ENOUGH = 50  # fewer steps do not make a meaningful share of clipped ones
_SHARE = 0.9  # the threshold of the detector clip_share


@dataclass
class EventGroup:
    """All events of one kind in a run.

    Attributes:
        kind: the kind of the events, or "loss_exploded" for a loss that rose and did not come back.
        severity: the highest severity, "warning" or "error".
        count: in how many steps there was such an event.
        step, message: step and message of the first event with this severity.
    """

    kind: str
    severity: str
    count: int
    step: int
    message: str

    def __str__(self) -> str:
        times = f"reported {self.count} times, first " if self.count > 1 else ""
        return f"{self.severity}: {self.kind}: {times}in step {self.step}: {self.message}"


@dataclass
class Verdict:
    """What :func:`verdict_of` found.

    Attributes:
        status: 0 healthy; 1 warnings; 2 exploded: an event of severity "error", unless its step was skipped
            and the run went on; 3 no step has been logged yet.
        findings: the events by kind, errors first, then by step; none of severity "info".
        steps, first_step, last_step: how many steps were logged, the first and the last of them.
        nonfinite_steps: how many steps had NaN or Inf in loss or gradients.
        left_out: how many of these a loss scaler or the monitor skipped, as far as that is known.
        clipped, clip_known: how many steps were clipped, and of how many it is known whether they were.
        max_norm: the last limit; None if no limit is known.
    """

    status: int = 0
    findings: list[EventGroup] = field(default_factory=list)
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    nonfinite_steps: int = 0
    left_out: int = 0
    clipped: int = 0
    clip_known: int = 0
    max_norm: float | None = None

    @property
    def name(self) -> str:
        """The verdict in a word or two: "healthy", "warnings", "exploded" or "no steps"."""
        return STATUS_NAMES[self.status]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values; an infinite max_norm becomes None."""
        data = {"verdict": self.name, **asdict(self)}
        if self.max_norm is not None and not math.isfinite(self.max_norm):
            data["max_norm"] = None
        return data

    def lines(self) -> list[str]:
        """Return what was found, one sentence a line."""
        found = [str(finding) for finding in self.findings]
        if self.nonfinite_steps:
            text = f"NaN or Inf in {self.nonfinite_steps} of {self.steps} steps"
            found.append(text + (f", {self.left_out} of them skipped" if self.left_out else ""))
        if self.clip_known:
            share = f"{self.clipped} of {self.clip_known} steps ({self.clipped / self.clip_known:.0%})"
            found.append(f"clipped {share}, last at max_norm {self.max_norm:.3g}")
        return found


def verdict_of(run: Run) -> Verdict:
    """Judge a run by its events, by where its loss ended, and by how much was clipped."""
    verdict = Verdict()
    every = [record for records in run.records.values() for record in records]
    if not every:
        verdict.status = NO_STEPS
        return verdict
    steps = {record.step for record in every}
    verdict.steps, verdict.first_step, verdict.last_step = len(steps), min(steps), max(steps)
    bad = {r.step for r in every if not r.is_finite}
    verdict.nonfinite_steps = len(bad)
    verdict.left_out = len(bad & {r.step for r in every if r.applied is False})
    _count_clipped(verdict, run.records[min(run.records)])
    events = [event for record in every for event in record.events if event.severity != "info"]
    events += [e for records in run.records.values() if (e := _exploded_loss(records)) is not None]
    verdict.findings = _grouped(events)
    share = verdict.clipped / max(1, verdict.clip_known)
    if share > _SHARE and verdict.clip_known >= _ENOUGH and _one_limit(run.records[min(run.records)]):
        if all(finding.kind != "clip_share" for finding in verdict.findings):
            text = f"{share:.0%} of the steps were clipped: the limit sets the size of every step"
            verdict.findings.append(EventGroup("clip_share", "warning", 1, verdict.first_step, text))
    severe = {event.step for event in events if event.severity == "error"}
    exploded = severe and not _went_on(every, severe)
    verdict.status = 2 if exploded else 1 if verdict.findings else 0
    return verdict


def _went_on(records: Sequence[Record], severe: set[int]) -> bool:
    """Return whether all processes skipped each of these steps, and a good step came after the last."""
    if any(record.applied is not False for record in records if record.step in severe):
        return False
    after = [record for record in records if record.step > max(severe)]
    return any(record.applied and record.is_finite for record in after)


def _grouped(events: Sequence[Event]) -> list[EventGroup]:
    """Group events by kind. Events of several processes in the same step count once."""
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(event.kind, []).append(event)
    found = []
    for kind, its in kinds.items():
        severity = "error" if any(e.severity == "error" for e in its) else "warning"
        first = min((e for e in its if e.severity == severity), key=lambda e: e.step)
        count = len({e.step for e in its})
        found.append(EventGroup(kind, severity, count, first.step, first.message))
    return sorted(found, key=lambda f: (f.severity != "error", f.step))


def _count_clipped(verdict: Verdict, records: Sequence[Record]) -> None:
    flags = [r.clipped for r in records if r.clipped is not None]
    limits = [r.max_norm for r in records if r.max_norm is not None]
    if limits:
        verdict.clip_known, verdict.clipped, verdict.max_norm = len(flags), sum(flags), limits[-1]


def _one_limit(records: Sequence[Record]) -> bool:
    """Return whether the limit never changed. A moving one is a policy's, which clips a share on purpose."""
    return len({r.max_norm for r in records if r.max_norm is not None}) == 1


def _exploded_loss(records: Sequence[Record]) -> Event | None:
    """Return an event if the loss jumped and stayed, or had fallen and ends no lower than it began.

    A loss that ends in NaN is reported by the event nonfinite instead.
    """
    logged = [(r, r.loss) for r in records if r.loss is not None]
    known = [(r, loss) for r, loss in logged if math.isfinite(loss)]
    if logged[-1:] != known[-1:]:
        return None
    losses = [loss for _, loss in known]
    spikes = (e for r in records for e in r.events if e.kind == "loss_spike")
    for event in spikes:
        after = [loss for r, loss in known if r.step >= event.step][-8:]
        before, high = (_number(event.values.get(key)) for key in ("median", "loss"))
        if len(after) < 3 or before is None or high is None:
            continue
        end = median(after)
        if end > before + (high - before) / 2 and (before <= 0 or end > 1.5 * before):
            text = f"the loss rose from {before:.4g} to {high:.4g} and ended at {end:.4g}"
            return Event("loss_exploded", event.step, "error", text)
    if len(losses) < 3 * _BLOCK or min(losses) <= 0:
        return None
    blocks = [median(losses[i : i + _BLOCK]) for i in range(0, len(losses) - _BLOCK + 1, _BLOCK)]
    start, lowest, end = blocks[0], min(blocks), median(losses[-_BLOCK:])
    if lowest <= 0.8 * start and end >= max(start, 2 * lowest):
        place = blocks.index(lowest) * _BLOCK
        text = f"the loss had fallen from {start:.4g} to {lowest:.4g} and ended at {end:.4g}"
        return Event("loss_exploded", known[place][0].step, "error", text)
    return None


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
