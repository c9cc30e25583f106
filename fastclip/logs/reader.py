# SPDX-License-Identifier: BSD-3-Clause
"""Reader of the log of a run, whose format is recognised by its content."""

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
from .fastclip_log import read_fastclip_log
from .inferred_events import infer_events, stride_of
from .text_files import read_head, relative_names, subdirectories

_TABLES = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz")


@dataclass
class Run:
    """A run as it was logged.

    Attributes:
        records: by rank, in the order of the steps; logs not written by fastclip are read as rank 0.
        source: the format, such as "fastclip log", "Transformers trainer_state.json", "TensorBoard event
            files", "CSV", "JSON lines".
        headers: by rank, what the log says about the whole run: the header of fastclip's log; some numbers of
            a trainer_state.json; which column or tag was read as which field.
        warnings: sentences on what was ignored or assumed.
        inferred: whether the events were inferred from the log by the detectors; otherwise they are those
            that the monitor reported.
        stride: how many steps apart the records are, in the median.
    """

    records: dict[int, list[Record]]
    source: str
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    inferred: bool = False
    stride: int = 1


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the log of a run.

    Args:
        path: a file, or the directory that holds it: fastclip's own log; a trainer_state.json of
            Transformers, or an output directory with checkpoints; event files of TensorBoard; CSV, JSON
            lines or a JSON array with common column names; lines of llm.c. Text may be compressed with gzip.

    Raises:
        LogError: the log is missing, unreadable, none of these, damaged other than at its end, or holds
            several runs. The message is one line and names the file, the line if possible, and the reason.
        ImportError: the log consists of event files, and tensorboard is not installed.
    """
    path = Path(path)
    with no_garbage_collection():
        try:
            run = _read_directory(path) if path.is_dir() else _read_file(path)
        except OSError as error:
            raise LogError(f"{error.filename or path}: {error.strerror or error}") from None
        if run.inferred:
            for records in run.records.values():
                infer_events(records, counted="nan_count" in run.headers[0].get("columns", {}))
                if run.source.endswith(trainer_state.NAME):
                    trainer_state.add_zero_loss_event(records)
    first = run.records[min(run.records)] if run.records else []
    run.stride = stride_of(first)
    if run.stride > 1 and run.inferred:
        run.warnings.append(
            f"{path}: records are about {run.stride} steps apart: events between them cannot be seen"
        )
    return run


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which would traverse 100,000 new records again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_directory(path: Path) -> Run:
    if log_files(path):
        return _fastclip_run(path)
    if (state := trainer_state.state_file(path)) is not None:
        run = _read_file(state)
        if state.parent != path:
            run.warnings.append(f"{path}: read the newest checkpoint, {state.parent.name}")
        return run
    if files := tensorboard.event_files(path):
        return _event_file_run(files)
    found = sorted(p for p in path.iterdir() if p.name.lower().endswith(_TABLES) and p.is_file())
    if len(found) > 1:
        raise LogError(f"{path}: expected one log, but got several: {relative_names(found, path)}")
    if found:
        return _read_file(found[0])
    return _read_subdirectory(path)


def _read_subdirectory(path: Path) -> Run:
    """Read the only run in the subdirectories."""
    runs = [folder for folder in subdirectories(path) if _holds_run(folder)]
    if len(runs) > 1:
        raise LogError(f"{path}: expected one run, but got several: {relative_names(runs, path)}")
    if not runs:
        raise LogError(
            f"{path}: expected a directory with a file such as trainer_state.json, metrics.csv, "
            "events.out.tfevents... or rank00000.jsonl, but found none"
        )
    run = _read_directory(runs[0])
    run.warnings.append(f"{path}: read the run in {relative_names(runs, path)}")
    return run


def _holds_run(folder: Path) -> bool:
    if log_files(folder) or (folder / "metrics.csv").is_file():
        return True
    return tensorboard.holds_training(folder)


def _read_file(path: Path) -> Run:
    if is_log_name(path.name):
        return _fastclip_run(path)
    head = read_head(path)
    if tensorboard.is_event_file(head):
        return _event_file_run([path])
    if b"\0" in head:
        raise LogError(f"{path}: expected a log, but got a binary file")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        return _table_run(path, tables.read_json_array(path), "JSON array", [])
    if start.startswith(b"{"):
        return _json_run(path, start)
    warnings: list[str] = []
    first = next((line for line in start.splitlines() if not line.startswith(b"#")), b"")
    if tables.is_pairs(first.decode("utf-8", "replace")):
        return _table_run(path, tables.read_pairs(path, warnings), "name:number lines", warnings)
    return _table_run(path, tables.read_csv(path, warnings), "CSV", warnings)


def _json_run(path: Path, start: bytes) -> Run:
    """Read one JSON value over several lines, or one value a line."""
    first = start.partition(b"\n")[0]
    if f'"{VERSION_KEY}"'.encode() in first[:200]:
        return _fastclip_run(path)
    warnings: list[str] = []
    several = first.rstrip().endswith(b"}") and b'"log_history"' not in first
    if several or (b"\n" not in start and b'"log_history"' not in start):
        return _table_run(path, tables.read_json_lines(path, warnings), "JSON lines", warnings)
    value = tables.load_json(path)
    if not isinstance(value, dict) or "log_history" not in value:
        raise LogError(f"{path}: expected JSON lines, or an object with log_history, but got another object")
    records, header = trainer_state.state_records(path, value, warnings)
    return Run({0: records}, f"Transformers {trainer_state.NAME}", {0: header}, warnings, inferred=True)


def _fastclip_run(path: Path) -> Run:
    records, log = read_fastclip_log(path)
    return Run(records, "fastclip log", dict(log.headers), log.warnings)


def _table_run(path: Path, table: tables.Table, source: str, warnings: list[str]) -> Run:
    records, columns = tables.table_records(path, table, warnings)
    return Run({0: records}, source, {0: {"columns": columns}}, warnings, inferred=True)


def _event_file_run(files: list[Path]) -> Run:
    warnings: list[str] = []
    records, columns, has_events = tensorboard.read_event_files(files, warnings)
    header = {"columns": columns}
    return Run({0: records}, "TensorBoard event files", {0: header}, warnings, inferred=not has_events)
