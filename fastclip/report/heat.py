# SPDX-License-Identifier: BSD-3-Clause
"""Numbers by parameter or module and step, as the rows and columns of a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..monitor.record import Record
from .chart_help import READINGS
from .encoding import encoded, encoded_places
from .series import Axis

MOST_ROWS = 120
MOST_COLUMNS = 1000
_MISSING = -1.0  # norms, ratios and rms are never negative


@dataclass
class HeatMap:
    """A number for each row and column; what is not finite counts as larger than all.

    Attributes:
        rows: names, in the order of the model as far as it is known.
        at: the place of each column on the axis of the steps.
        values: by row.
        left_out: how many rows there would be more.
    """

    key: str
    title: str
    reading: str
    rows: list[str]
    at: list[int]
    values: list[list[float]]
    kinds: tuple[str, ...] = ()
    left_out: int = 0
    steps: list[int] = field(default_factory=list)

    def told(self) -> str:
        """The largest numbers in a sentence, for who does not see the map."""
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
        flat = [value for row in self.values for value in row]
        return {"key": self.key, "rows": self.rows, "at": encoded_places(self.at), "values": encoded(flat)}


def all_heat_maps(records: Sequence[Record], axis: Axis) -> list[HeatMap]:
    """Of one rank: gradient norms, update ratios and activations, as far as they were measured."""
    maps = [_gradients(records, axis)]
    ratios = {r.step: r.update_ratio for r in records if r.update_ratio and r.applied is not False}
    maps.append(
        _heat_map("ratios", "Update ratio by parameter", READINGS["ratios"], ratios, axis, ("update_ratio",))
    )
    rms = {r.step: {name: _rms(its) for name, its in r.activations.items()} for r in records if r.activations}
    maps.append(
        _heat_map(
            "activations", "Activations by module", READINGS["activations"], rms, axis, ("activations",)
        )
    )
    return [found for found in maps if found is not None]


def _rms(statistics: Mapping[str, float]) -> float:
    return math.nan if statistics.get("nonfinite", 0) else statistics.get("rms", _MISSING)


def _gradients(records: Sequence[Record], axis: Axis) -> HeatMap | None:
    kinds = ("norm_growth", "norm_spike", "norm_drift", "nonfinite")
    columns = {r.step: _named(r) for r in records if r.tensor_norms or r.worst}
    # First those of all gradients, which come in the order of the optimizer.
    order = [name for r in records if r.tensor_norms for name in columns[r.step]]
    reading = READINGS["gradients"]
    return _heat_map("gradients", "Gradient norm by parameter", reading, columns, axis, kinds, order)


def _named(record: Record) -> dict[str, float]:
    names = record.tensor_names or [f"gradient {i}" for i in range(len(record.tensor_norms))]
    norms = dict(zip(names, record.tensor_norms, strict=False))
    return norms | {str(told.get("name")): _norm(told) for told in record.worst}


def _norm(worst: Mapping[str, Any]) -> float:
    norm = worst.get("norm")
    is_bad = worst.get("nan_count", 0) or worst.get("inf_count", 0)
    return math.nan if is_bad or not isinstance(norm, (int, float)) else float(norm)


def _heat_map(
    key: str,
    title: str,
    reading: str,
    columns: Mapping[int, Mapping[str, float]],
    axis: Axis,
    kinds: tuple[str, ...],
    order: Sequence[str] = (),
) -> HeatMap | None:
    names = list(dict.fromkeys([*order, *(name for column in columns.values() for name in column)]))
    if not names:
        return None
    steps = sorted(columns)
    # Several steps share a column where there are too many: the largest of each row stays.
    size = math.ceil(len(steps) / MOST_COLUMNS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    table = {name: [_largest(columns, group, name) for group in groups] for name in names}
    kept = sorted(names, key=lambda name: -max(map(_order, table[name])))[:MOST_ROWS]
    chosen = set(kept)
    rows = [name for name in names if name in chosen]
    firsts = [group[0] for group in groups]
    at, values = [axis.place(step) for step in firsts], [table[name] for name in rows]
    return HeatMap(key, title, reading, rows, at, values, kinds, len(names) - len(rows), firsts)


def _largest(columns: Mapping[int, Mapping[str, float]], steps: Sequence[int], name: str) -> float:
    return max((columns[step].get(name, _MISSING) for step in steps), key=_order)


def _order(value: float) -> float:
    return value if math.isfinite(value) else math.inf
