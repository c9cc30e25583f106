# SPDX-License-Identifier: BSD-3-Clause
"""Reads a logged run, whatever wrote it: it is recognised by what it holds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..monitor.record import Record
from ..monitor.sinks import LogError
from ..monitor.sinks.jsonl import VERSION_KEY, is_log_name, log_files
from . import tables, tensorboard, trainer_state
from .fastclip_log import read_own
from .inferred_events import judge, stride_of
from .text_files import folders_below, head_of, names_of

_TABLES = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz")


@dataclass
class Run:
    """A run as it was logged.

    Attributes:
        records: by rank, in the order of the steps; logs of others than fastclip are of rank 0.
        source: what wrote it, such as "fastclip log", "Transformers trainer_state.json", "TensorBoard event
            files", "CSV", "JSON lines".
        headers: by rank, what the log tells of the whole run: the header of fastclip's log; some numbers of
            a trainer_state.json; which column or tag was taken for which field.
        warnings: sentences on what was left out or assumed.
        judged: whether the events were found afterwards, by the detectors of :func:`judge.judge`; otherwise
            they are those that the monitor told.
        stride: how many steps lie between a record and the next, in the median.
    """

    records: dict[int, list[Record]]
    source: str
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    judged: bool = False
    stride: int = 1


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the log of a run.

    Args:
        path: a file, or the directory that holds it: fastclip's own log; a trainer_state.json of
            Transformers, or an output directory with checkpoints; event files of TensorBoard; CSV, JSON
            lines or a JSON array, also compressed with gzip, with usual names of columns; lines of llm.c.

    Raises:
        LogError: missing, unreadable, none of these, damaged other than at its end, or several runs; the
            message is one line and says which file, where possible which line, and why.
        ImportError: event files, and tensorboard is not installed.
    """
    path = Path(path)
    with no_garbage_collection():
        try:
            run = _read_directory(path) if path.is_dir() else _read_file(path)
        except OSError as error:
            raise LogError(f"{error.filename or path}: {error.strerror or error}") from None
        if run.judged:
            for records in run.records.values():
                judge(records, counted="nan_count" in run.headers[0].get("columns", {}))
                if run.source.endswith(trainer_state.NAME):
                    trainer_state.tell_zeros(records)
    first = run.records[min(run.records)] if run.records else []
    run.stride = stride_of(first)
    if run.stride > 1 and run.judged:
        run.warnings.append(
            f"{path}: about {run.stride} steps lie between two records: events are those of the records"
        )
    return run


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While 100,000 records are made Python would look through all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_directory(path: Path) -> Run:
    if log_files(path):
        return _own(path)
    if (state := trainer_state.state_file(path)) is not None:
        run = _read_file(state)
        if state.parent != path:
            run.warnings.append(f"{path}: the newest checkpoint was read, {state.parent.name}")
        return run
    if files := tensorboard.event_files(path):
        return _events(files, [])
    found = sorted(p for p in path.iterdir() if p.name.lower().endswith(_TABLES) and p.is_file())
    if len(found) > 1:
        raise LogError(f"{path}: expected one log, but got several: {names_of(found, path)}")
    if found:
        return _read_file(found[0])
    return _below(path)


def _below(path: Path) -> Run:
    """The only run in the subdirectories."""
    runs = [folder for folder in folders_below(path) if _holds_run(folder)]
    if len(runs) > 1:
        raise LogError(f"{path}: expected one run, but got several: {names_of(runs, path)}")
    if not runs:
        raise LogError(
            f"{path}: expected a directory with a file such as trainer_state.json, metrics.csv, "
            "events.out.tfevents... or rank00000.jsonl, but found none"
        )
    run = _read_directory(runs[0])
    run.warnings.append(f"{path}: the run in {names_of(runs, path)} was read")
    return run


def _holds_run(folder: Path) -> bool:
    if log_files(folder) or (folder / "metrics.csv").is_file():
        return True
    return tensorboard.is_of_training(folder)


def _read_file(path: Path) -> Run:
    if is_log_name(path.name):
        return _own(path)
    head = head_of(path)
    if tensorboard.is_event_file(head):
        return _events([path], [])
    if b"\0" in head:
        raise LogError(f"{path}: expected a log, but got a binary file")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        return _array(path)
    if start.startswith(b"{"):
        return _json(path, start)
    warnings: list[str] = []
    first = next((line for line in start.splitlines() if not line.startswith(b"#")), b"")
    if tables.is_pairs(first.decode("utf-8", "replace")):
        return _table(path, tables.read_pairs(path, warnings), "name:number lines", warnings)
    return _table(path, tables.read_csv(path, warnings), "CSV", warnings)


def _json(path: Path, start: bytes) -> Run:
    """One JSON value over several lines, or one a line."""
    first = start.partition(b"\n")[0]
    if f'"{VERSION_KEY}"'.encode() in first[:200]:
        return _own(path)
    several = first.rstrip().endswith(b"}") and b'"log_history"' not in first
    if several or (b"\n" not in start and b'"log_history"' not in start):
        warnings: list[str] = []
        return _table(path, tables.read_json_lines(path, warnings), "JSON lines", warnings)
    value = tables.parsed(path)
    if not isinstance(value, dict) or "log_history" not in value:
        raise LogError(f"{path}: expected JSON lines, or an object with log_history, but got another object")
    warnings = []
    records, header = trainer_state.records_of(path, value, warnings)
    return Run({0: records}, f"Transformers {trainer_state.NAME}", {0: header}, warnings, judged=True)


def _array(path: Path) -> Run:
    return _table(path, tables.read_json_array(path, tables.parsed(path)), "JSON array", [])


def _own(path: Path) -> Run:
    records, log = read_own(path)
    return Run(records, "fastclip log", dict(log.headers), log.warnings)


def _table(path: Path, table: tables.Table, source: str, warnings: list[str]) -> Run:
    records, columns = tables.records_of(path, table, warnings)
    return Run({0: records}, source, {0: {"columns": columns}}, warnings, judged=True)


def _events(files: list[Path], warnings: list[str]) -> Run:
    records, columns, told = tensorboard.read_event_files(files, warnings)
    return Run({0: records}, "TensorBoard event files", {0: {"columns": columns}}, warnings, judged=not told)
