# SPDX-License-Identifier: BSD-3-Clause
"""Events and incidents as HTML lists, with <details> elements, which keyboards and screen readers know."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from ..monitor.diagnosis.findings import Finding
from ..monitor.record import SEVERITIES
from .events import MOST_LISTED, MOST_MARKED, IncidentSummary, ReportedEvent, format_ranks, most_important
from .series import Axis

SHAPES = {"error": "◆", "warning": "▲", "info": "●"}


def event_marks(events: Sequence[ReportedEvent], axis: Axis) -> dict[str, Any]:
    """Return the events as marks in the charts.

    Returns:
        The kinds, and for each event a row (step, kind, severity, number in the list or -1).
    """
    kinds = list(dict.fromkeys(reported.event.kind for reported in events))
    numbers = {id(reported): number for number, reported in enumerate(most_important(events, MOST_LISTED))}
    marked = most_important(events, MOST_MARKED)
    rows = [
        [
            reported.event.step,
            kinds.index(reported.event.kind),
            reported.severity_level,
            numbers.get(id(reported), -1),
        ]
        for reported in marked
    ]
    return {"kinds": kinds, "severities": SEVERITIES, "rows": rows}


def kind_filters(events: Sequence[ReportedEvent]) -> str:
    """Return a button for each kind of event, with its count."""
    counts = Counter(reported.event.kind for reported in events)
    if len(counts) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="false" data-kind="{escape(kind)}">'
        f"{escape(kind)} <b>{count:,}</b></button>"
        for kind, count in counts.most_common()
    )
    return f'<div class="kinds" role="group" aria-label="Show events of one kind">{buttons}</div>'


def event_list(events: Sequence[ReportedEvent]) -> str:
    """Return the list of events; each opens to show its diagnosis."""
    if not events:
        return "<p>No detector reported anything.</p>"
    listed = most_important(events, MOST_LISTED)
    items = "".join(_event(number, reported) for number, reported in enumerate(listed))
    rest = len(events) - len(listed)
    note = (
        f"<p>{rest:,} more events are only marks in the charts; "
        "<code>fastclip diagnose LOG --events</code> lists all.</p>"
        if rest
        else ""
    )
    return f'<ol class="events">{items}</ol>{note}'


def _event(number: int, reported: ReportedEvent) -> str:
    event = reported.event
    ranks = f' <span class="rank">{format_ranks(reported.ranks)}</span>' if reported.ranks != [0] else ""
    return (
        f'<li data-kind="{escape(event.kind)}"><details class="event {event.severity}" id="event-{number}" '
        f'data-step="{event.step}"><summary>'
        f'<span class="shape" aria-hidden="true">{SHAPES[event.severity]}</span> '
        f'<span class="step">step {event.step:,}</span> <b>{escape(event.kind)}</b> '
        f'<span class="severity">{event.severity}</span>{ranks} '
        f'<span class="message">{escape(event.message)}</span>'
        f"</summary>{_details(reported)}</details></li>"
    )


def _details(reported: ReportedEvent) -> str:
    parts = []
    if len(reported.messages) > 1:
        others = "".join(f"<li>{escape(text)}</li>" for text in reported.messages[1:6])
        parts.append(f"<h4>Other ranks reported</h4><ul>{others}</ul>")
    diagnosis = reported.diagnosis
    if diagnosis is None:
        step = reported.event.step
        parts.append(f"<p>For a diagnosis run <code>fastclip diagnose LOG --step {step}</code>.</p>")
    else:
        if diagnosis.warnings:
            first = diagnosis.warnings[0]
            ahead = reported.event.step - first.step
            steps = "1 step" if ahead == 1 else f"{ahead} steps"
            parts.append(f'<p class="warned">The first warning came {steps} before: {escape(str(first))}</p>')
        parts.append("<h4>Where to look first</h4>")
        parts.append(_findings(diagnosis.findings))
    for summary in reported.incidents:
        parts.append(
            f"<h4>Incident</h4><p>Saved as {escape(summary.path.name)}, {summary.state}. "
            f"Run the step again:</p><pre><code>{escape(_command(summary))}</code></pre>"
        )
    parts.append('<button type="button" class="show">Show in the charts</button>')
    return f'<div class="diagnosis">{"".join(parts)}</div>'


def _command(summary: IncidentSummary) -> str:
    return f"fastclip replay {shlex.quote(str(summary.path))} module:build"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>Nothing in the batches, the learning rate, the loss scale or the modules explains it.</p>"
    groups = ""
    for area, its in groupby(findings, key=lambda finding: finding.area):
        items = "".join(f"<li>{_finding(finding)}</li>" for finding in its)
        groups += f"<li><b>{escape(area)}</b><ul>{items}</ul></li>"
    return f'<ol class="findings">{groups}</ol>'


def _finding(finding: Finding) -> str:
    text = f"step {finding.step:,}, rank {finding.rank}: {escape(finding.text)}"
    if finding.sample_ids:
        more = ", ..." if len(finding.sample_ids) > 16 else ""
        ids = ", ".join(map(str, finding.sample_ids[:16]))
        text += f'<div class="detail">samples {escape(ids)}{more}</div>'
    if finding.parameters:
        text += f'<div class="detail">parameters {escape(", ".join(finding.parameters[:5]))}</div>'
    return text


def incident_table(incidents: Sequence[IncidentSummary]) -> str:
    """Return the table of saved incidents with the commands that replay them."""
    rows = "".join(
        f"<tr><td>{summary.step:,}</td><td>{escape(summary.kind)}</td><td>{summary.state}</td>"
        f"<td><code>{escape(_command(summary))}</code></td></tr>"
        for summary in incidents
    )
    return (
        '<section aria-labelledby="incidents"><h2 id="incidents">Incidents</h2>'
        "<p>Steps that were saved and can be run again; module:build is your function that builds the "
        'training.</p><div class="wide" tabindex="0" role="region" aria-label="Incidents"><table><thead>'
        "<tr><th>step</th><th>kind</th><th>state</th><th>command</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )
