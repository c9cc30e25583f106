# SPDX-License-Identifier: BSD-3-Clause
"""Comparison of the replayed step with the recorded one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..monitor.record import Record
from .build import plain_name
from .step_parts import MicroBatch, Outcome


@dataclass(frozen=True)
class ComparedNumber:
    """A number as recorded and as replayed."""

    name: str
    recorded: float
    replayed: float | None
    same: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        replayed = "none" if self.replayed is None else f"{self.replayed:.9g}"
        return f"{self.name}: {self.recorded:.9g} recorded, {replayed} replayed"


def same(a: float, b: float | None, tolerance: float) -> bool:
    """Return whether two numbers are equal, NaN and Inf included, or within a relative tolerance."""
    if b is None:
        return False
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=0.0)


def compare_step(
    record: Record,
    micros: Sequence[MicroBatch],
    outcome: Outcome,
    losses: Sequence[float],
    tolerance: float,
    with_gradients: bool,
    measures_all: bool,
) -> list[ComparedNumber]:
    """Compare the recorded numbers with those of the replay.

    Args:
        losses: the replayed losses of the micro-batches.
        tolerance: the relative tolerance; 0 for equality to the last bit.
        with_gradients: whether the gradients of all processes were replayed.
        measures_all: whether recorded norms of single gradients include non-finite elements.
    """
    found: list[ComparedNumber] = []

    def add(name: str, recorded: float | None, replayed: float | None, tolerance: float = tolerance) -> None:
        if recorded is not None:
            found.append(ComparedNumber(name, recorded, replayed, same(recorded, replayed, tolerance)))

    for micro, loss in zip(micros, losses, strict=True):
        if len(micros) > 1:
            add(f"loss of micro-batch {micro.micro}", micro.loss, loss)
    add(
        "loss",
        record.loss,
        _mean(record.loss, losses, outcome if len(losses) == len(outcome.losses) else None),
    )
    if not with_gradients or record.total_norm is None:
        return found
    # A norm of the norms of groups is rounded differently.
    add(
        "total_norm",
        record.total_norm,
        outcome.total_norm,
        max(tolerance, 1e-6) if record.group_norms else tolerance,
    )
    # Counts of NaN and Inf are exact on a CPU; elsewhere it only matters whether there are any.
    for name, recorded, count in (
        ("nan_count", record.nan_count, outcome.nan_count),
        ("inf_count", record.inf_count, outcome.inf_count),
    ):
        add(name, recorded, count, 1.0 if tolerance and recorded and count else 0.0)
    own = {plain_name(t.name): t for t in outcome.gradients}
    for its in record.worst:
        gradient = own.get(plain_name(its["name"]))
        if measures_all:  # a square root by Python in the record, by torch here
            replayed = None if gradient is None else gradient.norm
            add(f"norm of {its['name']}", its["norm"], replayed, max(tolerance, 1e-12))
        if not tolerance:
            add(f"NaN in {its['name']}", its["nan_count"], gradient and gradient.nan_count)
            add(f"Inf in {its['name']}", its["inf_count"], gradient and gradient.inf_count)
    return found


def _mean(recorded: float | None, losses: Sequence[float], outcome: Outcome | None) -> float:
    """Return the mean loss as the training computed it: from tensors, or from numbers."""
    of_numbers = sum(losses) / len(losses)
    if outcome is None or recorded == of_numbers:
        return of_numbers
    return outcome.loss
