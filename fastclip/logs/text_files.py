# SPDX-License-Identifier: BSD-3-Clause
"""Reading of text files, compressed or not; every failure is a LogError."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from ..monitor.sinks import LogError

_GZIP = b"\x1f\x8b"
_HEAD = 1 << 16
LONGEST_LINE = 64 << 20  # bytes; a file without line breaks must not fill the memory


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed. Raises LogError if it cannot be read or is blank."""
    try:
        with _opened(path) as file:
            head = file.read(_HEAD)
    except EOFError:
        raise LogError(f"{path}: the compressed file ends too early") from None
    except (OSError, zlib.error) as error:
        raise _unreadable(path, error) from None
    if not head.strip():
        raise LogError(f"{path}: the file is empty")
    return head


def read_lines(path: Path, warnings: list[str]) -> Iterator[tuple[int, str]]:
    """Yield each line, including its line end, with its number from 1.

    A compressed file whose end is missing is read as far as possible, with a warning.

    Raises:
        LogError: the file cannot be read, is not UTF-8, or has a line that is too long.
    """
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise LogError(f"{path}:{number}: the line is longer than {LONGEST_LINE >> 20} MiB")
                yield number, _decoded(line, path, number)
    except EOFError:
        warnings.append(f"{path}: the compressed file ends too early and was read up to line {number}")
    except (OSError, zlib.error) as error:
        raise _unreadable(path, error) from None


def read_text(path: Path, limit: int = 1 << 30) -> str:
    """Return the text of a file of at most `limit` bytes.

    Raises:
        LogError: the file cannot be read, is larger, or is not UTF-8.
    """
    try:
        with _opened(path) as file:
            content = file.read(limit + 1)
    except EOFError:
        raise LogError(f"{path}: the compressed file ends too early") from None
    except (OSError, zlib.error) as error:
        raise _unreadable(path, error) from None
    if len(content) > limit:
        raise LogError(f"{path}: the file is larger than {limit >> 20} MiB")
    return _decoded(content, path, 1)


def _opened(path: Path) -> BufferedIOBase:
    with open(path, "rb") as file:
        compressed = file.read(len(_GZIP)) == _GZIP
    return gzip.GzipFile(path) if compressed else open(path, "rb")


def _decoded(content: bytes, path: Path, number: int) -> str:
    try:
        return content.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = number + content.count(b"\n", 0, error.start)
        raise LogError(
            f"{path}:{line}: expected text in UTF-8, but got the byte {content[error.start]:#04x}"
        ) from None


def _unreadable(path: Path, error: OSError | zlib.error) -> LogError:
    return LogError(f"{path}: {getattr(error, 'strerror', None) or error}")


def subdirectories(directory: Path, depth: int = 3, most: int = 10_000) -> list[Path]:
    """Return the subdirectories that are not hidden, down to a depth.

    Raises:
        LogError: there are more than `most`, as below the root of a disk.
    """
    found: list[Path] = []
    level = [directory]
    for _ in range(depth):
        level = [p for path in level for p in sorted(path.iterdir()) if p.is_dir() and p.name[0] != "."]
        found += level
        if len(found) > most:
            raise LogError(
                f"{directory}: expected the directory of a log, but it has more than {most} subdirectories"
            )
    return found


def relative_names(paths: list[Path], base: Path, most: int = 8) -> str:
    """Return the paths relative to a directory, joined for a message."""
    shown = [os.fspath(path.relative_to(base)) for path in paths[:most]]
    return ", ".join(shown) + (f" and {len(paths) - most} more" if len(paths) > most else "")
