# SPDX-License-Identifier: BSD-3-Clause
"""fastclip's own log as records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..monitor.record import Record
from ..monitor.sinks import Log, LogError, read_log
from ..monitor.sinks.jsonl import VERSION_KEY, log_files


def read_own(path: Path) -> tuple[dict[int, list[Record]], Log]:
    """The records by rank, and the log they are from.

    Raises:
        LogError: which file cannot be read, in which line, and why; a record without a step.
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
        lines.clear()  # they take as much memory again
    return found, log


def _place(path: Path, rank: int, step: Any) -> str:
    """The file and the line that the record of a step came from; of several the last, which is kept."""
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
