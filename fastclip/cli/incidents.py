# SPDX-License-Identifier: BSD-3-Clause
"""List the incidents that a monitor saved, and whether they are whole.

Exit status: 0 if none is damaged, 1 if one is, 2 if the directory cannot be read.
"""

from __future__ import annotations

import argparse
import sys
import time

from ..monitor.incidents.incident import IncidentSummary, list_incidents

_HEADINGS = ("step", "kind", "severity", "ranks", "size", "state", "age", "name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="directory of the incidents of a monitor")
    parser.add_argument(
        "--quick", action="store_true", help="compare only the sizes of files, not their hashes"
    )


def run(options: argparse.Namespace) -> int:
    found = list_incidents(options.directory, verify=not options.quick)
    if not found:
        print(f"fastclip: no incidents in {options.directory}", file=sys.stderr)
        return 0
    rows = [_HEADINGS, *map(_row, found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    damaged = [summary for summary in found if summary.damage is not None]
    for summary in damaged:
        print(f"fastclip: {summary.damage}", file=sys.stderr)
    return 1 if damaged else 0


def _row(summary: IncidentSummary) -> tuple[str, ...]:
    incident = summary.incident
    severity, ranks, age = "?", "?", "?"
    if incident is not None:
        severity = str(incident.manifest.get("severity", "?"))
        ranks = f"{len(incident.ranks)}/{incident.world_size}"
        age = shown_age(time.time() - incident.manifest["time"])
    size = shown_size(summary.bytes)
    return (str(summary.step), summary.kind, severity, ranks, size, summary.state, age, summary.path.name)


def shown_size(count: float) -> str:
    """Return a number of bytes as text, such as "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shown_age(seconds: float) -> str:
    """Return an age in the largest unit that gives at least 2; it may be negative if clocks differ."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
