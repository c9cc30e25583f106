# SPDX-License-Identifier: BSD-3-Clause
"""A bounded directory of incidents, each of which is saved atomically.

``00000040-nonfinite/rank00000/`` holds what rank 0 saved of the event "nonfinite" in step 40: a manifest and
files written by torch.save. A second incident of the same step and kind, as in a resumed run, is
``00000040-nonfinite-2``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from . import files as _files
from .files import StoreError

_ATTEMPTS = 20  # another rank may remove the empty directory that this rank has just made


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, fastclip and CUDA, and of NumPy and cuDNN if in use."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fastclip": str(getattr(sys.modules[__name__.partition(".")[0]], "__version__", "unknown")),
        "cuda": str(torch.version.cuda),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_initialized():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["device"] = torch.cuda.get_device_name()
    if "numpy" in sys.modules:
        found["numpy"] = str(getattr(sys.modules["numpy"], "__version__", "unknown"))
    return found


class IncidentStore:
    """A directory to which every rank saves its part of an incident.

    A save is atomic: complete or absent even after kill -9, on a full disk and, as far as the file system
    honours fsync, after a crash of the machine. Existing files are never overwritten or replaced.

    Create a store on every rank before the training begins: incidents that exist by then belong to another
    run and are never added to. Partial saves of killed processes are removed.

    Args:
        directory: where incidents go; created if missing.
        max_incidents: how many incidents to retain, at least 2: the first, usually the most informative, the
            newest, and the latest of the others. Rank 0 removes the rest after it has saved.
        max_bytes: how many bytes all incidents of all ranks may take; the first and the newest are retained
            even if they take more.

    Raises:
        OSError: the directory cannot be created or written.
        ValueError: max_incidents is below 2 or max_bytes is not positive.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_incidents: int = 10, max_bytes: int = 20 << 30
    ) -> None:
        if max_incidents < 2:
            raise ValueError(f"expected max_incidents to be at least 2, but got {max_incidents}")
        if max_bytes <= 0:
            raise ValueError(f"expected max_bytes to be positive, but got {max_bytes}")
        self.directory = Path(directory)
        self._max_incidents = max_incidents
        self._max_bytes = max_bytes
        self._saves: dict[tuple[str, int], int] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / _files.temporary_name("probe")
            with contextlib.suppress(FileExistsError):
                probe.mkdir()
            with contextlib.suppress(FileNotFoundError):
                probe.rmdir()
            _remove_leftovers(self.directory)
            self._earlier = set(os.listdir(self.directory))
        except OSError as error:
            message = f"cannot write to the directory of incidents: {error.strerror}"
            raise OSError(error.errno, message, str(self.directory)) from error

    def save(
        self,
        step: int,
        kind: str,
        rank: int,
        world_size: int,
        manifest: dict[str, Any],
        files: dict[str, Any],
    ) -> Path:
        """Save this rank's part of an incident.

        All ranks use the same directory if they save the same incidents in the same order.

        Args:
            step, kind: those of the event.
            rank, world_size: those of this process in the default process group.
            manifest: the description of the incident, as JSON values. The format version, step, kind, rank,
                world size, time, versions and files are added, and "incomplete" and "complete" if missing.
            files: the values for torch.save by file name; ``weights_only=True`` must be able to load them.

        Returns:
            The directory of this rank.

        Raises:
            StoreError: the incident cannot be written, or would not load; nothing of it remains.
            ValueError: a file name is not allowed; the step is negative; the rank is out of range.
        """
        if step < 0 or not 0 <= rank < world_size:
            raise ValueError(
                f"expected step >= 0 and 0 <= rank < {world_size}, but got step {step} and rank {rank}"
            )
        for name in files:
            if not _files.FILE_NAME.fullmatch(name) or name == _files.MANIFEST:
                raise ValueError(f"expected a plain file name other than {_files.MANIFEST}, but got {name!r}")
        complete = self._completed(manifest, step, kind, rank, world_size)
        target = self._target(step, kind, rank)
        try:
            self._save(target, complete, files)
        except OSError as error:
            raise StoreError(
                error.errno,
                f"the incident of step {step} was not saved: {error.strerror or error}",
                str(target),
            ) from error
        if rank == 0:
            with contextlib.suppress(OSError):  # this incident is saved; the next save tries again
                self._prune(newest=target.parent)
        return target

    def _completed(
        self, manifest: dict[str, Any], step: int, kind: str, rank: int, world_size: int
    ) -> dict[str, Any]:
        event = manifest.get("event") or {}
        incomplete = list(manifest.get("incomplete", ()))
        return {
            _files.VERSION_KEY: _files.FORMAT,
            "step": step,
            "kind": kind,
            "severity": event.get("severity", "error"),
            "message": event.get("message", ""),
            "time": time.time(),
            "versions": versions(),
            "complete": not incomplete,
            "incomplete": incomplete,
            **{key: value for key, value in manifest.items() if key not in ("files", _files.VERSION_KEY)},
            **{"step": step, "kind": kind, "rank": rank, "world_size": world_size},
        }

    def _target(self, step: int, kind: str, rank: int) -> Path:
        """Return the directory for a save: the n-th of this step and kind takes the n-th free name.

        Names taken before this run are not free. Failed saves count too, so that ranks do not mix two
        incidents when the save of one of them fails.
        """
        name = _files.incident_name(step, kind, 1)
        matches = filter(None, map(_files.INCIDENT_NAME.fullmatch, self._earlier))
        taken = [int(match[3] or 1) for match in matches if f"{match[1]}-{match[2]}" == name]
        count = self._saves[name, rank] = self._saves.get((name, rank), 0) + 1
        number = max(taken, default=0) + count
        while True:
            target = self.directory / _files.incident_name(step, kind, number) / _files.rank_name(rank)
            if not os.path.lexists(target):
                return target
            number += 1

    def _save(self, target: Path, manifest: dict[str, Any], files: dict[str, Any]) -> None:
        incident = target.parent
        temporary = incident / _files.temporary_name(target.name)
        try:
            _make_directories(incident, temporary)
            entries = {}
            for name, value in files.items():
                try:
                    entries[name] = _files.save_object(temporary / name, value)
                except OSError:
                    raise
                except Exception as error:
                    raise OSError(errno.EINVAL, f"{name}: {error}") from error
            file = _files.HashingFile(temporary / _files.MANIFEST)
            file.write(_files.manifest_text({**manifest, "files": entries}))
            file.close()
            _files.sync_directory(temporary)
            os.rename(temporary, target)  # fails if the target exists and is not empty
            _files.sync_directory(incident)
            _files.sync_directory(self.directory)
        except BaseException:
            _files.remove_tree(temporary)
            with contextlib.suppress(OSError):
                incident.rmdir()  # fails if other ranks have saved
            raise

    def _prune(self, newest: Path) -> None:
        """Remove incidents from the oldest on, but never the first or the newest."""
        found = sorted(_ages(self.directory))
        sizes = {path: _files.directory_bytes(path) for *_, path in found}
        removable = [path for *_, path in found[1:] if path != newest]
        count, total = len(found), sum(sizes.values())
        for path in removable:
            if count <= self._max_incidents and total <= self._max_bytes:
                break
            # Renamed first, so that a kill in between leaves no incident without its files.
            hidden = self.directory / _files.temporary_name("removed")
            _files.remove_tree(hidden)
            try:
                os.rename(path, hidden)
            except FileNotFoundError:
                pass
            else:
                _files.remove_tree(hidden)
            count, total = count - 1, total - sizes[path]


def _make_directories(incident: Path, temporary: Path) -> None:
    for attempt in range(_ATTEMPTS):
        incident.mkdir(exist_ok=True)
        try:
            temporary.mkdir()
            return
        except FileExistsError:  # left by a process that had the same id
            _files.remove_tree(temporary)
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(temporary))


def _ages(directory: Path) -> list[tuple[float, int, Path]]:
    """Return (seconds since 1970, number, path) of each incident, timed when its first rank saved."""
    found = []
    for path in directory.iterdir():
        if match := _files.INCIDENT_NAME.fullmatch(path.name):
            times = []
            for manifest in path.glob(f"rank*/{_files.MANIFEST}"):
                with contextlib.suppress(FileNotFoundError):
                    times.append(manifest.stat().st_mtime)
            if times:
                found.append((min(times), int(match[3] or 1), path))
    return found


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if _files.is_leftover(path):
            _files.remove_tree(path)
        elif _files.INCIDENT_NAME.fullmatch(path.name) and path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                for inner in path.iterdir():
                    if _files.is_leftover(inner):
                        _files.remove_tree(inner)
            with contextlib.suppress(OSError):
                path.rmdir()  # fails if something is left in it
