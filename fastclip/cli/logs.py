# SPDX-License-Identifier: BSD-3-Clause
"""Logs of the monitor as records, for the commands that read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..monitor import Record
from ..monitor.sinks import LogError, read_log
from ..monitor.sinks.jsonl import VERSION_KEY, log_files


def records_of(path: str) -> dict[int, list[Record]]:
    """By rank, in the order of the steps. What was wrong but could be passed over is told on stderr.

    Raises:
        LogError: which file cannot be read, in which line, and why; a record without a step.
    """
    log = read_log(path)
    for warning in log.warnings:
        print(f"fastclip: {warning}", file=sys.stderr)
    found: dict[int, list[Record]] = {}
    for rank, lines in log.records.items():
        found[rank] = []
        for line in lines:
            try:
                found[rank].append(Record.from_dict(line))
            except ValueError as error:
                raise LogError(f"{_place(Path(path), rank, line.get('step'))}: {error}") from None
    if not any(found.values()):
        print(f"fastclip: {path}: no step has been logged yet", file=sys.stderr)
    return found


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
