# SPDX-License-Identifier: BSD-3-Clause
"""From records to the file."""

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
from .events import incidents_near, ranks_told, told_events
from .head import head_of, when
from .heat import all_heat_maps
from .page import page_of
from .series import Axis

Source = str | os.PathLike[str] | Run | Mapping[int, Sequence[Record]]


def write_report(
    run: Source,
    output: str | os.PathLike[str],
    *,
    log: str | os.PathLike[str] | None = None,
    incidents: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a run as one HTML page that needs nothing else: no network, no other file.

    A file that is there is replaced, when the new one is complete.

    Args:
        run: the path of a log, see :func:`fastclip.logs.read_run`; what that returns; or records by
            rank, in the order of the steps, such as ``{0: monitor.records}``. A run without a step has a
            page that says so.
        output: the file to write.
        log: where a run or records come from, as the page is to tell; a directory is also looked through for
            incidents. A path given as `run` is this path.
        incidents: directory of the run's incidents; None for those in the log.

    Returns:
        The path of the file.

    Raises:
        LogError: the log cannot be read.
        ValueError: `incidents` cannot be read.
        ImportError: the log is TensorBoard's, and tensorboard is not installed.
        OSError: the file cannot be written; what was there before is still there.
    """
    return write_whole(Path(output), report_html(run, log=log, incidents=incidents))


def report_html(
    run: Source,
    *,
    log: str | os.PathLike[str] | None = None,
    incidents: str | os.PathLike[str] | None = None,
) -> str:
    """The page as text: see :func:`write_report`."""
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
    saved = incidents_near(place, None if incidents is None else Path(incidents))
    events = told_events(known, saved)
    axis = Axis(record.step for its in known.values() for record in its)
    charts = all_charts(known, axis) if known else []
    maps = all_heat_maps(known[min(known)], axis) if known else []
    title = place.resolve().name if place is not None else "Training"
    return page_of(title, _about(run, log), head_of(run, events), axis, charts, maps, events, saved)


def _about(run: Run, log: str | os.PathLike[str] | None) -> list[tuple[str, str]]:
    """(label, text) of what is known of the run, without its numbers."""
    header = next(iter(run.headers.values()), {})
    columns = header.get("columns")
    read_as = "" if not isinstance(columns, dict) else ", ".join(f"{k} from {v}" for k, v in columns.items())
    judged = "found in the log afterwards, by the default detectors" if run.inferred else ""
    about = [
        ("Log", "" if log is None else str(log)),
        ("Kind", run.source),
        ("torch", str(header.get("torch", ""))),
        ("Ranks", ranks_told(run.records) if run.records else ""),
        ("Time", when(run.records)),
        ("Columns", read_as),
        ("Events", judged),
        *(("Note", text) for text in run.warnings),
    ]
    return [(label, text) for label, text in about if text]


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
