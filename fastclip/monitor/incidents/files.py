# SPDX-License-Identifier: BSD-3-Clause
"""The names of an incident's files, and files that are on the disk when they are closed."""

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
LARGEST_WORLD = 1_000_000  # ranks; more are a damaged number

INCIDENT_NAME = re.compile(r"(\d{8,})-([A-Za-z0-9_.]+)(?:-(\d+))?")
RANK_NAME = re.compile(r"rank(\d{5,})")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LEFTOVER = re.compile(r"\.(?:rank\d+|removed|probe)\.tmp-(\d+)-([A-Za-z0-9_.-]*)")
_UNSUPPORTED = re.compile(
    r"unsupported (?:global|class|operand)[^\n]*?(?= was not|\.?\n|\.?$)", re.IGNORECASE
)
_DAY = 86400.0  # seconds


class StoreError(OSError):
    """An incident that could not be saved; earlier ones are as they were."""


def host_name() -> str:
    """The name of this machine as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())


def incident_name(step: int, kind: str, number: int) -> str:
    """Of the incident `number`, from 1, of a kind of event in a step."""
    safe = re.sub(r"[^A-Za-z0-9_.]", "_", kind)[:100] or "_"
    return f"{step:08}-{safe}" + (f"-{number}" if number > 1 else "")


def rank_name(rank: int) -> str:
    return f"rank{rank:05}"


def temporary_name(of: str) -> str:
    """Tells who is at work on it: the process and, since a directory may be shared, the machine."""
    return f".{of}.tmp-{os.getpid()}-{host_name()}"


def is_leftover(path: Path) -> bool:
    """Whether it is a temporary directory whose maker is gone.

    A process of another machine cannot be asked, and a process's number may have become another's: after a
    day nobody is still at work on it.
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
        return False  # somebody else has removed it
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False  # it lives, and is another user's
    return False


def remove_tree(path: Path) -> None:
    """As far as it can be removed; others may be at it too."""
    shutil.rmtree(path, ignore_errors=True)


def directory_bytes(directory: Path) -> int:
    """What the files below it take, in bytes, as far as they are there still."""
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return total


def sync_directory(path: Path) -> None:
    """Wait until its entries are on the disk, where the file system can tell."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class HashingFile:
    """A new file that is hashed while it is written and on the disk once it is closed.

    What goes wrong in a write is raised by close(): torch's writer would make another error of it.

    Attributes:
        bytes: how many were written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)
        self._hash = hashlib.sha256()
        self._error: Exception | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                rest = view
                while rest:  # a full disk takes a part, and the next call says why
                    rest = rest[self._file.write(rest) :]
                self._hash.update(view)
            except Exception as error:
                self._error = error
        self.bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> dict[str, Any]:
        """Its size and hash, as a manifest has them."""
        try:
            if self._error is not None:
                raise self._error
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        self._file.close()


def save_object(path: Path, value: Any) -> dict[str, Any]:
    """Save with torch.save what can be loaded with ``weights_only=True``; the size and hash of the file.

    Raises:
        OSError: it cannot be written.
        ValueError: it could not be loaded without running code of a pickle.
        Exception: what torch.save raises for what cannot be pickled.
    """
    file = HashingFile(path)
    try:
        torch.save(value, file)  # type: ignore[arg-type]
    except BaseException:
        file.abandon()
        raise
    entry = file.close()
    try:
        # With mmap it reads what the tensors are, but not their values.
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise ValueError(f"it would not load with weights_only=True: {first_sentence(error)}") from error
    return entry


def first_sentence(error: BaseException) -> str:
    """Of an error of torch.load, which goes on with advice to switch its safety off."""
    text = str(error)
    if (found := _UNSUPPORTED.search(text)) is not None:
        return found[0]
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0][:200]}"


def manifest_text(manifest: dict[str, Any]) -> bytes:
    """As strict JSON; what JSON has not is told by its repr."""
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
