# SPDX-License-Identifier: BSD-3-Clause
"""Show what an incident holds: event, numbers of the step, parameters, batch, versions and files.

Exit status: 0 if it is whole, 1 if a rank or a part was not saved, 2 if it is damaged or cannot be read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from ..monitor.incidents.incident import Incident, read_incident
from .incidents import shown_size

_NUMBERS = (
    "loss",
    "lr",
    "total_norm",
    "max_norm",
    "clip_coef",
    "nan_count",
    "inf_count",
    "loss_scale",
    "param_norm",
    "applied",
    "skipped_steps",
    "overflows",
    "micro_batches",
    "error",
)
_MOST_PARAMETERS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("incident", help="directory of an incident, or of one rank in it")
    parser.add_argument(
        "--quick", action="store_true", help="compare only the sizes of files, not their hashes"
    )


def run(options: argparse.Namespace) -> int:
    incident = read_incident(options.incident, verify=not options.quick)
    print("\n".join(_report(incident)))
    return 1 if incident.incomplete else 0


def _report(incident: Incident) -> Iterator[str]:
    manifest = incident.manifest
    yield (
        f"step {incident.step}: {manifest.get('severity', '?')}: {incident.kind}: "
        f"{manifest.get('message') or 'no message'}"
    )
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["time"]))
    ranks = ", ".join(map(str, incident.ranks))
    yield f"saved {saved} by rank {ranks} of {incident.world_size}, {shown_size(incident.bytes)}"
    record = _mapping(manifest.get("record"))
    yield from _section("event", _pairs(_mapping(_mapping(manifest.get("event")).get("values"))))
    yield from _section("step", _pairs({key: record[key] for key in _NUMBERS if key in record}))
    yield from _section("parameters", _parameters(manifest))
    yield from _section("batch", _batch(record))
    yield from _section("versions", _pairs(_mapping(manifest.get("versions"))))
    yield from _section("files", _files(incident))
    yield from _section("not saved", incident.incomplete)


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = [_text(item) for item in value[:8]]
        return ", ".join(shown) + (f", ... ({len(value)})" if len(value) > 8 else "")
    return value if isinstance(value, str) else json.dumps(value)


def _pairs(values: dict[str, Any]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"{key:{width}}  {_text(value)}" for key, value in values.items()]


def _parameters(manifest: dict[str, Any]) -> list[str]:
    """Return a line for each of the first parameters, in the order of the manifest: the worst first."""
    found = [p for p in manifest.get("parameters") or [] if isinstance(p, dict)]
    width = max((len(str(p.get("name"))) for p in found[:_MOST_PARAMETERS]), default=0)
    lines = []
    for its in found[:_MOST_PARAMETERS]:
        numbers = [f"{key} {_text(its[key])}" for key in ("nan_count", "inf_count", "norm") if key in its]
        lines.append(f"{its.get('name')!s:{width}}  {', '.join(numbers)}")
    if len(found) > _MOST_PARAMETERS:
        lines.append(f"and {len(found) - _MOST_PARAMETERS} more")
    return lines


def _batch(record: dict[str, Any]) -> list[str]:
    lines = []
    for name, statistics in _mapping(record.get("batch")).items():
        known = {key: value for key, value in _mapping(statistics).items() if key != "histogram"}
        lines.append(f"{name}: " + ", ".join(f"{key} {_text(value)}" for key, value in known.items()))
    if record.get("sample_ids"):
        lines.append(f"sample ids: {_text(record['sample_ids'])}")
    return lines


def _files(incident: Incident) -> list[str]:
    lines = []
    for rank in incident.ranks:
        for name, entry in incident.manifests[rank]["files"].items():
            lines.append(f"rank {rank}  {name}  {shown_size(entry['bytes'])}")
    return lines
