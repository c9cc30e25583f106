# SPDX-License-Identifier: BSD-3-Clause
"""Reading of saved incidents, which checks them for damage and runs no code from them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..sinks.json_numbers import refuse_constant, restore_nonfinite
from . import files as _files

_BLOCK = 1 << 22
_OPTIONAL: dict[str, type | tuple[type, ...]] = {
    "event": dict,
    "record": dict,
    "records": list,
    "parameters": list,
    "shards": dict,
    "versions": dict,
    "incomplete": list,
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "kind": str,
    "rank": int,
    "world_size": int,
    "time": (int, float),
    "files": dict,
}


class IncidentError(ValueError):
    """Raised for an incident that cannot be read; the message names the file and what is wrong with it."""


@dataclass
class Incident:
    """One incident, as saved by all ranks or by one of them.

    Attributes:
        path: the directory it was read from.
        manifests: the manifest of each rank.
        paths: the directory of each rank.
        missing: ranks that saved nothing; empty if the directory of one rank was read.
    """

    path: Path
    manifests: dict[int, dict[str, Any]]
    paths: dict[int, Path]
    missing: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.manifests)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the lowest rank."""
        return self.manifests[self.ranks[0]]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def kind(self) -> str:
        return self.manifest["kind"]

    @property
    def world_size(self) -> int:
        return self.manifest["world_size"]

    @property
    def incomplete(self) -> list[str]:
        """A sentence on each thing that some rank did not save."""
        found = [f"rank {rank} saved nothing" for rank in self.missing]
        several = len(self.manifests) > 1
        for rank in self.ranks:
            why = self.manifests[rank].get("incomplete") or []
            found += [f"rank {rank}: {text}" if several else str(text) for text in why]
        return found

    @property
    def bytes(self) -> int:
        """The size of the files of all ranks in bytes, without the manifests."""
        return sum(entry["bytes"] for its in self.manifests.values() for entry in its["files"].values())

    def has(self, rank: int, name: str) -> bool:
        """Return whether the rank saved a file of this name."""
        return rank in self.manifests and name in self.manifests[rank]["files"]

    def load(self, rank: int, name: str) -> Any:
        """Load a file of a rank to the CPU with ``weights_only=True``, so that no code in it runs.

        Raises:
            IncidentError: the rank did not save the file, it is damaged, or it holds more than values and
                tensors.
        """
        if not self.has(rank, name):
            raise IncidentError(f"{self.path}: rank {rank} did not save {name!r}")
        path = self.paths[rank] / name
        try:
            return torch.load(path, weights_only=True, map_location="cpu")
        except OSError as error:
            raise IncidentError(f"{path}: {error.strerror or error}") from error
        except Exception as error:
            raise IncidentError(
                f"{path}: cannot be loaded with weights_only=True: {_files.first_sentence(error)}"
            ) from error


def read_incident(path: str | os.PathLike[str], verify: bool = True) -> Incident:
    """Read an incident, or the part of it that one rank saved.

    Missing ranks are not an error, see :attr:`Incident.missing`.

    Args:
        path: the directory of the incident, or of a rank in it.
        verify: whether to compare the SHA-256 of every file, which reads all of them, or only their sizes.

    Raises:
        IncidentError: there is no incident, it is damaged, or a later fastclip wrote it.
    """
    path = Path(path)
    try:
        own = os.path.lexists(path / _files.MANIFEST)
        paths = [path] if own else sorted(p for p in path.iterdir() if _files.RANK_NAME.fullmatch(p.name))
    except OSError as error:
        raise IncidentError(f"{path}: {error.strerror}") from error
    if not paths:
        raise IncidentError(f"{path}: not an incident: it has no directory such as rank00000")
    incident = Incident(path, {}, {})
    for part in paths:
        manifest = _read_manifest(part / _files.MANIFEST)
        rank = manifest["rank"]
        named = _files.RANK_NAME.fullmatch(part.name)
        if not own and (named is None or int(named[1]) != rank):
            raise IncidentError(
                f"{part / _files.MANIFEST}: expected the rank in the directory's name, but got {rank}"
            )
        _require_files(part, manifest, verify)
        incident.manifests[rank], incident.paths[rank] = manifest, part
    for rank, manifest in incident.manifests.items():
        for key in ("step", "kind", "world_size"):
            if manifest[key] != incident.manifest[key]:
                first = f"{incident.manifest[key]!r} as on rank {incident.ranks[0]}"
                where = incident.paths[rank] / _files.MANIFEST
                raise IncidentError(f"{where}: expected {key} {first}, but got {manifest[key]!r}")
    if not own:
        incident.missing = [r for r in range(incident.world_size) if r not in incident.manifests]
    return incident


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes(), parse_constant=refuse_constant)
    except OSError as error:
        raise IncidentError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IncidentError(f"{path}: not JSON: {error}") from error
    version = manifest.get(_files.VERSION_KEY) if isinstance(manifest, dict) else None
    if type(version) is not int:
        raise IncidentError(
            f"{path}: not the manifest of an incident: it has no integer {_files.VERSION_KEY!r}"
        )
    if version > _files.FORMAT:
        raise IncidentError(
            f"{path}: the incident has format version {version}, but this fastclip reads up to version "
            f"{_files.FORMAT}; a later fastclip wrote it"
        )
    manifest = restore_nonfinite(manifest)
    given = {key: kind for key, kind in _OPTIONAL.items() if manifest.get(key) is not None}
    for key, kind in (_TYPES | given).items():
        value = manifest.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise IncidentError(
                f"{path}: expected {key} to be of type {_type_names(kind)}, but got {value!r}"[:300]
            )
    if not 0 <= manifest["rank"] < manifest["world_size"] <= _files.LARGEST_WORLD:
        raise IncidentError(
            f"{path}: expected 0 <= rank < world_size <= {_files.LARGEST_WORLD}, but got rank "
            f"{manifest['rank']} and world_size {manifest['world_size']}"
        )
    for name, entry in manifest["files"].items():
        known = (
            isinstance(entry, dict) and type(entry.get("bytes")) is int and type(entry.get("sha256")) is str
        )
        if not known or not _files.FILE_NAME.fullmatch(name):
            raise IncidentError(
                f"{path}: expected a file name with its bytes and sha256, but got {name!r}: {entry!r}"[:300]
            )
    return manifest


def _type_names(kind: type | tuple[type, ...]) -> str:
    return kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)


def _require_files(directory: Path, manifest: dict[str, Any], verify: bool) -> None:
    for name, entry in manifest["files"].items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise IncidentError(
                    f"{path}: expected {entry['bytes']} bytes, but got {size}: the file is damaged"
                )
            if verify and (found := _sha256(path)) != entry["sha256"]:
                hashes = f"{entry['sha256'][:12]}..., but got {found[:12]}..."
                raise IncidentError(f"{path}: expected the SHA-256 {hashes}: the file is damaged")
        except OSError as error:
            raise IncidentError(f"{path}: {error.strerror}") from error


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


@dataclass
class IncidentSummary:
    """One incident of a directory, readable or damaged.

    Attributes:
        path: the directory of the incident.
        step, kind: taken from the name of the directory.
        incident: None if it is damaged.
        damage: why it cannot be read; None if it can.
        bytes: the size of its files.
    """

    path: Path
    step: int
    kind: str
    incident: Incident | None
    damage: str | None
    bytes: int

    @property
    def state(self) -> str:
        """The state of the incident: "whole", "incomplete" if a part was not saved, or "damaged"."""
        if self.incident is None:
            return "damaged"
        return "incomplete" if self.incident.incomplete else "whole"


def list_incidents(directory: str | os.PathLike[str], verify: bool = True) -> list[IncidentSummary]:
    """List the incidents of a directory by step; damaged ones are listed as such.

    Args:
        directory: the directory of an IncidentStore.
        verify: see :func:`read_incident`.

    Raises:
        IncidentError: the directory cannot be read.
    """
    directory = Path(directory)
    try:
        named = [
            (m, directory / m[0]) for m in map(_files.INCIDENT_NAME.fullmatch, os.listdir(directory)) if m
        ]
    except OSError as error:
        raise IncidentError(f"{directory}: {error.strerror}") from error
    found = []
    # A directory in which no rank has finished is not an incident yet.
    named = [(match, path) for match, path in named if not path.is_dir() or any(path.glob("rank*"))]
    for match, path in sorted(named, key=lambda item: (int(item[0][1]), item[0][2], int(item[0][3] or 1))):
        incident, damage = None, None
        try:
            incident = read_incident(path, verify)
        except IncidentError as error:
            damage = str(error)
        found.append(
            IncidentSummary(path, int(match[1]), match[2], incident, damage, _files.directory_bytes(path))
        )
    return found
