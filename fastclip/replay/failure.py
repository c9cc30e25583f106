# SPDX-License-Identifier: BSD-3-Clause
"""What is wrong with the step of an incident, as a question that can be asked of any run of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..monitor.record import Record
from .step_parts import Outcome


@dataclass(frozen=True)
class Failure:
    """`what` is "nonfinite", "norm" or "loss"; the last two are above `limit`."""

    what: str
    limit: float = math.inf

    def holds(self, outcome: Outcome, loss: float | None = None) -> bool:
        """`loss`: what a part of the batch contributes to that of the whole, in place of the outcome's."""
        if self.what == "nonfinite" or not outcome.is_finite:
            return not outcome.is_finite
        if self.what == "norm":
            return outcome.total_norm is not None and outcome.total_norm > self.limit
        return (outcome.loss if loss is None else loss) > self.limit

    def __str__(self) -> str:
        if self.what == "nonfinite":
            return "NaN or Inf in the loss or a gradient"
        name = "gradient norm" if self.what == "norm" else "loss"
        return f"a {name} above {self.limit:.4g}"


def failure_of(record: Record, event: Mapping[str, Any]) -> Failure | None:
    """Of a recorded step; None if its loss and gradients show none, as with an event of another kind.

    An event tells the number and the median it stands out from. The limit is their geometric mean; for losses
    that may be negative the arithmetic one.
    """
    if not record.is_finite:
        return Failure("nonfinite")
    values = event.get("values") or {}
    median = values.get("median")
    if not isinstance(median, (int, float)) or not math.isfinite(median):
        return None
    norm, loss = values.get("total_norm"), values.get("loss")
    if isinstance(norm, (int, float)) and norm > median > 0:
        return Failure("norm", math.sqrt(norm * median))
    if isinstance(loss, (int, float)) and loss > median:
        return Failure("loss", math.sqrt(loss * median) if median > 0 else (loss + median) / 2)
    return None
