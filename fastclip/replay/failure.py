# SPDX-License-Identifier: BSD-3-Clause
"""The failure of a step, as a criterion that any run of the step can be tested for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..monitor.record import Record
from .step_parts import Outcome


@dataclass(frozen=True)
class Failure:
    """A failure: NaN or Inf ("nonfinite"), or a "norm" or "loss" above the limit."""

    what: str
    limit: float = math.inf

    def holds(self, outcome: Outcome, loss: float | None = None) -> bool:
        """Return whether the outcome shows the failure.

        Args:
            loss: replaces that of the outcome: the contribution of a part of the batch to the loss.
        """
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
    """Return the failure of a recorded step, or None if its loss and gradients show none.

    The event of a spike has the number and the median it exceeds. The limit is their geometric mean, or the
    arithmetic mean if the median loss is not positive.
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
