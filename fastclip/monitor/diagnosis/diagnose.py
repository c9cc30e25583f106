# SPDX-License-Identifier: BSD-3-Clause
"""Diagnosis of an event: where to look first.

The data come first, then learning rate, warm-up and AMP, then the model: the order of how often each is the
cause, and of how fast it can be ruled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..record import SEVERITIES, Event, Record
from .causes import find_causes
from .findings import EventContext, Finding

LOOKBACK = 200  # steps before the event that are examined
# Kinds that show a failure rather than lead to it: the other events explain them.
_SYMPTOMS = ("exception", "nonfinite", "loss_spike", "norm_spike", "norm_growth")


@dataclass
class Diagnosis:
    """Why an event happened.

    Attributes:
        event: the event; None if there was none.
        findings: the likeliest cause first.
        warnings: the events of the run shortly before, in the order of the steps.
    """

    event: Event | None
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """The likeliest cause, a word such as "nonfinite_batch"; "unknown" if there are no findings."""
        return self.findings[0].cause if self.findings else "unknown"

    def __str__(self) -> str:
        if self.event is None:
            return "No event: nothing to explain."
        lines = [f"Event      {self.event}"]
        if self.warnings:
            first = self.warnings[0]
            ahead = self.event.step - first.step
            lines.append(f"Warned     {ahead} step{'s' * (ahead != 1)} before, at {first}")
        if not self.findings:
            lines.append(
                "Nothing in the batches, the learning rate, the loss scale or the modules explains it."
            )
        area = ""
        for finding in self.findings:
            title = "" if finding.area == area else finding.area
            area = finding.area
            lines.append(f"{title:<10} {finding}")
        return "\n".join(lines)


def diagnose(records: Mapping[int, Iterable[Record]], event: Event | None = None) -> Diagnosis:
    """Explain an event by the records before it.

    Args:
        records: by rank, in the order of the steps; ranks may be missing.
        event: the event to explain; by default the first of the most severe ones.

    Returns:
        A :class:`Diagnosis`; its text is ``str(diagnosis)``.
    """
    listed = {rank: list(its) for rank, its in records.items()}
    events = sorted((e for its in listed.values() for r in its for e in r.events), key=lambda e: e.step)
    if event is None:
        event = worst_event(events)
    if event is None:
        return Diagnosis(None)
    first, last = event.step - LOOKBACK, event.step
    near = {rank: [r for r in its if first <= r.step <= last] for rank, its in listed.items()}
    context = EventContext(
        event=event,
        records={rank: its for rank, its in near.items() if its},
        starts={rank: its[0] for rank, its in listed.items() if its},
        events=[e for e in events if first <= e.step <= last],
    )
    warnings = [e for e in context.events if e.severity != "info" and e.step < event.step]
    return Diagnosis(event, find_causes(context), warnings)


def worst_event(events: Iterable[Event], least: str = "warning") -> Event | None:
    """Return the first event with the highest severity, or None if no severity reaches `least`.

    Of several such events in one step it is the symptom, such as a NaN, rather than what led to it.
    """
    order = SEVERITIES.index
    severe = sorted((e for e in events if order(e.severity) >= order(least)), key=lambda e: e.step)
    if not severe:
        return None
    highest = max(order(e.severity) for e in severe)
    candidates = [e for e in severe if order(e.severity) == highest]
    same_step = [e for e in candidates if e.step == candidates[0].step]
    return next((e for kind in _SYMPTOMS for e in same_step if e.kind == kind), same_step[0])
