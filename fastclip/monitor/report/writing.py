# SPDX-License-Identifier: BSD-3-Clause
"""From records to the file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..record import Record
from .charts import all_charts
from .head import head_of, when
from .heat import all_heat_maps
from .numbers import Axis
from .page import page_of
from .told import incidents_near, ranks_told, told_events


def write_report(
    records: Mapping[int, Sequence[Record]],
    output: str | os.PathLike[str],
    *,
    log: str | os.PathLike[str] | None = None,
    incidents: str | os.PathLike[str] | None = None,
    source: str = "",
    warnings: Sequence[str] = (),
) -> Path:
    """Write a run as one HTML page that needs nothing else: no network, no other file.

    A file that is there is replaced, when the new one is complete.

    Args:
        records: of each rank, in the order of the steps, such as ``{0: monitor.records}``. A rank without
            records, and a run without ranks, has a page that says so.
        output: the file to write.
        log: where the records come from, as the page is to tell; a directory is also looked through for
            incidents.
        incidents: directory of the run's incidents; None for those in the log.
        source: what wrote the log, as the page is to tell.
        warnings: sentences on what was left out of the log, which the page shows.

    Returns:
        The path of the file.

    Raises:
        IncidentError: `incidents` cannot be read.
        OSError: the file cannot be written; what was there before is still there.
    """
    text = report_html(records, log=log, incidents=incidents, source=source, warnings=warnings)
    return write_whole(Path(output), text)


def report_html(
    records: Mapping[int, Sequence[Record]],
    *,
    log: str | os.PathLike[str] | None = None,
    incidents: str | os.PathLike[str] | None = None,
    source: str = "",
    warnings: Sequence[str] = (),
) -> str:
    """The page as text: see :func:`write_report`."""
    known = {rank: list(its) for rank, its in sorted(records.items()) if its}
    place = None if log is None else Path(log)
    saved = incidents_near(place, None if incidents is None else Path(incidents))
    events = told_events(known, saved)
    axis = Axis(record.step for its in known.values() for record in its)
    charts = all_charts(known, axis) if known else []
    maps = all_heat_maps(known[min(known)], axis) if known else []
    title = place.resolve().name if place is not None else "Training"
    about = [
        ("Log", "" if log is None else str(log)),
        ("Written by", source),
        ("Ranks", ranks_told(known) if known else ""),
        ("Time", when(known)),
        *(("Note", text) for text in warnings),
    ]
    about = [(label, text) for label, text in about if text]
    return page_of(title, about, head_of(known, events), axis, charts, maps, events, saved)


def write_whole(path: Path, text: str) -> Path:
    """Write a file as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():  # a pipe or a device is not replaced; a directory raises
        path.write_text(text, encoding="utf-8")
        return path
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # As any new file, not for its owner alone as a temporary one.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
