# SPDX-License-Identifier: BSD-3-Clause
"""Rendering of the page: HTML with all numbers, scripts and styles in it, so that it is self-contained."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .charts import Chart
from .encoding import BUDGET, encode_places, encode_series, script_json
from .event_list import SHAPES, event_list, event_marks, incident_table, kind_filters
from .events import IncidentSummary, ReportedEvent
from .head import Head
from .heat import HeatMap
from .series import Axis

UPLOT = "uPlot-1.6.32"
SCRIPTS = (
    "data",
    "theme",
    "ticks",
    "view",
    "marks",
    "legend",
    "chart",
    "canvas",
    "timeline",
    "heat",
    "events",
    "main",
)
_PAGE = files(__package__) / "assets"


def render_page(
    title: str,
    about: Sequence[tuple[str, str]],
    head: Head,
    axis: Axis,
    charts: Sequence[Chart],
    maps: Sequence[HeatMap],
    events: Sequence[ReportedEvent],
    incidents: Sequence[IncidentSummary],
) -> str:
    """Return the HTML document.

    Args:
        title: the name of the run.
        about: (label, text) of general information on the run.
        head: the head of the page.
        axis: the axis of the steps that all charts share.
        charts, maps, events, incidents: what to show, in this order.
    """
    styles = [_asset(f"vendor/{UPLOT}.min.css"), _asset("report.css")]
    scripts = [_asset(f"vendor/{UPLOT}.min.js"), *(_asset(f"scripts/{name}.js") for name in SCRIPTS)]
    has_steps = len(axis) > 0
    data = page_data(axis, charts, maps, events) if has_steps else {}
    return Template(_asset("page.html")).substitute(
        policy=_policy(scripts if has_steps else [], styles),
        title=escape(title),
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        head=_head(head, about),
        timeline=_timeline(events, axis) if events and has_steps else "",
        toolbar=_asset("toolbar.html") if has_steps else "",
        charts="\n".join(
            [*(_figure(c, axis) for c in charts), *(_heat_figure(m, events, axis) for m in maps)]
        ),
        events=kind_filters(events) + event_list(events) if has_steps else "",
        incidents=incident_table(incidents) if incidents else "",
        licence=escape(_asset("vendor/uPlot-LICENSE.txt").strip()),
        uplot=UPLOT.replace("-", " "),
        data=script_json(data),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts) if has_steps else "",
    )


def _asset(name: str) -> str:
    return _PAGE.joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return the content security policy: nothing may be loaded, and only the page's own scripts may run."""

    def hashes(texts: Sequence[str]) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def page_data(
    axis: Axis, charts: Sequence[Chart], maps: Sequence[HeatMap], events: Sequence[ReportedEvent]
) -> dict[str, Any]:
    """Return the numbers of the page as JSON values, lines thinned to fit BUDGET."""
    # Every line gets the same share of the budget; short ones leave the rest of theirs to the others.
    lengths = sorted(len(series.at) for chart in charts for series in chart.series)
    budget, left = 0, BUDGET
    for place, length in enumerate(lengths):
        budget = left // (len(lengths) - place)
        left -= min(length, budget)
    return {
        "steps": encode_places(axis.steps),
        "charts": [
            {
                "key": chart.key,
                "scale": chart.scale,
                "kinds": chart.kinds,
                "lines": chart.lines,
                "series": [encode_series(series, budget) for series in chart.series],
            }
            for chart in charts
        ],
        "heats": [{**found.to_json(), "kinds": found.kinds} for found in maps],
        "events": event_marks(events, axis),
    }


def _head(head: Head, about: Sequence[tuple[str, str]]) -> str:
    shape = {"good": "✓", "empty": "○"}.get(head.state) or SHAPES[head.state]
    parts = [
        f'<section class="verdict {head.state}" aria-label="Verdict">'
        f'<p><span class="shape" aria-hidden="true">{shape}</span> {escape(head.verdict)}</p>'
    ]
    if head.suspect:
        parts.append(f'<p class="suspect">{escape(head.suspect)}</p>')
    if head.clipping_warning:
        parts.append(f'<p class="clipping">{escape(head.clipping_warning)}</p>')
    parts.append("</section>")
    if head.tiles:
        tiles = "".join(
            f'<div class="tile"><dt>{escape(label)}</dt>'
            f"<dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
            for label, value, note in head.tiles
        )
        parts.append(f'<dl class="tiles">{tiles}</dl>')
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in about)
    parts.append(f'<dl class="about">{rows}</dl>')
    if head.advice:
        lines = escape("\n".join(head.advice))
        parts.append(f"<details><summary>How max_norm is chosen</summary><pre>{lines}</pre></details>")
    return "\n".join(parts)


def _timeline(events: Sequence[ReportedEvent], axis: Axis) -> str:
    kinds = dict.fromkeys(reported.event.kind for reported in events)
    label = f"Events by step: {len(events)} of {len(kinds)} kinds, listed below: {', '.join(kinds)}."
    return (
        '<figure class="chart" id="chart-timeline"><figcaption><h3>Events</h3></figcaption>'
        f'<div class="plot" role="img" tabindex="0" aria-label="{escape(label)}"></div></figure>'
    )


def _figure(chart: Chart, axis: Axis) -> str:
    toggle = '<button type="button" class="scale" aria-pressed="false">log</button>'
    toggle = toggle if chart.scale in ("linear", "log") else ""
    unit = f" <small>{escape(chart.unit)}</small>" if chart.unit else ""
    return (
        f'<figure class="chart" id="chart-{chart.key}"><figcaption><h3>{escape(chart.title)}{unit}</h3>'
        f'{toggle}<div class="legend"></div></figcaption>'
        f'<div class="plot" role="img" tabindex="0" aria-label="{escape(chart.description(axis))}"></div>'
        f'<p class="help">{escape(chart.help_text)}</p></figure>'
    )


def _heat_figure(found: HeatMap, events: Sequence[ReportedEvent], axis: Axis) -> str:
    more = f" Only the {len(found.rows)} rows with the largest numbers are shown; {found.omitted:,} are not."
    help_text = found.help_text + (more if found.omitted else "")
    return (
        f'<figure class="chart heat" id="chart-{found.key}"><figcaption><h3>{escape(found.title)}</h3>'
        '<div class="legend"></div></figcaption>'
        f'<div class="plot" role="img" tabindex="0" aria-label="{escape(found.description())}"></div>'
        f'<p class="help">{escape(help_text)}</p></figure>'
    )
