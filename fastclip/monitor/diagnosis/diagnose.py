# SPDX-License-Identifier: BSD-3-Clause
"""From an event to where to look first: the data, then learning rate, warm-up and AMP, then the model.

The order is that of how often each is the reason, and of how fast it can be ruled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..record import SEVERITIES, Event, Record
from .causes import Case, Finding, findings_of

_REACH = 200  # steps before the event that are looked at
# What is seen of a failure, rather than what leads to it, is explained by the rest.
_SYMPTOMS = ("exception", "nonfinite", "loss_spike", "norm_spike", "norm_growth")


@dataclass
class Diagnosis:
    """Why an event came.

    Attributes:
        event: the event; None if there was none.
        findings: the likeliest cause first.
        warnings: earlier events of the same run, the first first.
    """

    event: Event | None
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """The first finding's cause: a word such as "nonfinite_batch" or "learning_rate"; "unknown"
        without.
        """
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
        records: of each rank that is known, in the order of the steps.
        event: by default :func:`worst_event` of all.

    Returns:
        A :class:`Diagnosis`; its text is ``str(diagnosis)``.
    """
    listed = {rank: list(its) for rank, its in records.items()}
    events = sorted((e for its in listed.values() for r in its for e in r.events), key=lambda e: e.step)
    if event is None:
        event = worst_event(events)
    if event is None:
        return Diagnosis(None)
    first, last = event.step - _REACH, event.step
    near = {rank: [r for r in its if first <= r.step <= last] for rank, its in listed.items()}
    case = Case(
        event=event,
        records={rank: its for rank, its in near.items() if its},
        starts={rank: its[0] for rank, its in listed.items() if its},
        events=[e for e in events if first <= e.step <= last],
    )
    warnings = [e for e in case.events if e.severity != "info" and e.step < event.step]
    return Diagnosis(event, findings_of(case), warnings)


def worst_event(events: Iterable[Event], least: str = "warning") -> Event | None:
    """The first of those with the highest severity, if that is `least` or more; of several in its step, the
    symptom.
    """
    order = SEVERITIES.index
    told = sorted((e for e in events if order(e.severity) >= order(least)), key=lambda e: e.step)
    if not told:
        return None
    highest = max(order(e.severity) for e in told)
    candidates = [e for e in told if order(e.severity) == highest]
    same_step = [e for e in candidates if e.step == candidates[0].step]
    return next((e for kind in _SYMPTOMS for e in same_step if e.kind == kind), same_step[0])
