# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of a record by tag: what TensorBoard, W&B and their like can draw."""

from __future__ import annotations

from collections import Counter
from typing import Any

# What a record holds under a key goes to this tag: a number to the tag itself, a mapping to tags below it,
# and so does the list of learning rates.
TAGS = {
    "loss": "loss",
    "losses": "loss",
    "lr": "lr",
    "total_norm": "gradient/total_norm",
    "group_norms": "gradient/group_norm",
    "max_norm": "gradient/max_norm",
    "clip_coef": "gradient/clip_coef",
    "nan_count": "gradient/nan_count",
    "inf_count": "gradient/inf_count",
    "param_norm": "parameter/norm",
    "update_ratio": "update_ratio",
    "loss_scale": "amp/loss_scale",
    "overflows": "amp/overflows",
    "skipped_steps": "amp/skipped_steps",
    "applied": "step/applied",
    "held": "step/held",
    "step_time": "throughput/step_time",
    "samples_per_second": "throughput/samples_per_second",
    "tokens_per_second": "throughput/tokens_per_second",
    "batch": "batch",
    "token_ids": "token_ids",
    "memory": "memory",
}


def scalars_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by tag, non-finite ones too, without text, lists and unknown keys."""
    found: dict[str, float] = {}
    for key, tag in TAGS.items():
        value = record.get(key)
        if key == "lr" and isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        _collect(value, tag, found)
    for module, statistics in (record.get("activations") or {}).items():
        for name, value in statistics.items():
            _collect(value, f"activation_{name}/{module}", found)
    return found


def _collect(value: Any, tag: str, found: dict[str, float]) -> None:
    if isinstance(value, (int, float)):
        found[tag] = float(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            _collect(item, f"{tag}/{name}", found)


def count_events(record: dict[str, Any], counts: Counter[str]) -> dict[str, float]:
    """Add the record's events to the counts by kind; return the new counts of its kinds by tag."""
    kinds = [str(event["kind"]) for event in record.get("events") or ()]
    counts.update(kinds)
    return {f"events/{kind}": float(counts[kind]) for kind in kinds}
