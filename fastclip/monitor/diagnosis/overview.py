# SPDX-License-Identifier: BSD-3-Clause
"""An overview of a run: one screen of text that shows how it is doing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from ..record import Event, Record

_EVENTS = 8


def run_overview(records: Sequence[Record], events: Sequence[Event]) -> str:
    """Return about a dozen lines of at most 100 characters each.

    Args:
        records: the records that the monitor still keeps, the newest last.
        events: all events of the run, in the order of the steps.
    """
    if not records:
        return "No step has been recorded yet."
    last = records[-1]
    lines = [f"step {last.step}" + (f"   rank {last.rank}" if last.ranks else "")]
    rows = [_loss(records), _norm(records), _clipping(records), _steps(records), _scale(records)]
    rows += [_weights(records), _speed(records), _batch(last)]
    lines += [f"  {name:<12}{text}" for name, text in rows if text]
    notable = [event for event in events if event.severity != "info"]
    counts = ", ".join(f"{kind} {n}" for kind, n in Counter(e.kind for e in notable).most_common())
    lines.append(f"  {'events':<12}{counts or 'none'}")
    lines += [f"    {event}" for event in notable[-_EVENTS:]]
    return "\n".join(map(_shorten, lines))


def _shorten(text: str, width: int = 92) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _finite(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None and math.isfinite(v)]


def _loss(records: Sequence[Record]) -> tuple[str, str]:
    losses = _finite([r.loss for r in records])
    if not losses:
        return "loss", ""
    last = records[-1].loss
    shown = "not reported" if last is None else f"{last:.5g}"
    return "loss", f"{shown}   lowest {min(losses):.4g}   last 20 {_mean(losses[-20:]):.4g}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _norm(records: Sequence[Record]) -> tuple[str, str]:
    norms = _finite([r.total_norm for r in records])
    if not norms:
        return "norm", ""
    worst = records[-1].worst
    top = f"   largest: {worst[0].get('name')} {worst[0].get('norm', math.nan):.3g}" if worst else ""
    last = records[-1].total_norm
    shown = "unknown" if last is None else f"{last:.4g}"
    return "norm", f"{shown}   median {median(norms):.4g}   highest {max(norms):.4g}{top}"


def _clipping(records: Sequence[Record]) -> tuple[str, str]:
    flags = [r.clipped for r in records if r.clipped is not None]
    limit = records[-1].max_norm
    if not flags or limit is None:
        return "clipping", "off: the gradients are only observed" if limit is None else ""
    coefficients = _finite([r.clip_coef for r in records if r.clipped])
    lowest = f"   down to {min(coefficients):.2g} of the norm" if coefficients else ""
    return "clipping", f"{sum(flags)} of {len(flags)} steps at max_norm {limit:.3g}{lowest}"


def _steps(records: Sequence[Record]) -> tuple[str, str]:
    last = records[-1]
    if not last.skipped_steps:
        return "skipped", "no step"
    steps = "step" if last.skipped_steps == 1 else "steps"
    overflows = f", {last.overflows} of them by the loss scaler" if last.overflows else ""
    return "skipped", f"{last.skipped_steps} {steps}{overflows}"


def _scale(records: Sequence[Record]) -> tuple[str, str]:
    scale = records[-1].loss_scale
    return "loss scale", "" if scale is None else f"{scale:g}"


def _weights(records: Sequence[Record]) -> tuple[str, str]:
    record = next((r for r in reversed(records) if r.update_ratio and r.applied is not False), None)
    if record is None:
        return "weights", ""
    ratios = _finite(list(record.update_ratio.values()))
    if not ratios:
        return "weights", ""
    norm = "" if record.param_norm is None else f"norm {record.param_norm:.4g}   "
    rates = "   lr " + "/".join(f"{rate:.3g}" for rate in records[-1].lr[:4]) if records[-1].lr else ""
    return "weights", f"{norm}a step changes them by {median(ratios):.2g} of their norm{rates}"


def _speed(records: Sequence[Record]) -> tuple[str, str]:
    times = _finite([r.step_time for r in records[-100:]])
    if not times:
        return "speed", ""
    parts = [f"{median(times) * 1e3:.3g} ms a step"]
    for name in ("samples", "tokens"):
        rates = _finite([getattr(r, f"{name}_per_second") for r in records[-100:]])
        if rates:
            parts.append(f"{median(rates):.3g} {name}/s")
    memory = next((r.memory for r in reversed(records) if r.memory), {})
    parts += [f"{key} {size / 2**20:.0f} MiB" for key, size in memory.items()]
    return "speed", "   ".join(parts)


def _batch(last: Record) -> tuple[str, str]:
    shown = [f"{name} {b.get('dtype', '')}{b.get('shape', '')}" for name, b in list(last.batch.items())[:3]]
    return "batch", ", ".join(shown)
