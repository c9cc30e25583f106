# SPDX-License-Identifier: BSD-3-Clause
"""The events of a report: each once for all ranks, with its diagnosis and its incidents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..monitor.diagnosis.diagnose import LOOKBACK, Diagnosis, diagnose, worst_event
from ..monitor.incidents.incident import IncidentSummary, list_incidents
from ..monitor.record import SEVERITIES, Event, Record

MOST_LISTED = 300
MOST_DIAGNOSED = 100
MOST_MARKED = 20_000
_LATER = 20  # steps by which an event may follow the incident that was saved for it


@dataclass
class ReportedEvent:
    """An event that one or more ranks reported in the same step.

    Attributes:
        event: the most severe of the ranks' events.
        ranks: the ranks that reported it.
        messages: their messages, each once.
        diagnosis: where to look first; None if this event was not diagnosed.
        incidents: the incidents saved in that step, or shortly before for what became this event.
    """

    event: Event
    ranks: list[int]
    messages: list[str]
    diagnosis: Diagnosis | None = None
    incidents: list[IncidentSummary] = field(default_factory=list)

    @property
    def severity_level(self) -> int:
        """The severity as a number: 0 info, 1 warning, 2 error."""
        return SEVERITIES.index(self.event.severity)


def collect_events(
    records: Mapping[int, Sequence[Record]], incidents: Sequence[IncidentSummary] = ()
) -> list[ReportedEvent]:
    """Return the events of a run in the order of the steps, the most important ones diagnosed.

    At most MOST_DIAGNOSED are: see :func:`most_important`.
    """
    found: dict[tuple[int, str], ReportedEvent] = {}
    for its in records.values():
        for record in its:
            for event in record.events:
                reported = found.setdefault((event.step, event.kind), ReportedEvent(event, [], []))
                if SEVERITIES.index(event.severity) > reported.severity_level:
                    reported.event = event
                if event.rank not in reported.ranks:
                    reported.ranks.append(event.rank)
                if event.message not in reported.messages:
                    reported.messages.append(event.message)
    events = sorted(found.values(), key=lambda reported: (reported.event.step, -reported.severity_level))
    for summary in incidents:
        if (owner := _event_of(summary, events)) is not None:
            owner.incidents.append(summary)
    steps = {rank: [record.step for record in its] for rank, its in records.items()}
    for reported in most_important(events, MOST_DIAGNOSED):
        reported.diagnosis = diagnose(_near(records, steps, reported.event.step), reported.event)
    return events


def _event_of(summary: IncidentSummary, events: Sequence[ReportedEvent]) -> ReportedEvent | None:
    """Return the event of the incident's step, preferably of its kind, else the next of its kind.

    The rules that save an incident are other than a detector's and decide earlier.
    """
    step, kind = summary.step, summary.kind
    same = [reported for reported in events if reported.event.step == step]
    later = [
        reported
        for reported in events
        if reported.event.kind == kind and 0 < reported.event.step - step <= _LATER
    ]
    return next((reported for reported in same if reported.event.kind == kind), None) or next(
        iter(same + later), None
    )


def _near(
    records: Mapping[int, Sequence[Record]], steps: Mapping[int, Sequence[int]], step: int
) -> dict[int, list[Record]]:
    """Return what a diagnosis examines: the first record of each rank, and those that lead to the event."""
    near = {}
    for rank, its in records.items():
        first, last = bisect_left(steps[rank], step - LOOKBACK), bisect_right(steps[rank], step)
        near[rank] = [*its[: min(first, 1)], *its[first:last]]
    return near


def most_important(events: Sequence[ReportedEvent], count: int) -> list[ReportedEvent]:
    """Return at most `count` events, in the order of the steps.

    The first of each kind and the worst come first, then those with an incident, then the most severe.
    """
    if len(events) <= count:
        return list(events)
    firsts = {reported.event.kind: reported for reported in reversed(events)}
    worst = worst_event((reported.event for reported in events), least="info")

    def order(numbered: tuple[int, ReportedEvent]) -> tuple[bool, bool, int, int]:
        place, reported = numbered
        is_first = firsts[reported.event.kind] is reported or reported.event is worst
        return (not is_first, not reported.incidents, -reported.severity_level, place)

    chosen = sorted(sorted(enumerate(events), key=order)[:count], key=lambda numbered: numbered[0])
    return [reported for _, reported in chosen]


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0 to 7, 9"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    return ("rank " if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks ") + ", ".join(parts)


def find_incidents(log: Path | None, directory: Path | None) -> list[IncidentSummary]:
    """Return the incidents in a directory, by default in the log's directory and "incidents" in it.

    Raises:
        IncidentError: the given directory cannot be read.
    """
    if directory is not None:
        return list_incidents(directory, verify=False)
    if log is None or not log.is_dir():
        return []
    places = [place for place in (log, log / "incidents") if place.is_dir()]
    return [summary for place in places for summary in list_incidents(place, verify=False)]
