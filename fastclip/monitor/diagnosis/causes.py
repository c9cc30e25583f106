# SPDX-License-Identifier: BSD-3-Clause
"""What the records say for and against each cause of an event."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..record import Event, Record

_DATA_REACH = 10  # steps; a bad batch acts at once, or when its update is used
_FLOAT16_MAX = 65504.0
# What a learning rate too high ends in, before anything is infinite ...
_GROWING = ("norm_growth", "norm_spike", "norm_drift", "loss_spike", "update_ratio")
# ... and with it.
_UNSTABLE = (*_GROWING, "nonfinite", "loss_scale", "activations")


@dataclass
class Finding:
    """A reason, with its evidence.

    Attributes:
        area: "data", "rate" (learning rate, warm-up, clipping), "amp", "model" or "system".
        cause: a word for it.
        text: the sentence with the numbers.
        step, rank: where it was seen.
        sample_ids: of the batch, as given to the monitor.
        parameters: names.
    """

    area: str
    cause: str
    text: str
    step: int
    rank: int = 0
    sample_ids: list[Any] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"step {self.step}, rank {self.rank}: {self.text}"]
        if self.sample_ids:
            more = ", ..." if len(self.sample_ids) > 16 else ""
            parts.append(f"samples {', '.join(map(str, self.sample_ids[:16]))}{more}")
        if self.parameters:
            parts.append(f"parameters {', '.join(self.parameters[:5])}")
        return "; ".join(parts)


@dataclass
class Case:
    """What a diagnosis has to go by.

    Attributes:
        event: what is to be explained.
        records: by rank, those of the steps up to the event.
        starts: by rank, the first record of the run.
        events: up to the event, in the order of the steps.
    """

    event: Event
    records: dict[int, list[Record]]
    starts: dict[int, Record]
    events: list[Event]

    def of_kind(self, *kinds: str) -> list[Event]:
        return [e for e in self.events if e.kind in kinds]

    @property
    def own(self) -> list[Record]:
        """The records of the rank that the event names, else of the first."""
        known = self.records
        return known.get(self.event.rank) or (next(iter(known.values())) if known else [])

    def is_unstable(self) -> bool:
        """Whether the event is of a training that diverges, rather than a full memory or a slow process."""
        return self.event.kind in (*_UNSTABLE, "clip_share")

    def sample_ids(self, step: int, rank: int) -> list[Any]:
        return next((r.sample_ids for r in self.records.get(rank, []) if r.step == step), [])


def findings_of(case: Case) -> list[Finding]:
    """The likeliest first: what the event itself says of the system, then data, learning rate and loss scale,
    model.
    """
    found = [*data_findings(case), *rate_findings(case), *model_findings(case)]
    if case.event.kind in ("memory_growth", "rank"):
        cause = "memory" if case.event.kind == "memory_growth" else "rank"
        found.sort(key=lambda f: f.cause != cause and f.area != "data")
    return _distinct(found)


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Each once: all processes tell of a rank that differs, and that rank of its batch as well. Of the same
    cause, step and rank the first is kept, with the samples that any of them names.
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


def data_findings(case: Case) -> list[Finding]:
    """Batches that were bad, or unlike those before, shortly before the event; certain ones first."""
    near = [
        e for e in case.of_kind("bad_batch", "batch_shift", "rank") if e.step >= case.event.step - _DATA_REACH
    ]
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
        ids = event.values.get("sample_ids") or case.sample_ids(event.step, event.rank)
        found.append(Finding("data", cause, event.message, event.step, event.rank, list(ids)))
    return found or _from_exception(case)


def _from_exception(case: Case) -> list[Finding]:
    event = case.event
    error = str(event.values.get("error", ""))
    if event.kind != "exception" or not ("out of bounds" in error or "out of range" in error):
        return []
    batch = case.own[-1].batch if case.own else {}
    integers = {n: b for n, b in batch.items() if {"histogram", "min", "max"} <= set(b)}
    ranges = [f"{n} {b['min']:.0f} to {b['max']:.0f}" for n, b in integers.items()]
    text = f"{error}; integers of the batch: {', '.join(ranges) or 'not told'}"
    ids = case.sample_ids(event.step, event.rank)
    return [Finding("data", "labels", text, event.step, event.rank, ids)]


# Learning rate, warm-up, clipping, AMP.


def rate_findings(case: Case) -> list[Finding]:
    """What the learning rate, the clipping and the loss scale did.

    First what was measured, weights that a step replaces; then the loss scale, unless the norms or the loss
    grew before it fell; then circumstances: no warm-up, a rising rate, clipping all the time.
    """
    measured = _update_ratio(case)
    direct = [measured] if measured is not None else []
    amp = _amp(case)
    if not case.is_unstable():
        return [*direct, *amp]
    around = [f for f in (_warm_up(case), _rising(case), _clipping(case)) if f is not None]
    grew = any(e.step < case.event.step and e.severity != "info" for e in case.of_kind(*_GROWING))
    return [*direct, *around, *amp] if grew else [*direct, *amp, *around]


def _update_ratio(case: Case) -> Finding | None:
    told = case.of_kind("update_ratio")
    if not told:
        return None
    worst = max(told, key=lambda e: e.values.get("median", 0.0))
    if worst.values.get("median", 0.0) <= 0.1:
        return Finding("rate", "vanishing_updates", told[0].message, told[0].step, told[0].rank)
    text = f"the learning rate is too high: {worst.message} (about 0.001 is usual)"
    names = [worst.values["parameter"]] if "parameter" in worst.values else []
    return Finding("rate", "learning_rate", text, worst.step, worst.rank, [], names)


def _peak(record: Record) -> float:
    return max(record.lr, default=math.nan)


def _warm_up(case: Case) -> Finding | None:
    start = case.starts.get(case.event.rank) or next(iter(case.starts.values()), None)
    if start is None or not start.lr or start.step > 1:
        return None  # the log does not begin where the training does
    steps = case.event.step - start.step
    rates = [_peak(r) for r in case.own if r.lr]
    if not rates or steps > 500 or _peak(start) < 0.5 * max(rates):
        return None
    text = f"no warm-up: the first step already used learning rate {_peak(start):.3g}, the event came "
    text += f"{steps} steps later at {rates[-1]:.3g}"
    return Finding("rate", "no_warm_up", text, start.step, case.event.rank)


def _rising(case: Case) -> Finding | None:
    rates = [(r.step, _peak(r)) for r in case.own if r.lr]
    if len(rates) < 2:
        return None
    before = rates[max(0, len(rates) - 51)]
    now = rates[-1]
    if not now[1] > 1.5 * before[1]:
        return None
    text = f"the learning rate was rising, from {before[1]:.3g} at step {before[0]} to {now[1]:.3g}"
    return Finding("rate", "rising_rate", text, now[0], case.event.rank)


def _clipping(case: Case) -> Finding | None:
    known = [r for r in case.own[-100:] if r.clipped is not None]
    clipped = [r for r in known if r.clipped]
    if len(known) < 20 or len(clipped) < 0.5 * len(known):
        return None
    text = (
        f"{len(clipped)} of the {len(known)} steps before were clipped at max_norm {clipped[-1].max_norm}: "
    )
    text += "clipping holds the run together; lower the learning rate or look at the data before max_norm"
    return Finding("rate", "clipping", text, known[-1].step, case.event.rank)


def _amp(case: Case) -> list[Finding]:
    found = []
    if events := [e for e in case.of_kind("loss_scale") if e.severity != "info"]:
        worst = next((e for e in events if e.severity == "error"), events[-1])
        text = worst.message
        found.append(Finding("amp", "loss_scale", text, worst.step, worst.rank, [], _bad_parameters(case)[1]))
    if not any(r.loss_scale is not None for r in case.own):
        return found
    for record in reversed(case.own):
        tops = {name: a.get("max", 0.0) for name, a in record.activations.items()}
        near = {name: top for name, top in tops.items() if 0.25 * _FLOAT16_MAX < top < math.inf}
        if near:
            name = max(near, key=lambda n: near[n])
            text = f"the output of {name} reaches {near[name]:.3g}; float16 ends at {_FLOAT16_MAX:.0f}"
            found.append(Finding("amp", "float16_range", text, record.step, record.rank))
            break
    return found


def _bad_parameters(case: Case) -> tuple[int, list[str]]:
    """The last step, of those just before the event, in which gradients held NaN or Inf, and their names."""
    for record in reversed(case.own):
        if record.step < case.event.step - _DATA_REACH:
            break
        bad = [t for t in record.worst if t.get("nan_count", 0) + t.get("inf_count", 0)]
        if names := [t.get("name", "?") for t in bad]:
            return record.step, names
    return case.event.step, []


# The model.


def model_findings(case: Case) -> list[Finding]:
    """Modules and parameters, the one nearest to the event first."""
    found = [
        Finding("model", "activations", e.message, e.step, e.rank) for e in case.of_kind("activations")[:3]
    ]
    step, names = _bad_parameters(case)
    if names:
        text = "gradients with NaN or Inf"
        found.append(Finding("model", "nonfinite_gradients", text, step, case.event.rank, [], names))
    found += _largest(case)
    found += [
        Finding("system", "memory", e.message, e.step, e.rank) for e in case.of_kind("memory_growth")[:1]
    ]
    found += [
        Finding("system", "rank", e.message, e.step, e.rank)
        for e in [e for e in case.of_kind("rank") if e.severity != "error"][:1]
    ]
    return found


def _largest(case: Case) -> list[Finding]:
    """Whose gradients the norm is made of, where it is the norm that is in question: it is twice its median
    or was told of.
    """
    if not case.of_kind("norm_growth", "norm_spike", "norm_drift", "loss_spike"):
        return []
    finite = [r for r in case.own if r.worst and r.has_finite_norm and r.total_norm]
    if not finite:
        return []
    # Of the last steps the one that stands out.
    record = max(finite[-10:], key=lambda r: r.total_norm or 0.0)
    norms_told = case.of_kind("norm_growth", "norm_spike", "norm_drift")
    if not norms_told and (record.total_norm or 0.0) < 2 * median(r.total_norm or 0.0 for r in finite):
        return []
    assert record.total_norm is not None
    norms = [(t.get("name", "?"), t.get("norm", math.nan)) for t in record.worst]
    shares = [(name, norm / record.total_norm) for name, norm in norms if math.isfinite(norm)]
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    text = f"the gradient norm {record.total_norm:.3g} consists of {shown} of it"
    names = [name for name, _ in shares]
    return [Finding("model", "largest_gradients", text, record.step, record.rank, [], names)]
