# SPDX-License-Identifier: BSD-3-Clause
"""Recommendation of a max_norm from the gradient norms of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..detectors.trailing_window import quantile
from ..record import Event, Record

_WINDOW = 2000  # last steps that count: norms fall for long, and old ones say little
_MINIMUM = 50
_NEIGHBOURS = (0.5, 0.707, 1.0, 1.414, 2.0)
_UNSTABLE = ("norm_growth", "norm_spike", "norm_drift", "loss_spike", "nonfinite")


@dataclass
class Recommendation:
    """The recommended max_norm of a run, with the numbers behind it.

    Attributes:
        max_norm: the proposal; None if there are too few norms.
        quantiles: the quantiles of the norm in the window, by share.
        clipped: by limit, the share of steps in the window that it would have clipped. It is computed from
            the recorded norms, which other clipping would have changed.
        present: the limit that the run had; None without one.
        warm_up: how many steps at the start were ignored as warm-up.
        steps: how many steps the window has.
        events: the events of instability in the window.
        reading: what the numbers mean, in sentences.
    """

    max_norm: float | None
    quantiles: dict[float, float] = field(default_factory=dict)
    clipped: dict[float, float] = field(default_factory=dict)
    present: float | None = None
    warm_up: int = 0
    steps: int = 0
    events: list[Event] = field(default_factory=list)
    reading: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        if self.max_norm is not None:
            lines.append(f"max_norm {self.max_norm:.3g}")
            lines.append(f"from {self.steps} steps, after {self.warm_up} steps of warm-up")
            quantiles = ", ".join(f"{q:.0%} {value:.3g}" for q, value in self.quantiles.items())
            lines.append(f"norms: {quantiles}")
            for limit, share in self.clipped.items():
                note = " (current)" if limit == self.present else " (proposed)" * (limit == self.max_norm)
                lines.append(f"  {limit:<8.3g} would have clipped {share:.1%} of them{note}")
        return "\n".join([*lines, *self.reading])


def recommend(records: Sequence[Record], window_steps: int = _WINDOW) -> Recommendation:
    """Propose a max_norm for a run.

    It is the 95th percentile of the norm in the last steps after warm-up. If events of instability persist at
    the current limit, in two steps or more, it is at most the next lower value of 1, 2, 5, 10 ...

    Args:
        records: the records of one rank, in the order of the steps; those without a finite norm are ignored.
        window_steps: how many of the last steps count.
    """
    known = [r for r in records if r.has_finite_norm]
    start = warm_up_steps(known)
    window = known[start:][-window_steps:]
    present = next((r.max_norm for r in reversed(known) if r.max_norm is not None), None)
    if present is not None and not math.isfinite(present):
        present = None
    if len(window) < _MINIMUM:
        reading = f"{len(window)} steps with a finite norm after warm-up are too few: {_MINIMUM} are needed."
        return Recommendation(None, present=present, warm_up=start, steps=len(window), reading=[reading])
    norms = sorted(r.total_norm for r in window if r.total_norm is not None)
    if norms[len(norms) // 2] <= 0:
        reading = "Half of the gradient norms are 0: nothing is being trained, or not in every step."
        return Recommendation(None, present=present, warm_up=start, steps=len(window), reading=[reading])
    quantiles = {q: quantile(norms, q) for q in (0.05, 0.5, 0.9, 0.95, 0.99, 1.0)}
    first = window[0].step
    events = [e for r in records if r.step >= first for e in r.events if e.kind in _UNSTABLE]
    bad_batches = {e.step for r in records for e in r.events if e.kind == "bad_batch"}
    # No limit helps against NaN in the data.
    events = [e for e in events if e.severity != "info" and e.step not in bad_batches]
    proposal = _round(quantiles[0.95])
    lower = present is not None and _persist(events, window, present) and proposal > next_lower(present)
    if present is not None and lower:
        proposal = next_lower(present)
    limits = {_round(proposal * factor) for factor in _NEIGHBOURS} | {proposal}
    limits |= {present} if present is not None else set()
    clipped = {limit: sum(n > limit for n in norms) / len(norms) for limit in sorted(limits)}
    result = Recommendation(proposal, quantiles, clipped, present, start, len(window), events)
    result.reading = _read(result, window, lower)
    return result


def _persist(events: Sequence[Event], window: Sequence[Record], limit: float) -> bool:
    """Return whether two steps or more with this limit, or with NaN or Inf, have events of instability."""
    at_limit = {r.step for r in window if r.max_norm == limit}
    steps = {e.step for e in events if e.step in at_limit or e.kind == "nonfinite"}
    return limit > 0 and len(steps) > 1


def warm_up_steps(records: Sequence[Record]) -> int:
    """Return how many records at the start belong to the warm-up.

    It ends when the learning rate has reached 99 % of its highest value, and the median norm of the next 100
    steps is at most twice that of all that follow.
    """
    rates = [max((rate for rate in r.lr if math.isfinite(rate)), default=0.0) for r in records]
    highest = max(rates, default=0.0)
    start = next((i for i, rate in enumerate(rates) if rate >= 0.99 * highest), 0)
    norms = [r.total_norm for r in records if r.total_norm is not None]
    while start + 200 < len(norms):
        later = median(norms[start:])
        if median(norms[start : start + 100]) <= 2 * later:
            break
        start += 50
    return start


def _round(limit: float) -> float:
    """Round to two digits: a third one would pretend to a precision that no quantile has."""
    return float(f"{limit:.2g}")


def next_lower(limit: float) -> float:
    """Return the largest of 1, 2, 5, 10 ... and 0.5, 0.2, 0.1 ... below the limit."""
    power = 10.0 ** math.floor(math.log10(limit)) if limit > 0 else 1.0
    candidates = [_round(power * digit) for digit in (0.5, 1.0, 2.0, 5.0)]
    return max((c for c in candidates if c < limit), default=limit / 2)


def _read(result: Recommendation, window: Sequence[Record], lower: bool) -> list[str]:
    reading = []
    middle, high = result.quantiles[0.5], result.quantiles[0.95]
    flags = [r.clipped for r in window if r.clipped is not None]
    share = sum(flags) / len(flags) if flags else 0.0
    if high < 0.5:
        reading.append(
            f"The norms are mostly below 0.5 (95 % below {high:.2g}): a max_norm of 1 hardly ever clips."
        )
    if high >= 10:
        reading.append(
            f"The norms often reach tens or hundreds (5 % above {high:.3g}, median {middle:.3g}): the run is "
            "unstable, and clipping will not make it stable."
        )
    if share > 0.9:
        reading.append(
            f"{share:.0%} of the steps were clipped: the limit sets the size of every step. Check the "
            "learning rate, then the data, then the model, before changing max_norm."
        )
    if result.events:
        text = f"{len(result.events)} events of instability in these steps, the last: {result.events[-1]}."
        if lower:
            text += f" They persist at max_norm {result.present:g}: the next lower value is proposed."
        reading.append(text)
    return reading
