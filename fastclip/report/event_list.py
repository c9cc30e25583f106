# SPDX-License-Identifier: BSD-3-Clause
"""Events and incidents as lists of HTML; what opens is <details>, which keyboards and readers know."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from ..monitor.diagnosis.findings import Finding
from ..monitor.record import SEVERITIES
from .events import MOST_LISTED, MOST_MARKED, IncidentSummary, Told, most_telling, ranks_told
from .series import Axis

SHAPES = {"error": "◆", "warning": "▲", "info": "●"}


def mark_rows(events: Sequence[Told], axis: Axis) -> dict[str, Any]:
    """The events as marks: kinds, and a row (step, kind, severity, number in the list or -1) each."""
    kinds = list(dict.fromkeys(told.event.kind for told in events))
    numbers = {id(told): number for number, told in enumerate(most_telling(events, MOST_LISTED))}
    marked = most_telling(events, MOST_MARKED)
    rows = [
        [told.event.step, kinds.index(told.event.kind), told.weight, numbers.get(id(told), -1)]
        for told in marked
    ]
    return {"kinds": kinds, "severities": SEVERITIES, "rows": rows}


def kind_filters(events: Sequence[Told]) -> str:
    """A button for each kind, with how many there are."""
    counts = Counter(told.event.kind for told in events)
    if len(counts) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="false" data-kind="{escape(kind)}">'
        f"{escape(kind)} <b>{count:,}</b></button>"
        for kind, count in counts.most_common()
    )
    return f'<div class="kinds" role="group" aria-label="Show events of one kind">{buttons}</div>'


def event_list(events: Sequence[Told]) -> str:
    if not events:
        return "<p>No detector has told anything.</p>"
    listed = most_telling(events, MOST_LISTED)
    items = "".join(_event(number, told) for number, told in enumerate(listed))
    rest = len(events) - len(listed)
    note = (
        f"<p>{rest:,} more are marks in the charts; "
        "<code>fastclip diagnose LOG --events</code> lists all.</p>"
        if rest
        else ""
    )
    return f'<ol class="events">{items}</ol>{note}'


def _event(number: int, told: Told) -> str:
    event = told.event
    ranks = f' <span class="rank">{ranks_told(told.ranks)}</span>' if told.ranks != [0] else ""
    return (
        f'<li data-kind="{escape(event.kind)}"><details class="event {event.severity}" id="event-{number}" '
        f'data-step="{event.step}"><summary>'
        f'<span class="shape" aria-hidden="true">{SHAPES[event.severity]}</span> '
        f'<span class="step">step {event.step:,}</span> <b>{escape(event.kind)}</b> '
        f'<span class="severity">{event.severity}</span>{ranks} '
        f'<span class="message">{escape(event.message)}</span>'
        f"</summary>{_explained(told)}</details></li>"
    )


def _explained(told: Told) -> str:
    parts = []
    if len(told.messages) > 1:
        others = "".join(f"<li>{escape(text)}</li>" for text in told.messages[1:6])
        parts.append(f"<h4>Other ranks said</h4><ul>{others}</ul>")
    diagnosis = told.diagnosis
    if diagnosis is None:
        step = told.event.step
        parts.append(f"<p>Not explained here: <code>fastclip diagnose LOG --step {step}</code> does.</p>")
    else:
        if diagnosis.warnings:
            first = diagnosis.warnings[0]
            ahead = told.event.step - first.step
            steps = "1 step" if ahead == 1 else f"{ahead} steps"
            parts.append(f'<p class="warned">The first warning came {steps} before: {escape(str(first))}</p>')
        parts.append("<h4>Where to look first</h4>")
        parts.append(_findings(diagnosis.findings))
    for summary in told.incidents:
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
    rows = "".join(
        f"<tr><td>{summary.step:,}</td><td>{escape(summary.kind)}</td><td>{summary.state}</td>"
        f"<td><code>{escape(_command(summary))}</code></td></tr>"
        for summary in incidents
    )
    return (
        '<section aria-labelledby="incidents"><h2 id="incidents">Incidents</h2>'
        "<p>Steps that were saved whole and can be run again; module:build is the function that builds the "
        'training.</p><div class="wide" tabindex="0" role="region" aria-label="Incidents"><table><thead>'
        "<tr><th>step</th><th>kind</th><th>state</th><th>command</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )
