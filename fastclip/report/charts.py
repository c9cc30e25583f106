# SPDX-License-Identifier: BSD-3-Clause
"""The charts of a run and their series; a chart without numbers is omitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..monitor.record import Record
from .chart_help import CHART_HELP
from .series import WINDOW, Axis, Series, trailing_quantiles, trailing_share

Records = Mapping[int, Sequence[Record]]
_MOST_RANKS = 8  # ranks with a line each; more ranks are shown by the lowest, the median and the highest
_WIDE = 30  # a loss this many times its median gets a logarithmic axis
_MOST_SERIES = 12  # lines of a chart by name: learning rates, losses


@dataclass
class Chart:
    """One chart.

    Attributes:
        key: its name in the page.
        scale: the scale of the y axis: "linear", "log", "counts" (0, then log) or "share" (0 to 1).
        unit: the unit shown beside the title.
        kinds: the kinds of events that are marked in it.
        lines: (height, label) of the fixed lines.
    """

    key: str
    title: str
    scale: str
    series: list[Series]
    unit: str = ""
    kinds: tuple[str, ...] = ()
    lines: tuple[tuple[float, str], ...] = ()

    @property
    def help_text(self) -> str:
        """How to read the chart, in a sentence or two."""
        return CHART_HELP[self.key]

    def description(self, axis: Axis) -> str:
        """Return the numbers in sentences, for readers who do not see the chart."""
        shown = [one for one in self.series if one.role != "guide"][:_MOST_RANKS]
        return f"{self.title}. " + " ".join(_describe(one, axis, self.scale == "share") for one in shown)


def _describe(series: Series, axis: Axis, as_share: bool) -> str:
    def number(value: float) -> str:
        return f"{value:.0%}" if as_share else f"{value:.4g}"

    finite, bad = series.finite(), len(series.values) - len(series.finite())
    first, last = axis.steps[series.at[0]], axis.steps[series.at[-1]]
    text = f"{series.label}: {len(series.values)} values from step {first} to {last}"
    if finite:
        text += f", first {number(series.values[0])}, last {number(series.values[-1])}"
        text += f", lowest {number(min(finite))}, highest {number(max(finite))}"
    return text + (f"; {bad} of them NaN or Inf." if bad else ".")


def all_charts(records: Records, axis: Axis) -> list[Chart]:
    """Return the charts that have numbers, in reading order."""
    first = records[min(records)]
    made = [
        _loss(records, axis),
        _losses(first, axis),
        _norm(first, axis),
        _groups(first, axis),
        _clipping(first, axis),
        _rates(first, axis),
        _scale(first, axis),
        _counts(first, axis),
        _updates(first, axis),
        _weights(first, axis),
        *_speed(records, axis),
        _memory(records, axis),
    ]
    charts = []
    for chart in made:
        chart.series = [series for series in chart.series if series]
        if any(series.role != "guide" for series in chart.series):
            charts.append(chart)
    return charts


StepValues = Iterator[tuple[int, float | None]]


def _each(records: Sequence[Record], name: str) -> StepValues:
    return ((record.step, getattr(record, name)) for record in records)


def _by_rank(records: Records, axis: Axis, name: str) -> list[Series]:
    """Return a line for each rank that has a log."""
    lines = [axis.series(f"rank {rank}", _each(its, name), "rank") for rank, its in sorted(records.items())]
    lines = [one for one in lines if one]
    if len(lines) == 1:
        lines[0].role, lines[0].label = "main", name.replace("_", " ")
    return lines if len(lines) <= _MOST_RANKS else _rank_summary(lines)


def _exchanged(records: Sequence[Record], axis: Axis, key: str) -> list[Series]:
    """Return a line for each rank from one rank's log, which has the numbers that the ranks exchanged."""
    world = max((len(record.ranks.get(key, ())) for record in records), default=0)

    def values_of(rank: int) -> StepValues:
        for record in records:
            values = record.ranks.get(key, ())
            yield record.step, values[rank] if rank < len(values) else None

    lines = [axis.series(f"rank {rank}", values_of(rank), "rank") for rank in range(world)]
    return lines if world <= _MOST_RANKS else _rank_summary(lines)


def _scaled(lines: list[Series], factor: float) -> list[Series]:
    for line in lines:
        line.values = [value * factor for value in line.values]
    return lines


def _rank_summary(lines: Sequence[Series]) -> list[Series]:
    """Return the lowest, the median and the highest of many lines; the highest keeps NaN and Inf."""
    by_place: dict[int, list[float]] = {}
    for line in lines:
        for place, value in zip(line.at, line.values, strict=True):
            by_place.setdefault(place, []).append(value)
    places = sorted(by_place)
    breaks = sorted({place for line in lines for place in line.breaks})
    kinds: dict[str, Callable[[list[float]], float]] = {
        "highest rank": lambda its: next((v for v in its if not math.isfinite(v)), max(its)),
        "median rank": lambda its: median([v for v in its if math.isfinite(v)] or [math.nan]),
        "lowest rank": lambda its: min([v for v in its if math.isfinite(v)] or [math.nan]),
    }
    roles = {"median rank": "main"}
    return [
        Series(label, places, [of(by_place[place]) for place in places], breaks, roles.get(label, "rank"))
        for label, of in kinds.items()
    ]


def _loss(records: Records, axis: Axis) -> Chart:
    lines = _by_rank(records, axis, "loss")
    if len(records) == 1 and len(by_rank := _exchanged(next(iter(records.values())), axis, "loss")) > 1:
        lines = by_rank
    if len(lines) == 1 and (count := len(lines[0].at)) >= WINDOW:
        lines[0].role = "faint"
        size = min(WINDOW, max(20, count // 50))
        lines += trailing_quantiles(lines[0], {f"median of {size}": 0.5}, size, size // 4)
    kinds = ("loss_spike", "nonfinite", "exception", "bad_batch", "batch_shift")
    return Chart("loss", "Loss", _scale_for(lines), lines, kinds=kinds)


def _scale_for(lines: Sequence[Series]) -> str:
    """Return "log" for an explosion, of which a linear axis would only show the last steps."""
    values = [value for line in lines for value in line.finite()]
    is_wide = bool(values) and min(values) > 0 and max(values) > _WIDE * median(values)
    return "log" if is_wide else "linear"


def _named(records: Sequence[Record], axis: Axis, name: str, role: str = "main") -> list[Series]:
    """Return a line for each name in a mapping, at most _MOST_SERIES; the first eight are shown at first."""
    names = list(dict.fromkeys(key for record in records for key in getattr(record, name)))[:_MOST_SERIES]
    return [
        axis.series(key, ((r.step, getattr(r, name).get(key)) for r in records), role, number < _MOST_RANKS)
        for number, key in enumerate(names)
    ]


def _losses(records: Sequence[Record], axis: Axis) -> Chart:
    lines = _named(records, axis, "losses")
    return Chart("losses", "Other losses", _scale_for(lines), lines)


def _norm(records: Sequence[Record], axis: Axis) -> Chart:
    norm = axis.series("total_norm", _each(records, "total_norm"), "faint")
    limit = axis.series("max_norm", _each(records, "max_norm"), "limit")
    # max_norm=inf means no limit, and is not a line.
    limit = limit if limit.finite() else axis.series("max_norm", ())
    percentiles = trailing_quantiles(norm, {"p50": 0.5, "p95": 0.95})
    kinds = ("norm_growth", "norm_spike", "norm_drift", "nonfinite")
    return Chart("norm", "Gradient norm", "log", [norm, *percentiles, limit], kinds=kinds)


def _groups(records: Sequence[Record], axis: Axis) -> Chart:
    return Chart("groups", "Gradient norm by group", "log", _named(records, axis, "group_norms"))


def _clipping(records: Sequence[Record], axis: Axis) -> Chart:
    flags = axis.series("clipped", ((r.step, r.clipped) for r in records))
    share = trailing_share(flags, f"share of {WINDOW} steps")
    lines = ((0.9, "too many"),)
    return Chart("clipping", "Share of clipped steps", "share", [share], "", ("clip_share",), lines)


def _rates(records: Sequence[Record], axis: Axis) -> Chart:
    count = min(max((len(record.lr) for record in records), default=0), _MOST_SERIES)
    series = [
        axis.series(
            "learning rate" if count == 1 else f"group {group}",
            ((r.step, r.lr[group] if group < len(r.lr) else None) for r in records),
            shown=group < _MOST_RANKS,
        )
        for group in range(count)
    ]
    distinct: dict[Any, Series] = {}
    for one in series:
        known = distinct.setdefault((tuple(one.at), tuple(one.values)), one)
        if known is not one:
            known.label = f"{known.label}, {one.label.removeprefix('group ')}"
    return Chart("rate", "Learning rate", "linear", list(distinct.values()))


def _scale(records: Sequence[Record], axis: Axis) -> Chart:
    series = axis.series("loss scale", _each(records, "loss_scale"))
    return Chart("scale", "Loss scale", "log", [series], kinds=("loss_scale",))


def _counts(records: Sequence[Record], axis: Axis) -> Chart:
    series = [
        axis.series(label, _each(records, name))
        for label, name in (("NaN", "nan_count"), ("Inf", "inf_count"))
    ]
    series = [one if any(one.values) else axis.series(one.label, ()) for one in series]
    return Chart("counts", "NaN and Inf in the gradients", "counts", series, "elements", ("nonfinite",))


def _updates(records: Sequence[Record], axis: Axis) -> Chart:
    known = [
        (r.step, list(r.update_ratio.values())) for r in records if r.update_ratio and r.applied is not False
    ]

    def bad(values: list[float]) -> float | None:
        return next((value for value in values if not math.isfinite(value)), None)

    def of(statistic: Callable[[list[float]], float]) -> StepValues:
        return ((step, statistic(values) if (b := bad(values)) is None else b) for step, values in known)

    series = [axis.series("largest", of(max)), axis.series("median", of(median))]
    lines = ((0.001, "usual"), (0.2, "median too high"))
    return Chart("updates", "Update ratio", "log", series, "", ("update_ratio",), lines)


def _weights(records: Sequence[Record], axis: Axis) -> Chart:
    series = axis.series("norm of all parameters", _each(records, "param_norm"))
    return Chart("weights", "Parameter norm", "linear", [series])


def _speed(records: Records, axis: Axis) -> list[Chart]:
    lines = _scaled(_by_rank(records, axis, "step_time"), 1e3)
    charts = [Chart("time", "Step time", "log", lines, "ms", ("rank",))]
    first = records[min(records)]
    by_rank = _scaled(_exchanged(first, axis, "seconds"), 1e3)
    if len(by_rank) > 1:
        charts.append(Chart("seconds", "Time from batch to loss", "log", by_rank, "ms", ("rank",)))
    # One of the two is enough: samples and tokens differ by the length only.
    name = "tokens" if any(record.tokens_per_second is not None for record in first) else "samples"
    series = axis.series(f"{name}/s", _each(first, f"{name}_per_second"))
    return [*charts, Chart("throughput", f"{name.capitalize()} per second", "linear", [series])]


def _memory(records: Records, axis: Axis) -> Chart:
    series = []
    for rank, its in sorted(records.items())[:_MOST_RANKS]:
        for one in _named(its, axis, "memory"):
            one.label += f", rank {rank}" if len(records) > 1 else ""
            series += _scaled([one], 2**-20)
    return Chart("memory", "Memory", "linear", series, "MiB", ("memory_growth",))
