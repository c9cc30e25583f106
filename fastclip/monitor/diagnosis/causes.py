# SPDX-License-Identifier: BSD-3-Clause
"""Possible causes of an event, each with its evidence in the records."""

from __future__ import annotations

import math
from statistics import median

from ..record import Record
from .findings import GROWING, EventContext, Finding

_DATA_LOOKBACK = 10  # steps; a bad batch acts at once, or when its update is used
_FLOAT16_MAX = 65504.0


def find_causes(context: EventContext) -> list[Finding]:
    """Return the possible causes of an event, the likeliest first.

    The order is data, learning rate and loss scale, model. If the event is about memory or a slow rank, that
    comes right after the data.
    """
    found = [*data_findings(context), *rate_findings(context), *model_findings(context)]
    if context.event.kind in ("memory_growth", "rank"):
        cause = "memory" if context.event.kind == "memory_growth" else "rank"
        found.sort(key=lambda f: f.cause != cause and f.area != "data")
    return _distinct(found)


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Return one finding for each cause, step and rank, with the samples that any of them has.

    All processes report a rank that differs, and that rank reports its batch as well.
    """
    kept: dict[tuple[str, int, int], Finding] = {}
    for finding in findings:
        first = kept.setdefault((finding.cause, finding.step, finding.rank), finding)
        first.sample_ids = first.sample_ids or finding.sample_ids
    return list(kept.values())


# Data.

_BAD_BATCH = {
    "nonfinite": "nonfinite_batch",
    "token_ids": "token_ids",
    "labels": "labels",
    "no_elements": "empty_batch",
    "constant": "empty_samples",
    "length": "length",
    "distribution": "label_shift",
    "mean": "input_shift",
    "peak": "outlier",
}


def data_findings(context: EventContext) -> list[Finding]:
    """Find batches shortly before the event that were bad, or unlike those before; certain ones first."""
    oldest = context.event.step - _DATA_LOOKBACK
    near = [e for e in context.of_kind("bad_batch", "batch_shift", "rank") if e.step >= oldest]
    near.sort(
        key=lambda e: (e.severity != "error", ("bad_batch", "rank", "batch_shift").index(e.kind), e.step)
    )
    found: list[Finding] = []
    for event in near:
        cause = _BAD_BATCH.get(str(event.values.get("problem", "")), "unusual_batch")
        if event.kind == "rank":
            if event.severity != "error":
                continue  # a slow or otherwise different rank is not the data
            cause = "nonfinite_batch" if "batch_nonfinite" in event.values else "rank_nonfinite"
        ids = event.values.get("sample_ids") or context.sample_ids(event.step, event.rank)
        found.append(Finding("data", cause, event.message, event.step, event.rank, list(ids)))
    return found or _from_exception(context)


def _from_exception(context: EventContext) -> list[Finding]:
    event = context.event
    error = str(event.values.get("error", ""))
    if event.kind != "exception" or not ("out of bounds" in error or "out of range" in error):
        return []
    batch = context.own[-1].batch if context.own else {}
    integers = {n: b for n, b in batch.items() if {"histogram", "min", "max"} <= set(b)}
    ranges = [f"{n} {b['min']:.0f} to {b['max']:.0f}" for n, b in integers.items()]
    text = f"{error}; integers of the batch: {', '.join(ranges) or 'not recorded'}"
    ids = context.sample_ids(event.step, event.rank)
    return [Finding("data", "labels", text, event.step, event.rank, ids)]


# Learning rate, warm-up, clipping, AMP.


def rate_findings(context: EventContext) -> list[Finding]:
    """Find causes in the learning rate, the clipping and the loss scale.

    Measurements come first: weights that a step replaces. Then comes the loss scale, unless the norms or the
    loss grew before it fell; then circumstances: no warm-up, a rising rate, clipping in every step.
    """
    measured = _update_ratio(context)
    direct = [measured] if measured is not None else []
    amp = _amp(context)
    if not context.is_unstable():
        return [*direct, *amp]
    around = [f for f in (_warm_up(context), _rising(context), _clipping(context)) if f is not None]
    grew = any(e.step < context.event.step and e.severity != "info" for e in context.of_kind(*GROWING))
    return [*direct, *around, *amp] if grew else [*direct, *amp, *around]


def _update_ratio(context: EventContext) -> Finding | None:
    events = context.of_kind("update_ratio")
    if not events:
        return None
    worst = max(events, key=lambda e: e.values.get("median", 0.0))
    if worst.values.get("median", 0.0) <= 0.1:
        return Finding("rate", "vanishing_updates", events[0].message, events[0].step, events[0].rank)
    text = f"the learning rate is too high: {worst.message} (about 0.001 is usual)"
    names = [worst.values["parameter"]] if "parameter" in worst.values else []
    return Finding("rate", "learning_rate", text, worst.step, worst.rank, [], names)


def _highest_rate(record: Record) -> float:
    return max(record.lr, default=math.nan)


def _warm_up(context: EventContext) -> Finding | None:
    start = context.starts.get(context.event.rank) or next(iter(context.starts.values()), None)
    if start is None or not start.lr or start.step > 1:
        return None  # the log does not start where the training does
    steps = context.event.step - start.step
    rates = [_highest_rate(r) for r in context.own if r.lr]
    if not rates or steps > 500 or _highest_rate(start) < 0.5 * max(rates):
        return None
    text = (
        f"no warm-up: the first step already used learning rate {_highest_rate(start):.3g}; the event came "
    )
    text += f"{steps} steps later at {rates[-1]:.3g}"
    return Finding("rate", "no_warm_up", text, start.step, context.event.rank)


def _rising(context: EventContext) -> Finding | None:
    rates = [(r.step, _highest_rate(r)) for r in context.own if r.lr]
    if len(rates) < 2:
        return None
    before = rates[max(0, len(rates) - 51)]
    now = rates[-1]
    if not now[1] > 1.5 * before[1]:
        return None
    text = f"the learning rate was rising, from {before[1]:.3g} at step {before[0]} to {now[1]:.3g}"
    return Finding("rate", "rising_rate", text, now[0], context.event.rank)


def _clipping(context: EventContext) -> Finding | None:
    known = [r for r in context.own[-100:] if r.clipped is not None]
    clipped = [r for r in known if r.clipped]
    if len(known) < 20 or len(clipped) < 0.5 * len(known):
        return None
    text = (
        f"{len(clipped)} of the {len(known)} steps before were clipped at max_norm {clipped[-1].max_norm}: "
    )
    text += "only clipping keeps the run stable; lower the learning rate or check the data before max_norm"
    return Finding("rate", "clipping", text, known[-1].step, context.event.rank)


def _amp(context: EventContext) -> list[Finding]:
    found = []
    if events := [e for e in context.of_kind("loss_scale") if e.severity != "info"]:
        worst = next((e for e in events if e.severity == "error"), events[-1])
        text = worst.message
        found.append(
            Finding("amp", "loss_scale", text, worst.step, worst.rank, [], _bad_parameters(context)[1])
        )
    if not any(r.loss_scale is not None for r in context.own):
        return found
    for record in reversed(context.own):
        tops = {name: a.get("max", 0.0) for name, a in record.activations.items()}
        near = {name: top for name, top in tops.items() if 0.25 * _FLOAT16_MAX < top < math.inf}
        if near:
            name = max(near, key=lambda n: near[n])
            text = f"the output of {name} reaches {near[name]:.3g}; the largest float16 is {_FLOAT16_MAX:.0f}"
            found.append(Finding("amp", "float16_range", text, record.step, record.rank))
            break
    return found


def _bad_parameters(context: EventContext) -> tuple[int, list[str]]:
    """Return the last step up to the event whose gradients had NaN or Inf, and the parameters' names."""
    for record in reversed(context.own):
        if record.step < context.event.step - _DATA_LOOKBACK:
            break
        bad = [t for t in record.worst if t.get("nan_count", 0) + t.get("inf_count", 0)]
        if names := [t.get("name", "?") for t in bad]:
            return record.step, names
    return context.event.step, []


# The model.


def model_findings(context: EventContext) -> list[Finding]:
    """Find causes in modules and parameters, then in memory and slow processes."""
    found = [
        Finding("model", "activations", e.message, e.step, e.rank) for e in context.of_kind("activations")[:3]
    ]
    step, names = _bad_parameters(context)
    if names:
        text = "gradients with NaN or Inf"
        found.append(Finding("model", "nonfinite_gradients", text, step, context.event.rank, [], names))
    found += _largest(context)
    found += [
        Finding("system", "memory", e.message, e.step, e.rank) for e in context.of_kind("memory_growth")[:1]
    ]
    found += [
        Finding("system", "rank", e.message, e.step, e.rank)
        for e in [e for e in context.of_kind("rank") if e.severity != "error"][:1]
    ]
    return found


def _largest(context: EventContext) -> list[Finding]:
    """Find the gradients that make up the norm, if it is twice its median or an event reported it."""
    if not context.of_kind("norm_growth", "norm_spike", "norm_drift", "loss_spike"):
        return []
    finite = [r for r in context.own if r.worst and r.has_finite_norm and r.total_norm]
    if not finite:
        return []
    # The most conspicuous of the last steps.
    record = max(finite[-10:], key=lambda r: r.total_norm or 0.0)
    reported = context.of_kind("norm_growth", "norm_spike", "norm_drift")
    if not reported and (record.total_norm or 0.0) < 2 * median(r.total_norm or 0.0 for r in finite):
        return []
    assert record.total_norm is not None
    norms = [(t.get("name", "?"), t.get("norm", math.nan)) for t in record.worst]
    shares = [(name, norm / record.total_norm) for name, norm in norms if math.isfinite(norm)]
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    text = f"largest shares of the gradient norm {record.total_norm:.3g}: {shown}"
    names = [name for name, _ in shares]
    return [Finding("model", "largest_gradients", text, record.step, record.rank, [], names)]
