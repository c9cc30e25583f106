# SPDX-License-Identifier: BSD-3-Clause
"""Reading a log of JSON lines, also of a killed or a resumed run; damage is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .json_numbers import refuse_constant, restore_nonfinite
from .jsonl import FORMAT, VERSION_KEY, log_files


class LogError(ValueError):
    """A log that cannot be read; the message says which file, which line and why."""


class _NoHeaderYet(LogError):
    """A file whose first line is incomplete, because its run was killed while writing it."""


@dataclass
class Log:
    """The contents of a log, see :func:`read_log`.

    Attributes:
        records: the records of each rank, by step; of a step that occurs twice, the one written later.
        headers: the newest header of each rank.
        warnings: sentences on what was ignored.
    """

    records: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def header(self) -> dict[str, Any]:
        """The newest header of the lowest rank."""
        return self.headers[min(self.headers)]


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read the log that JsonlSink wrote.

    Non-finite numbers come back as floats: the exact strings "NaN", "Infinity" and "-Infinity" are taken for
    them except under "name", "message", "kind", "severity", "error", "sample_ids" and "tensor_names".

    Args:
        path: the directory, for all ranks and all their files, or one file.

    Raises:
        LogError: it is missing, unreadable, empty, not a log, of a later version, or damaged elsewhere
            than at the end of a file.
    """
    path = Path(path)
    try:
        files = [file for _, _, file in log_files(path)] if path.is_dir() else [path]
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
    if not files:
        raise LogError(f"{path}: expected a directory with a file such as rank00000.jsonl, but found none")
    log = Log()
    unstarted: list[_NoHeaderYet] = []
    for file in files:
        try:
            _read_file(file, log)
        except _NoHeaderYet as error:
            unstarted.append(error)
    if not log.headers:
        raise unstarted[0]
    log.warnings += map(str, unstarted)
    for rank, records in log.records.items():
        log.records[rank] = _by_step(records, rank, log.warnings)
    return log


def _read_file(file: Path, log: Log) -> None:
    header: dict[str, Any] | None = None
    for number, line in _lines(file):
        where = f"{file}:{number}"
        if not line.endswith(b"\n"):
            if header is None:
                raise _NoHeaderYet(f"{file}: not a log of fastclip, or its run ended in the first line")
            log.warnings.append(f"{where}: the last line is incomplete and was ignored")
            break
        value = _parse(line, where, is_first=header is None)
        if header is None or VERSION_KEY in value:
            header = _require_header(value, where)
            log.headers[header["rank"]] = header
            records = log.records.setdefault(header["rank"], [])
        else:
            records.append(value)
    if header is None:
        raise _NoHeaderYet(f"{file}: the file is empty")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(file, "rb") as opened:
            yield from enumerate(opened, start=1)
    except OSError as error:
        raise LogError(f"{file}: {error.strerror}") from error


def _parse(line: bytes, where: str, is_first: bool) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=refuse_constant)
        why = f"expected a JSON object, but got {type(value).__name__}"
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        value, why = None, f"not JSON: {error}"
    if not isinstance(value, dict):
        raise LogError(f"{where}: not a log of fastclip: {why}" if is_first else f"{where}: {why}")
    if b"NaN" in line or b"Infinity" in line:
        value = restore_nonfinite(value)
    return value


def _require_header(value: dict[str, Any], where: str) -> dict[str, Any]:
    version, rank = value.get(VERSION_KEY), value.get("rank")
    if type(version) is not int or type(rank) is not int:
        raise LogError(
            f"{where}: not a log of fastclip: expected a header with {VERSION_KEY!r} and 'rank', "
            f"but got the keys {list(value)[:8]}"
        )
    if version > FORMAT:
        raise LogError(
            f"{where}: the log has version {version} of the format, but this fastclip reads up to {FORMAT}; "
            "a later fastclip wrote it"
        )
    return value


def _by_step(records: list[dict[str, Any]], rank: int, warnings: list[str]) -> list[dict[str, Any]]:
    """Return the records by step, each step once. A record without a step stays behind its predecessor."""
    kept: dict[Any, tuple[int, dict[str, Any]]] = {}
    step, repeated = -1, 0
    for place, record in enumerate(records):
        own = record.get("step")
        if type(own) is int:
            step = own
            repeated += step in kept
            kept[step] = (step, record)
        else:
            kept["without step", place] = (step, record)
    if repeated:
        warnings.append(
            f"rank {rank}: {repeated} records repeat a step, as a resumed run does; of each step the one "
            "written last was kept"
        )
    return [record for _, record in sorted(kept.values(), key=lambda item: item[0])]
