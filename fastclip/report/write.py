# SPDX-License-Identifier: BSD-3-Clause
"""Writing of the report: from a log or records to the file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..logs import Run, read_run
from ..logs.reader import no_garbage_collection
from ..monitor.record import Record
from .charts import all_charts
from .events import collect_events, find_incidents, format_ranks
from .head import page_head, time_span
from .heat import all_heat_maps
from .page import render_page
from .series import Axis

Source = str | os.PathLike[str] | Run | Mapping[int, Sequence[Record]]


def write_report(
    run: Source,
    output: str | os.PathLike[str],
    *,
    log: str | os.PathLike[str] | None = None,
    incidents: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a run as one self-contained HTML page: it needs no network and no other file.

    An existing file is replaced once the new one is complete.

    Args:
        run: the path of a log, see :func:`fastclip.logs.read_run`; the run that it returns; or records by
            rank, in the order of the steps, such as ``{0: monitor.records}``. The page of a run without a
            step says so.
        output: the file to write.
        log: where the run or the records come from; it is shown on the page, and a directory is searched for
            incidents. If `run` is a path, `log` is that path.
        incidents: the directory of the run's incidents; by default those in the log's directory.

    Returns:
        The path of the file.

    Raises:
        LogError: the log cannot be read.
        ValueError: `incidents` cannot be read.
        ImportError: the log consists of event files, and tensorboard is not installed.
        OSError: the file cannot be written; an existing file is left as it was.
    """
    return write_atomically(Path(output), report_html(run, log=log, incidents=incidents))


def report_html(
    run: Source,
    *,
    log: str | os.PathLike[str] | None = None,
    incidents: str | os.PathLike[str] | None = None,
) -> str:
    """Return the page as text; see :func:`write_report`."""
    if isinstance(run, (str, os.PathLike)):
        log = run
        run = read_run(run)
    elif not isinstance(run, Run):
        run = Run({rank: list(its) for rank, its in run.items()}, "")
    with no_garbage_collection():
        return _page(run, log, incidents)


def _page(run: Run, log: str | os.PathLike[str] | None, incidents: str | os.PathLike[str] | None) -> str:
    known = {rank: its for rank, its in sorted(run.records.items()) if its}
    run = replace(run, records=known)
    place = None if log is None else Path(log)
    saved = find_incidents(place, None if incidents is None else Path(incidents))
    events = collect_events(known, saved)
    axis = Axis(record.step for its in known.values() for record in its)
    charts = all_charts(known, axis) if known else []
    maps = all_heat_maps(known[min(known)], axis) if known else []
    title = place.resolve().name if place is not None else "Training"
    return render_page(title, _about(run, log), page_head(run, events), axis, charts, maps, events, saved)


def _about(run: Run, log: str | os.PathLike[str] | None) -> list[tuple[str, str]]:
    """Return (label, text) of general information on the run."""
    header = next(iter(run.headers.values()), {})
    columns = header.get("columns")
    read_as = "" if not isinstance(columns, dict) else ", ".join(f"{k} from {v}" for k, v in columns.items())
    events = "inferred from the log by the default detectors" if run.inferred else ""
    about = [
        ("Log", "" if log is None else str(log)),
        ("Format", run.source),
        ("torch", str(header.get("torch", ""))),
        ("Ranks", format_ranks(run.records) if run.records else ""),
        ("Time", time_span(run.records)),
        ("Columns", read_as),
        ("Events", events),
        *(("Note", text) for text in run.warnings),
    ]
    return [(label, text) for label, text in about if text]


def write_atomically(path: Path, text: str) -> Path:
    """Write a file completely or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file():  # a pipe or a device is written to; a directory raises
        path.write_text(text, encoding="utf-8")
        return path
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # The permissions of a new file; a temporary one is for its owner only.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
