# SPDX-License-Identifier: BSD-3-Clause
"""Reader of fastclip's own log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..monitor.record import Record
from ..monitor.sinks import Log, LogError, read_log
from ..monitor.sinks.jsonl import VERSION_KEY, log_files


def read_fastclip_log(path: Path) -> tuple[dict[int, list[Record]], Log]:
    """Return the records by rank, and the log that they come from, whose lines are freed.

    Raises:
        LogError: a file cannot be read, or a record is invalid; the message names file, line and reason.
    """
    log = read_log(path)
    found: dict[int, list[Record]] = {}
    for rank, lines in log.records.items():
        found[rank] = []
        for line in lines:
            try:
                found[rank].append(Record.from_dict(line))
            except ValueError as error:
                raise LogError(f"{_place(path, rank, line.get('step'))}: {error}") from None
        lines.clear()  # they take as much memory as the records
    return found, log


def _place(path: Path, rank: int, step: Any) -> str:
    """Return the file and line of a step's record, the last one if there are several: that one is kept."""
    files = [file for its, _, file in log_files(path) if its == rank] if path.is_dir() else [path]
    place = str(path)
    for file in files:
        with open(file, "rb") as opened:
            for number, line in enumerate(opened, start=1):
                if line.endswith(b"\n"):
                    value = json.loads(line)
                    if VERSION_KEY not in value and value.get("step") == step:
                        place = f"{file}:{number}"
    return place
