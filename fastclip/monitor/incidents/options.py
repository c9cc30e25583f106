# SPDX-License-Identifier: BSD-3-Clause
"""What is kept of the last steps, of whose training, and when it is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...optim import Handle
from ..skip_latch import REASONS
from .forwards import Start
from .store import IncidentStore


@dataclass(frozen=True)
class Incidents:
    """Where and when a step that goes wrong is saved, with the state from before it.

    Such a step is left out, on all ranks, until it has been saved: of the update nothing must be made before.
    Buffers that its forward changed, such as running means, are put back if something was not finite.

    Args:
        directory: for the incidents, a directory each.
        kinds: what is one. "nonfinite": NaN or Inf in the loss, or in a gradient without a loss scaler;
            "norm_spike" and "loss_spike": above mean + 6 std of the last 128 steps; "loss_scale": `overflows`
            in a row, or a scale below 1.
        overflows: how many in a row are one. A single one is handled by the scaler and only a record.
        batches: of how many steps the batches are kept, by reference, for the incident.
        max_incidents, max_bytes: see :class:`fastclip.monitor.incidents.store.IncidentStore`.
        snapshot_every: steps between copies of the whole state in the host's memory, so that the steps which
            led to an incident can be run again; the batches since then are kept too. 0: none.
    """

    directory: str
    kinds: Sequence[str] = REASONS
    overflows: int = 8
    batches: int = 4
    max_incidents: int = 10
    max_bytes: int = 20 * 2**30
    snapshot_every: int = 0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in REASONS]:
            raise ValueError(f"expected kinds of incidents out of {REASONS}, but got {unknown}")
        for name in ("overflows", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} to be at least 1, but got {getattr(self, name)}")
        if self.snapshot_every < 0:
            raise ValueError(f"expected snapshot_every to be 0 or more, but got {self.snapshot_every}")

    def store(self) -> IncidentStore:
        """Raises OSError if the directory cannot be written, ValueError for a bound that is none."""
        return IncidentStore(self.directory, self.max_incidents, self.max_bytes)


@dataclass
class KeptBatch:
    """One batch and its forward."""

    step: int
    micro: int
    batch: Any
    sample_ids: Any
    versions: list[tuple[str, Tensor, int]]
    rng: dict[str, Any]
    start: Start | None = None
    loss: Any = None


@dataclass
class KeptStep:
    """What is kept of one step."""

    number: int
    micros: list[KeptBatch] = field(default_factory=list)
    scheduler: dict[str, Any] | None = None
    unseen_buffers: list[str] = field(default_factory=list)

    def first_start(self) -> Start | None:
        return next((micro.start for micro in self.micros if micro.start is not None), None)


@dataclass
class Subject:
    """Whose state is saved. `state_of_monitor` waits for nothing."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    handle: Handle
    state_of_monitor: Callable[[], dict[str, Any]]
