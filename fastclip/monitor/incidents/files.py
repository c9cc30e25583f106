# SPDX-License-Identifier: BSD-3-Clause
"""The file names of incidents, and files that are synced to disk when they are closed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..sinks.json_numbers import spell_nonfinite

FORMAT = 1
VERSION_KEY = "fastclip_incident"
MANIFEST = "manifest.json"
LARGEST_WORLD = 1_000_000  # ranks; a larger number is taken for damage

INCIDENT_NAME = re.compile(r"(\d{8,})-([A-Za-z0-9_.]+)(?:-(\d+))?")
RANK_NAME = re.compile(r"rank(\d{5,})")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LEFTOVER = re.compile(r"\.(?:rank\d+|removed|probe)\.tmp-(\d+)-([A-Za-z0-9_.-]*)")
_UNSUPPORTED = re.compile(
    r"unsupported (?:global|class|operand)[^\n]*?(?= was not|\.?\n|\.?$)", re.IGNORECASE
)
_DAY = 86400.0  # seconds


class StoreError(OSError):
    """Raised when an incident could not be saved; earlier ones are unchanged."""


def host_name() -> str:
    """Return the name of this machine, with the characters that file names allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())


def incident_name(step: int, kind: str, number: int) -> str:
    """Return the directory name of the incident `number`, from 1, of this step and kind."""
    safe = re.sub(r"[^A-Za-z0-9_.]", "_", kind)[:100] or "_"
    return f"{step:08}-{safe}" + (f"-{number}" if number > 1 else "")


def rank_name(rank: int) -> str:
    """Return the directory name of a rank in an incident."""
    return f"rank{rank:05}"


def temporary_name(of: str) -> str:
    """Return a hidden name that holds the process and, since directories may be shared, the machine."""
    return f".{of}.tmp-{os.getpid()}-{host_name()}"


def is_leftover(path: Path) -> bool:
    """Return whether this is a temporary directory whose process is gone.

    Processes of other machines cannot be checked, and process ids are reused: after a day, a temporary
    directory counts as left over in any case.
    """
    match = _LEFTOVER.fullmatch(path.name)
    if match is None:
        return False
    try:
        if time.time() - path.stat().st_mtime > _DAY:
            return True
        if match[2] != host_name():
            return False
        os.kill(int(match[1]), 0)
    except FileNotFoundError:
        return False  # another process has removed it
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False  # the process exists and belongs to another user
    return False


def remove_tree(path: Path) -> None:
    """Remove a directory as far as possible; other processes may be removing it too."""
    shutil.rmtree(path, ignore_errors=True)


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all files below a directory, skipping those that vanish meanwhile."""
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return total


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk, if the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class HashingFile:
    """A new file that is hashed while it is written and synced to disk when it is closed.

    Errors of write() are raised by close(), since torch's writer would replace them by its own.

    Attributes:
        bytes: the number of bytes written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)
        self._hash = hashlib.sha256()
        self._error: Exception | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        """Write and hash the data; return its size in bytes."""
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                rest = view
                while rest:  # a full disk accepts a part, and the next call raises
                    rest = rest[self._file.write(rest) :]
                self._hash.update(view)
            except Exception as error:
                self._error = error
        self.bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> dict[str, Any]:
        """Sync and close the file; return its "bytes" and "sha256" for the manifest."""
        try:
            if self._error is not None:
                raise self._error
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Close the file without syncing it."""
        self._file.close()


def save_object(path: Path, value: Any) -> dict[str, Any]:
    """Save a value with torch.save; return the "bytes" and "sha256" of the file for the manifest.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file would not load with ``weights_only=True``.
        Exception: whatever torch.save raises for a value that cannot be pickled.
    """
    file = HashingFile(path)
    try:
        torch.save(value, file)  # type: ignore[arg-type]
    except BaseException:
        file.abandon()
        raise
    entry = file.close()
    try:
        # With mmap the values of the tensors are not read.
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise ValueError(f"it would not load with weights_only=True: {first_sentence(error)}") from error
    return entry


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a torch.load error, without its advice to disable weights_only."""
    text = str(error)
    if (found := _UNSUPPORTED.search(text)) is not None:
        return found[0]
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0][:200]}"


def manifest_text(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as strict JSON; values of other types are written as their repr."""
    return json.dumps(spell_nonfinite(_plain(manifest, 0)), indent=1, allow_nan=False).encode() + b"\n"


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or type(value) in (bool, str) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth < 50 and isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 50 and isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    try:
        is_number = isinstance(value, Tensor) or type(value).__module__ == "numpy"
        if is_number and math.prod(value.shape) == 1 and isinstance(value.item(), (bool, int, float)):
            return value.item()
        return repr(value)[:500]
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
