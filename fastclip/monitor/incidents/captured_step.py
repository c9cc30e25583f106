# SPDX-License-Identifier: BSD-3-Clause
"""What a capture holds of the last steps until one is saved or they are too old."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .forwards import ForwardStart


@dataclass
class CapturedBatch:
    """One batch and the forward that took it.

    Attributes:
        step, micro: the number of the step, and of the micro-batch in it.
        versions: name, tensor and version counter of each tensor when the batch was given.
        rng: the states of all random number generators when the batch was given.
        start: the state at the start of the forward; None until there was one.
        loss: as given to the monitor; None until then.
    """

    step: int
    micro: int
    batch: Any
    sample_ids: Any
    versions: list[tuple[str, Tensor, int]]
    rng: dict[str, Any]
    start: ForwardStart | None = None
    loss: Any = None


@dataclass
class CapturedStep:
    """The batches of one step, and what the training changes after it.

    Attributes:
        scheduler: its state before the update; None without a scheduler.
        unseen_buffers: buffers that the step changed and of which no copy was made.
    """

    number: int
    micros: list[CapturedBatch] = field(default_factory=list)
    scheduler: dict[str, Any] | None = None
    unseen_buffers: list[str] = field(default_factory=list)

    def first_start(self) -> ForwardStart | None:
        """Return the start of the step's first forward; None if there was no forward."""
        return next((micro.start for micro in self.micros if micro.start is not None), None)
