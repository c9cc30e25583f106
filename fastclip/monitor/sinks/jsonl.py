# SPDX-License-Identifier: BSD-3-Clause
"""A log of JSON lines, one file per rank, which stays readable after a kill, a full disk or a resumed run.

``rank00000.jsonl`` holds one JSON object per line; when it is full the log continues in
``rank00000.1.jsonl``, ``rank00000.2.jsonl`` and so on, and no file is ever renamed. A line with the key
``fastclip_log``, the version of the format, is a header: the first line of every file is one, and each
opening adds one. All other lines are records. JSON has no numbers NaN and Inf: they are written as "NaN",
"Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import os
import re
from io import FileIO
from pathlib import Path
from typing import Any

from .json_numbers import spell_nonfinite

FORMAT = 1
VERSION_KEY = "fastclip_log"

_NAME = re.compile(r"rank(\d{5,})(?:\.(\d+))?\.jsonl")
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_BLOCK = 1 << 16


def log_name(rank: int, number: int) -> str:
    return f"rank{rank:05}.{number}.jsonl" if number else f"rank{rank:05}.jsonl"


def is_log_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def log_files(directory: Path) -> list[tuple[int, int, Path]]:
    """Return the files of a log as (rank, number, path), in the order of writing."""
    found = []
    for path in directory.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return sorted(found)


class JsonlSink:
    """Appends records to the log of one rank, each with one write() to the operating system.

    What was written outlives the process at once, and a crash of the machine after flush(). A run that is
    resumed with the same directory appends; a torn last line of the earlier run is cut off. A record that
    could be written only in part is cut off at the next one. One sink serves one thread of one process.

    Args:
        directory: where the files go; made if missing.
        rank: the process in the default process group, from 0.
        header: what the records mean, by name, as JSON: stands in the first line of every file.
        max_bytes: how large a file may become, in bytes, before the log goes on in another; a single record
            may be larger.

    Raises:
        OSError: the directory cannot be made or written.
        TypeError: the header is not JSON.
        ValueError: rank is negative or max_bytes not positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int = 0,
        *,
        header: dict[str, Any],
        max_bytes: int = 256 << 20,
    ) -> None:
        if rank < 0:
            raise ValueError(f"expected rank to be at least 0, but got {rank}")
        if max_bytes <= 0:
            raise ValueError(f"expected max_bytes to be positive, but got {max_bytes}")
        self.directory = Path(directory)
        self._rank = rank
        self._max_bytes = max_bytes
        ours = {VERSION_KEY: FORMAT, "rank": rank}
        self._header = _line({**ours, **header, **ours})  # the version first, and not to be overwritten
        self._file: FileIO | None = None
        self._torn = False  # whether the last record may be there in part
        self._empty_size = -1
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            message = f"expected a directory for the log that can be written, but got: {error.strerror}"
            raise OSError(error.errno, message, str(self.directory)) from error

    def write(self, record: dict[str, Any]) -> None:
        """Append a record.

        Raises:
            OSError: it cannot be written. The log is readable still, and the next record may be.
            TypeError, ValueError: it is not JSON, or the sink is closed.
        """
        if self._file is None:
            raise ValueError("expected an open log, but got one that was closed")
        line = _line(record)
        if self._torn:
            drop_torn_line(self._file)
            self._torn = False
        size = self._file.seek(0, os.SEEK_END)
        if size + len(line) > self._max_bytes and size > self._empty_size:
            self._open()
        self._torn = True
        append(self._file, line)
        self._torn = False

    def flush(self) -> None:
        """Wait until the log is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> None:
        """Open the newest file, or one more if that is full, and append a header."""
        number = max((n for rank, n, _ in log_files(self.directory) if rank == self._rank), default=0)
        file = self._open_number(number)
        size = file.seek(0, os.SEEK_END)
        if size and size + len(self._header) >= self._max_bytes:
            file.close()
            file, size = self._open_number(number + 1), 0
        try:
            append(file, self._header)
        except BaseException:
            file.close()  # the next call finds it the newest one and cuts off what it got
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        # Size of a file without records; unknown, so never equal, for one that was there before.
        self._empty_size = len(self._header) if size == 0 else -1

    def _open_number(self, number: int) -> FileIO:
        file = open(self.directory / log_name(self._rank, number), "a+b", buffering=0)
        try:
            drop_torn_line(file)
        except BaseException:
            file.close()
            raise
        return file


def append(file: FileIO, line: bytes) -> None:
    rest = memoryview(line)
    while rest:  # a full disk takes a part, and the next call says why
        rest = rest[file.write(rest) :]


def drop_torn_line(file: FileIO) -> None:
    """Cut off what follows the last newline."""
    end = file.seek(0, os.SEEK_END)
    start = end
    while start > 0:
        stop, start = start, max(0, start - _BLOCK)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            start += newline + 1
            break
    if start < end:
        file.truncate(start)


def _line(record: dict[str, Any]) -> bytes:
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # NaN and Inf are rare: only then is the record gone through in Python
        text = _ENCODER.encode(spell_nonfinite(record))
    return text.encode() + b"\n"
