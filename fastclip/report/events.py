# SPDX-License-Identifier: BSD-3-Clause
"""Events as the page tells them: each once for all ranks, with its diagnosis and its incident."""

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
_LATER = 20  # steps


@dataclass
class Told:
    """An event, as one or more ranks have seen it in the same step.

    Attributes:
        event: the most severe one of them.
        messages: what they said, each once.
        diagnosis: where to look first, if it is one of those that were explained.
        incidents: saved in that step, or shortly before for what became this event.
    """

    event: Event
    ranks: list[int]
    messages: list[str]
    diagnosis: Diagnosis | None = None
    incidents: list[IncidentSummary] = field(default_factory=list)

    @property
    def weight(self) -> int:
        return SEVERITIES.index(self.event.severity)


def told_events(
    records: Mapping[int, Sequence[Record]], incidents: Sequence[IncidentSummary] = ()
) -> list[Told]:
    """In the order of the steps; explained are the first of each kind, the worst, and those with an incident,
    up to MOST_DIAGNOSED, of which the others are the most severe.
    """
    found: dict[tuple[int, str], Told] = {}
    for its in records.values():
        for record in its:
            for event in record.events:
                told = found.setdefault((event.step, event.kind), Told(event, [], []))
                if SEVERITIES.index(event.severity) > told.weight:
                    told.event = event
                if event.rank not in told.ranks:
                    told.ranks.append(event.rank)
                if event.message not in told.messages:
                    told.messages.append(event.message)
    events = sorted(found.values(), key=lambda told: (told.event.step, -told.weight))
    for summary in incidents:
        if (told_of := _event_of(summary, events)) is not None:
            told_of.incidents.append(summary)
    steps = {rank: [record.step for record in its] for rank, its in records.items()}
    for told in most_telling(events, MOST_DIAGNOSED):
        told.diagnosis = diagnose(_near(records, steps, told.event.step), told.event)
    return events


def _event_of(summary: IncidentSummary, events: Sequence[Told]) -> Told | None:
    """That of the step, best of the same kind; else the next of its kind: what saves an incident decides by
    other rules than a detector, and earlier.
    """
    step, kind = summary.step, summary.kind
    same = [told for told in events if told.event.step == step]
    later = [told for told in events if told.event.kind == kind and 0 < told.event.step - step <= _LATER]
    return next((told for told in same if told.event.kind == kind), None) or next(iter(same + later), None)


def _near(
    records: Mapping[int, Sequence[Record]], steps: Mapping[int, Sequence[int]], step: int
) -> dict[int, list[Record]]:
    """What a diagnosis looks at: the first record of each rank, and those that lead to the event."""
    near = {}
    for rank, its in records.items():
        first, last = bisect_left(steps[rank], step - LOOKBACK), bisect_right(steps[rank], step)
        near[rank] = [*its[: min(first, 1)], *its[first:last]]
    return near


def most_telling(events: Sequence[Told], count: int) -> list[Told]:
    """At most `count`, in the order of the steps."""
    if len(events) <= count:
        return list(events)
    firsts = {told.event.kind: told for told in reversed(events)}
    worst = worst_event((told.event for told in events), least="info")

    def order(numbered: tuple[int, Told]) -> tuple[bool, bool, int, int]:
        place, told = numbered
        is_first = firsts[told.event.kind] is told or told.event is worst
        return (not is_first, not told.incidents, -told.weight, place)

    chosen = sorted(sorted(enumerate(events), key=order)[:count], key=lambda numbered: numbered[0])
    return [told for _, told in chosen]


def ranks_told(ranks: Iterable[int]) -> str:
    """Such as "rank 3" or "ranks 0 to 7, 9"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    return ("rank " if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks ") + ", ".join(parts)


def incidents_near(log: Path | None, directory: Path | None) -> list[IncidentSummary]:
    """The incidents of a directory; where none was named, of the log's own and of one in it called
    "incidents".

    Raises:
        IncidentError: the directory that was named cannot be read.
    """
    if directory is not None:
        return list_incidents(directory, verify=False)
    if log is None or not log.is_dir():
        return []
    places = [place for place in (log, log / "incidents") if place.is_dir()]
    return [summary for place in places for summary in list_incidents(place, verify=False)]
