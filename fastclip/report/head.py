# SPDX-License-Identifier: BSD-3-Clause
"""The head of the page: a verdict on the run, and its most important numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..logs import Run, Verdict, verdict_of
from ..monitor.diagnosis.diagnose import worst_event
from ..monitor.diagnosis.recommend import recommend
from ..monitor.record import Record
from .events import ReportedEvent, format_ranks
from .series import WINDOW

SEAT_BELT = "Clipping is a seat belt, not a steering wheel."
_MANY, _TOO_MANY = 0.5, 0.9  # shares of clipped steps
_FAR = 1e11  # seconds since 1970; later times are invalid


@dataclass
class Head:
    """The head of the page.

    Attributes:
        state: "good", "warning", "error" or "empty".
        verdict: how the run went, in a sentence or two.
        suspect: where to look first; empty if no event was diagnosed.
        clipping_warning: that many or too many steps are clipped, and what to do; empty if not.
        tiles: (label, value, note) of the most important numbers.
        advice: the lines of the recommendation of a max_norm.
    """

    state: str
    verdict: str
    suspect: str = ""
    clipping_warning: str = ""
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def page_head(run: Run, events: Sequence[ReportedEvent]) -> Head:
    """Return the head of the page for a run and its events."""
    known = run.records
    if not known:
        return Head("empty", "No step has been logged yet.")
    first = known[min(known)]
    proposal = recommend(first)
    head = Head(*_verdict(verdict_of(run), first, events))
    explained = next(
        (t for t in _most_severe_first(events) if t.diagnosis is not None and t.diagnosis.findings), None
    )
    if explained is not None and explained.diagnosis is not None:
        finding = explained.diagnosis.findings[0]
        head.suspect = f"Look first at {_AREAS.get(finding.area, finding.area)}: {finding}"
    head.clipping_warning = _clipping_warning(first)
    head.tiles = [
        _steps(known),
        *_loss(first),
        *_clip_share(first),
        ("Skipped steps", f"{first[-1].skipped_steps:,}", _skipped(first)),
        _nonfinite(known),
        _events(events),
    ]
    present = "none" if proposal.present is None else f"{proposal.present:g}"
    if proposal.max_norm is not None:
        share = proposal.clipped[proposal.max_norm]
        note = f"now {present}; this one would have clipped {share:.1%} of the last {proposal.steps:,} steps"
        head.tiles.append(("max_norm to try", f"{proposal.max_norm:g}", note))
    elif any(r.total_norm is not None for r in first):
        head.tiles.append(("max_norm", present, "too few steps for a recommendation"))
    head.advice = str(proposal).splitlines() if any(r.total_norm is not None for r in first) else []
    return head


_AREAS = {
    "data": "the data",
    "rate": "the learning rate",
    "amp": "the loss scale",
    "model": "the model",
    "system": "the system",
}


def _most_severe_first(events: Sequence[ReportedEvent]) -> list[ReportedEvent]:
    return sorted(events, key=lambda reported: (-reported.severity_level, reported.event.step))


def _verdict(verdict: Verdict, records: Sequence[Record], events: Sequence[ReportedEvent]) -> tuple[str, str]:
    steps = "1 step" if verdict.steps == 1 else f"{verdict.steps:,} steps"
    if not verdict.findings:
        return "good", f"Healthy: no warning in {steps}."
    first = verdict.findings[0]
    if (worst := worst_event(reported.event for reported in events)) is not None:
        # Among equally severe ones prefer the one that a diagnosis explains.
        alike = (f for f in verdict.findings if f.severity == first.severity)
        first = next((f for f in alike if (f.kind, f.step) == (worst.kind, worst.step)), first)
    exploded = verdict.status == 2
    begin = "The run failed at" if exploded else "Look at"
    text = f"{begin} step {first.step:,}: {_sentence(first.message)}"
    last = records[-1]
    quiet = last.step - max(
        (reported.event.step for reported in events if reported.severity_level > 0), default=first.step
    )
    if not last.is_finite:
        text += " The run ends in NaN or Inf."
    elif quiet >= WINDOW:
        text += f" The last {quiet:,} steps had no warning."
    return "error" if exploded else "warning", text


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def _clipping_warning(records: Sequence[Record]) -> str:
    flags = [r.clipped for r in records if r.clipped is not None]
    if len(flags) < WINDOW // 2:
        return ""
    late, overall = _share(flags[-WINDOW:]), _share(flags)
    recent = f"{late:.0%} of the last {min(WINDOW, len(flags))} steps"
    if late >= _TOO_MANY or overall >= _TOO_MANY:
        steps = recent if late >= _TOO_MANY else f"{overall:.0%} of all steps"
        return (
            f"Too many steps are clipped: {steps} were, so max_norm and not the learning rate sets the size "
            f"of nearly every step. {SEAT_BELT} Check the learning rate, then the data, then the model."
        )
    return f"Many steps are clipped: {recent} were. {SEAT_BELT}" if late >= _MANY else ""


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def _steps(records: Mapping[int, Sequence[Record]]) -> tuple[str, str, str]:
    steps = {record.step for its in records.values() for record in its}
    return "Steps", f"{len(steps):,}", f"{min(steps):,} to {max(steps):,}, {format_ranks(records)}"


def _loss(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    losses = [r.loss for r in records if r.loss is not None]
    if not losses:
        return []
    finite = [loss for loss in losses if math.isfinite(loss)]
    lowest = f"lowest {min(finite):.4g}, first {finite[0]:.4g}" if finite else "never finite"
    return [("Last loss", f"{losses[-1]:.4g}", lowest)]


def _clip_share(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    flags = [r.clipped for r in records if r.clipped is not None]
    if not flags:
        return []
    note = f"of all steps; {_share(flags[-WINDOW:]):.1%} of the last {min(WINDOW, len(flags))}"
    return [("Clipped", f"{_share(flags):.1%}", note)]


def _skipped(records: Sequence[Record]) -> str:
    last = records[-1]
    if not last.skipped_steps:
        return "every step was applied" if last.applied is not None else "as far as the log shows"
    steps = [r.step for r in records if r.applied is False]
    at = f"the last at step {steps[-1]:,}" if steps else "before this log"
    return f"{last.overflows:,} by the loss scaler; {at}" if last.overflows else at


def _nonfinite(records: Mapping[int, Sequence[Record]]) -> tuple[str, str, str]:
    steps = sorted({record.step for its in records.values() for record in its if not record.is_finite})
    note = f"the first {steps[0]:,}, the last {steps[-1]:,}" if steps else "in loss or gradients"
    return "Steps with NaN, Inf", f"{len(steps):,}", note


def _events(events: Sequence[ReportedEvent]) -> tuple[str, str, str]:
    counts = {
        name: sum(reported.event.severity == name for reported in events)
        for name in ("error", "warning", "info")
    }
    parts = [
        f"{count:,} {name}{'s' * (count != 1 and name != 'info')}" for name, count in counts.items() if count
    ]
    return "Events", f"{len(events):,}", ", ".join(parts) or "no detector reported anything"


def time_span(records: Mapping[int, Sequence[Record]]) -> str:
    """Return the first and last time of the records in UTC, or "" if the log has no times."""
    times = [r.time for its in records.values() for r in its if 0 < r.time < _FAR]
    if not times:
        return ""
    begin, end = (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t)) for t in (min(times), max(times)))
    return f"{begin} to {end} UTC"
