# SPDX-License-Identifier: BSD-3-Clause
"""Loading of an incident for a replay: assembled states, micro-batches and records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..monitor.incidents.decode import DecodeError, decode
from ..monitor.incidents.incident import Incident, IncidentError, read_incident
from ..monitor.incidents.shards import full_state
from ..monitor.record import Record
from .build import ReplayError
from .step_parts import MicroBatch


@dataclass
class LoadedIncident:
    """An incident with its files loaded and decoded.

    Attributes:
        ranks: the ranks whose batches are replayed.
        missing: the other ranks, whose batches are missing or were not requested.
        state: the state before the update of the step, assembled if it was sharded.
        snapshot: the state before an earlier step, with its "step"; None if there is none.
        by_number: the micro-batches of all saved steps by step, those of the lowest rank first.
        records: the records of the lowest rank by step.
        all_records: the records of the incident's step by rank.
    """

    incident: Incident
    ranks: list[int]
    missing: list[int]
    state: dict[str, Any]
    snapshot: dict[str, Any] | None
    by_number: dict[int, list[MicroBatch]]
    records: dict[int, Record]
    all_records: dict[int, Record] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the lowest rank that is replayed."""
        return self.incident.manifests[self.ranks[0]]

    @property
    def setup(self) -> dict[str, Any]:
        return self.manifest.get("setup") or {}

    @property
    def step(self) -> int:
        return self.incident.step

    @property
    def micros(self) -> list[MicroBatch]:
        return self.by_number[self.step]


def load_incident(path: str | os.PathLike[str], rank: int | None) -> LoadedIncident:
    """Load an incident.

    Args:
        rank: the rank whose batches are replayed; None for all that were saved.

    Raises:
        ReplayError: the incident cannot be read, or lacks what a replay needs.
    """
    try:
        incident = read_incident(path)
        if rank is not None and rank not in incident.ranks:
            raise ReplayError(f"{incident.path} has no rank {rank}, only the ranks {incident.ranks}")
        ranks = incident.ranks if rank is None else [rank]
        return _load(incident, ranks)
    except (IncidentError, DecodeError) as error:
        raise ReplayError(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ReplayError(f"{path} is not a valid incident: {type(error).__name__}: {error}") from error


def _load(incident: Incident, ranks: list[int]) -> LoadedIncident:
    missing = [r for r in range(incident.world_size) if r not in ranks]
    loaded = LoadedIncident(incident, ranks, missing, _state(incident, ranks, "state.pt"), None, {}, {})
    if incident.has(ranks[0], "snapshot.pt"):
        loaded.snapshot = _state(incident, ranks, "snapshot.pt")
    for rank in ranks:
        manifest = incident.manifests[rank]
        loaded.all_records[rank] = Record.from_dict(manifest["record"])
        for entry in incident.load(rank, "batches.pt")["batches"]:
            micro = _micro_batch(entry, rank)
            loaded.by_number.setdefault(micro.step, []).append(micro)
    loaded.records = {r.step: r for r in map(Record.from_dict, loaded.manifest.get("records") or [])}
    loaded.records[incident.step] = loaded.all_records[ranks[0]]
    for step, micros in loaded.by_number.items():
        if len({micro.rank for micro in micros}) < len(ranks) and step == incident.step:
            raise ReplayError(f"some of the ranks {ranks} did not save the batches of step {step}")
    if incident.step not in loaded.by_number:
        raise ReplayError(f"{incident.path} has no batch of step {incident.step}, its own step")
    loaded.notes += [f"not saved: {text}" for text in incident.incomplete]
    return loaded


def _state(incident: Incident, ranks: list[int], name: str) -> dict[str, Any]:
    """Return the state of one rank, or the state assembled from the shards of all."""
    own = incident.manifests[ranks[0]]
    if not own.get("shards"):
        return _plain(incident.load(ranks[0], name))
    absent = [r for r in range(own["world_size"]) if r not in incident.ranks]
    if absent:
        raise ReplayError(
            f"the state is sharded over {own['world_size']} ranks, of which {absent} are missing in "
            f"{incident.path}; copy their directories there"
        )
    parts = [
        (_plain(incident.load(r, name)), incident.manifests[r].get("shards") or {}) for r in incident.ranks
    ]
    try:
        return full_state(parts)
    except ValueError as error:
        raise ReplayError(f"the shards of {name} do not fit together: {error}") from error


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its encoded parts decoded."""
    return {name: _decoded(part) for name, part in state.items()}


def _decoded(value: Any) -> Any:
    """Decode the value if it is encoded: then it is a tuple, while a plain state is a dict."""
    return decode(value) if isinstance(value, tuple) else value


def _micro_batch(entry: Mapping[str, Any], rank: int) -> MicroBatch:
    ids = entry.get("sample_ids")
    ids = _decoded(ids)
    loss = entry.get("loss")
    return MicroBatch(
        int(entry["step"]),
        int(entry["micro"]),
        rank,
        decode(entry["batch"]),
        ids.tolist() if isinstance(ids, Tensor) else list(ids or ()),
        _decoded(entry["rng"]),
        entry.get("autocast") or {},
        entry.get("buffers") or {},
        bool(entry.get("training", True)),
        None if loss is None else float(loss),
        _decoded(entry.get("rng_at_batch")),
    )


def versions_differ(manifest: Mapping[str, Any]) -> str | None:
    """Return a sentence if another version of torch recorded the incident, else None."""
    recorded = str((manifest.get("versions") or {}).get("torch", torch.__version__))
    if recorded == str(torch.__version__):
        return None
    return f"recorded with torch {recorded}, replayed with torch {torch.__version__}"
