# SPDX-License-Identifier: BSD-3-Clause
"""Reading incidents: whether they are whole, what is in them, and never any code of theirs."""

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
    """An incident that cannot be read; the message says which file, what was found and why that is wrong."""


@dataclass
class Incident:
    """One incident, of all ranks that saved it or of one.

    Attributes:
        path: the directory it was read from.
        manifests: by rank.
        paths: the directory of each rank.
        missing: ranks that should be there and are not; none if it was read from the directory of one rank.
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
        """Of the lowest rank."""
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
        """A sentence on each thing that was not saved, on any rank."""
        found = [f"rank {rank} has saved nothing" for rank in self.missing]
        several = len(self.manifests) > 1
        for rank in self.ranks:
            why = self.manifests[rank].get("incomplete") or []
            found += [f"rank {rank}: {text}" if several else str(text) for text in why]
        return found

    @property
    def bytes(self) -> int:
        """What the files of all ranks take, without the manifests."""
        return sum(entry["bytes"] for its in self.manifests.values() for entry in its["files"].values())

    def has(self, rank: int, name: str) -> bool:
        return rank in self.manifests and name in self.manifests[rank]["files"]

    def load(self, rank: int, name: str) -> Any:
        """What the rank saved in the file, on the CPU. No code of it is run: ``weights_only=True``.

        Raises:
            IncidentError: there is no such file, it is damaged, or it holds more than values and tensors.
        """
        if not self.has(rank, name):
            raise IncidentError(f"{self.path}: expected {name!r} of rank {rank}, but it was not saved")
        path = self.paths[rank] / name
        try:
            return torch.load(path, weights_only=True, map_location="cpu")
        except OSError as error:
            raise IncidentError(f"{path}: {error.strerror or error}") from error
        except Exception as error:
            raise IncidentError(
                f"{path}: expected what weights_only=True loads, but got: {_files.first_sentence(error)}"
            ) from error


def read_incident(path: str | os.PathLike[str], verify: bool = True) -> Incident:
    """Read an incident, or the part of one rank.

    A rank that is missing does not make it unreadable, see :attr:`Incident.missing`.

    Args:
        path: the directory of the incident, or of a rank in it.
        verify: compare the SHA-256 of every file, which reads all of them; else only their sizes.

    Raises:
        IncidentError: no incident, of a later version, or damaged.
    """
    path = Path(path)
    try:
        own = os.path.lexists(path / _files.MANIFEST)
        paths = [path] if own else sorted(p for p in path.iterdir() if _files.RANK_NAME.fullmatch(p.name))
    except OSError as error:
        raise IncidentError(f"{path}: {error.strerror}") from error
    if not paths:
        raise IncidentError(
            f"{path}: not an incident: expected a directory such as rank00000, but found none"
        )
    incident = Incident(path, {}, {})
    for part in paths:
        manifest = _read_manifest(part / _files.MANIFEST)
        rank = manifest["rank"]
        named = _files.RANK_NAME.fullmatch(part.name)
        if not own and (named is None or int(named[1]) != rank):
            raise IncidentError(
                f"{part / _files.MANIFEST}: expected the rank of the directory, but got {rank}"
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
            f"{path}: expected a manifest with {_files.VERSION_KEY!r}, but got something else"
        )
    if version > _files.FORMAT:
        raise IncidentError(
            f"{path}: the incident has version {version} of the format, but this fastclip reads up to "
            f"{_files.FORMAT}; a later fastclip wrote it"
        )
    manifest = restore_nonfinite(manifest)
    given = {key: kind for key, kind in _OPTIONAL.items() if manifest.get(key) is not None}
    for key, kind in (_TYPES | given).items():
        value = manifest.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise IncidentError(f"{path}: expected {key} to be a {_named(kind)}, but got {value!r}"[:300])
    if not 0 <= manifest["rank"] < manifest["world_size"] <= _files.LARGEST_WORLD:
        its = manifest["rank"], manifest["world_size"]
        raise IncidentError(f"{path}: expected a rank of the world, but got rank {its[0]} of {its[1]}")
    for name, entry in manifest["files"].items():
        known = (
            isinstance(entry, dict) and type(entry.get("bytes")) is int and type(entry.get("sha256")) is str
        )
        if not known or not _files.FILE_NAME.fullmatch(name):
            raise IncidentError(
                f"{path}: expected a file with bytes and sha256, but got {name!r}: {entry!r}"[:300]
            )
    return manifest


def _named(kind: type | tuple[type, ...]) -> str:
    return kind.__name__ if isinstance(kind, type) else "number"


def _require_files(directory: Path, manifest: dict[str, Any], verify: bool) -> None:
    for name, entry in manifest["files"].items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise IncidentError(f"{path}: expected {entry['bytes']} bytes, but got {size}: it is damaged")
            if verify and (found := _sha256(path)) != entry["sha256"]:
                hashes = f"{entry['sha256'][:12]}..., but got {found[:12]}..."
                raise IncidentError(f"{path}: expected the SHA-256 {hashes}: it is damaged")
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
    """One incident of a directory, also one that cannot be read.

    Attributes:
        path: its directory.
        step, kind: as its name has them.
        incident: what is in it; None if it is damaged.
        damage: why it cannot be read; None if it can.
        bytes: what its files take on the disk.
    """

    path: Path
    step: int
    kind: str
    incident: Incident | None
    damage: str | None
    bytes: int

    @property
    def state(self) -> str:
        """ "whole"; "incomplete": a rank or something that belongs to it was not saved; or "damaged"."""
        if self.incident is None:
            return "damaged"
        return "incomplete" if self.incident.incomplete else "whole"


def list_incidents(directory: str | os.PathLike[str], verify: bool = True) -> list[IncidentSummary]:
    """The incidents of a store, by step; what is damaged is told and does not hide the others.

    Args:
        directory: that of an IncidentStore.
        verify: as of :func:`read_incident`.

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
    # A directory in which no rank has finished yet is no incident yet.
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
