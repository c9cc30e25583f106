# SPDX-License-Identifier: BSD-3-Clause
"""Heat maps of numbers by parameter or module (rows) and step (columns)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..monitor.record import Record
from .chart_help import CHART_HELP
from .encoding import encode_places, encode_values
from .series import Axis

MOST_ROWS = 120
MOST_COLUMNS = 1000
_MISSING = -1.0  # norms, ratios and rms are never negative


@dataclass
class HeatMap:
    """A number for each row and column; NaN and Inf count as larger than all.

    Attributes:
        rows: the names, in the order of the model as far as it is known.
        at: the place of each column on the axis of the steps.
        values: the numbers by row.
        omitted: how many more rows the log has.
        steps: the first step of each column.
    """

    key: str
    title: str
    help_text: str
    rows: list[str]
    at: list[int]
    values: list[list[float]]
    kinds: tuple[str, ...] = ()
    omitted: int = 0
    steps: list[int] = field(default_factory=list)

    def description(self) -> str:
        """Return the largest numbers in sentences, for readers who do not see the map."""
        cells = [
            (value, name, step)
            for name, row in zip(self.rows, self.values, strict=True)
            for value, step in zip(row, self.steps, strict=True)
            if value != _MISSING
        ]
        finite = [cell for cell in cells if math.isfinite(cell[0])]
        text = f"{self.title}: {len(self.rows)} rows, {len(self.at)} of the steps."
        if finite:
            value, name, step = max(finite)
            text += f" The largest is {value:.3g}, {name} at step {step}."
        if bad := sorted({name for value, name, _ in cells if not math.isfinite(value)}):
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            text += f" NaN or Inf in {', '.join(bad[:3])}{more}."
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the map as the page's script reads it."""
        flat = [value for row in self.values for value in row]
        return {
            "key": self.key,
            "rows": self.rows,
            "at": encode_places(self.at),
            "values": encode_values(flat),
        }


def all_heat_maps(records: Sequence[Record], axis: Axis) -> list[HeatMap]:
    """Return the maps of one rank's gradient norms, update ratios and activations that were measured."""
    maps = [_gradients(records, axis)]
    ratios = {r.step: r.update_ratio for r in records if r.update_ratio and r.applied is not False}
    maps.append(
        _heat_map(
            "ratios", "Update ratio by parameter", CHART_HELP["ratios"], ratios, axis, ("update_ratio",)
        )
    )
    rms = {r.step: {name: _rms(its) for name, its in r.activations.items()} for r in records if r.activations}
    maps.append(
        _heat_map(
            "activations", "Activations by module", CHART_HELP["activations"], rms, axis, ("activations",)
        )
    )
    return [found for found in maps if found is not None]


def _rms(statistics: Mapping[str, float]) -> float:
    return math.nan if statistics.get("nonfinite", 0) else statistics.get("rms", _MISSING)


def _gradients(records: Sequence[Record], axis: Axis) -> HeatMap | None:
    kinds = ("norm_growth", "norm_spike", "norm_drift", "nonfinite")
    columns = {r.step: _named(r) for r in records if r.tensor_norms or r.worst}
    # Records with the norms of all gradients come first: they have the order of the optimizer.
    order = [name for r in records if r.tensor_norms for name in columns[r.step]]
    help_text = CHART_HELP["gradients"]
    return _heat_map("gradients", "Gradient norm by parameter", help_text, columns, axis, kinds, order)


def _named(record: Record) -> dict[str, float]:
    names = record.tensor_names or [f"gradient {i}" for i in range(len(record.tensor_norms))]
    norms = dict(zip(names, record.tensor_norms, strict=False))
    return norms | {str(worst.get("name")): _norm(worst) for worst in record.worst}


def _norm(worst: Mapping[str, Any]) -> float:
    norm = worst.get("norm")
    is_bad = worst.get("nan_count", 0) or worst.get("inf_count", 0)
    return math.nan if is_bad or not isinstance(norm, (int, float)) else float(norm)


def _heat_map(
    key: str,
    title: str,
    help_text: str,
    columns: Mapping[int, Mapping[str, float]],
    axis: Axis,
    kinds: tuple[str, ...],
    order: Sequence[str] = (),
) -> HeatMap | None:
    names = list(dict.fromkeys([*order, *(name for column in columns.values() for name in column)]))
    if not names:
        return None
    steps = sorted(columns)
    # If there are too many steps, several share a column, which shows the largest number of each row.
    size = math.ceil(len(steps) / MOST_COLUMNS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    table = {name: [_largest(columns, group, name) for group in groups] for name in names}
    kept = sorted(names, key=lambda name: -max(map(_order, table[name])))[:MOST_ROWS]
    chosen = set(kept)
    rows = [name for name in names if name in chosen]
    firsts = [group[0] for group in groups]
    at, values = [axis.place(step) for step in firsts], [table[name] for name in rows]
    return HeatMap(key, title, help_text, rows, at, values, kinds, len(names) - len(rows), firsts)


def _largest(columns: Mapping[int, Mapping[str, float]], steps: Sequence[int], name: str) -> float:
    return max((columns[step].get(name, _MISSING) for step in steps), key=_order)


def _order(value: float) -> float:
    return value if math.isfinite(value) else math.inf
