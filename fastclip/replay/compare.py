# SPDX-License-Identifier: BSD-3-Clause
"""The replayed step next to the recorded one."""

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
    """One number of both."""

    name: str
    recorded: float
    replayed: float | None
    same: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        here = "none" if self.replayed is None else f"{self.replayed:.9g}"
        return f"{self.name}: {self.recorded:.9g} recorded, {here} here"


def same(a: float, b: float | None, tolerance: float) -> bool:
    """Whether two numbers are equal, NaN and Inf included, or differ by no more than this share."""
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
    """What was recorded and can be compared.

    Args:
        losses: replayed, of the micro-batches.
        tolerance: relative; 0 for equality to the last bit.
        with_gradients: whether those of all processes are there.
        measures_all: whether recorded norms of single gradients are those of all elements, not of finite ones
            alone.
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
    # The norm of groups' norms is rounded otherwise.
    add(
        "total_norm",
        record.total_norm,
        outcome.total_norm,
        max(tolerance, 1e-6) if record.group_norms else tolerance,
    )
    # How often NaN and Inf occur is no number that is nearly right; elsewhere than on a CPU it is not exact.
    for name, recorded, count in (
        ("nan_count", record.nan_count, outcome.nan_count),
        ("inf_count", record.inf_count, outcome.inf_count),
    ):
        add(name, recorded, count, 1.0 if tolerance and recorded and count else 0.0)
    own = {plain_name(t.name): t for t in outcome.gradients}
    for its in record.worst:
        gradient = own.get(plain_name(its["name"]))
        if measures_all:  # a root, taken in Python's float64 there and in torch's here
            replayed = None if gradient is None else gradient.norm
            add(f"norm of {its['name']}", its["norm"], replayed, max(tolerance, 1e-12))
        if not tolerance:
            add(f"NaN in {its['name']}", its["nan_count"], gradient and gradient.nan_count)
            add(f"Inf in {its['name']}", its["inf_count"], gradient and gradient.inf_count)
    return found


def _mean(recorded: float | None, losses: Sequence[float], outcome: Outcome | None) -> float:
    """Of the losses as the training took it: of tensors, or of numbers."""
    of_numbers = sum(losses) / len(losses)
    if outcome is None or recorded == of_numbers:
        return of_numbers
    return outcome.loss
