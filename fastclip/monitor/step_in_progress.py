# SPDX-License-Identifier: BSD-3-Clause
"""What is collected of a step while it is made."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .async_copy import Value
from .measure.batches import BatchStatistics
from .measure.gradients import GradientRecord


@dataclass
class StepInProgress:
    """One optimizer step: numbers that may still be on a device, and what the host knows.

    Attributes:
        values: numbers by name, from which :class:`RecordBuilder` makes the record.
        gradients: what the host knows of the pass over them; None for a step without.
        made: whether the optimizer's step was called, applied or not.
        decision: number of the skip latch's decision on it, where there is one.
    """

    number: int
    values: dict[str, Value] = field(default_factory=dict)
    batches: BatchStatistics = field(default_factory=BatchStatistics)
    losses: dict[str, Value] = field(default_factory=dict)
    loss_count: int = 0
    gradients: GradientRecord | None = None
    made: bool = False
    decision: int = 0
    lr: list[float] = field(default_factory=list)
    began: float | None = None
    seconds: float | None = None  # from the batch to the loss: before it waits for other processes
    ended: float = 0.0
    step_time: float | None = None
    time: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def add_batch(self, batch: Any, sample_ids: Any) -> None:
        """Measure a micro-batch."""
        if self.began is None:
            self.began = time.perf_counter()
        self.batches.add(batch, sample_ids)

    def add_losses(self, losses: dict[str, Value]) -> None:
        """Add the losses of a micro-batch by name, each of one element."""
        for name, loss in losses.items():
            known = self.losses.get(name)
            if isinstance(loss, Tensor):  # a copy, since `loss /= 4` may follow
                loss = loss.detach().clone() if known is None else loss.detach()
            self.losses[name] = loss if known is None else known + loss
        self.loss_count += 1
        if self.began is not None and self.seconds is None:
            self.seconds = time.perf_counter() - self.began

    def mean_losses(self) -> dict[str, Value]:
        """Return the means over the micro-batches by name."""
        if self.loss_count == 1:
            return self.losses
        return {name: loss / self.loss_count for name, loss in self.losses.items()}

    def end(self, previous: float | None) -> None:
        """Note the time; `previous` is when the step before ended."""
        self.ended, self.time = time.perf_counter(), time.time()
        self.step_time = None if previous is None else self.ended - previous


def scalar(loss: Value) -> Value:
    """Return a loss of one element as a float or a tensor, []."""
    return loss.reshape(()) if isinstance(loss, Tensor) else float(loss)


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Value]]:
    """Return the rates of the groups that have one: as floats, or as values to copy if one is on a device."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
        values = {f"lr/{i}": r.clone() if isinstance(r, Tensor) else r for i, r in enumerate(rates)}
        return [], values
    return [float(rate) for rate in rates], {}


def memory_of(device: torch.device) -> dict[str, int]:
    """Return bytes by kind: resident, where the system reports it; allocated and reserved on a GPU."""
    memory: dict[str, int] = {}
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = map(int, file.read().split()[1:3])
        # Pages of files, such as a memory-mapped dataset, fill up in the first epoch and can be dropped.
        memory["resident"] = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        pass  # not Linux
    if device.type == "cuda":
        memory["allocated"] = torch.cuda.memory_allocated(device)
        memory["reserved"] = torch.cuda.memory_reserved(device)
    return memory
