# SPDX-License-Identifier: BSD-3-Clause
"""What is collected while a step is made."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .async_copy import Value
from .measure.batches import BatchStatistics
from .measure.gradients import Gradients


@dataclass
class OpenStep:
    """One optimizer step on its way: numbers that may still be on a device, and what the host knows.

    Attributes:
        values: numbers by name, see the functions that make a record of them.
        gradients: what the host knows of the pass over them; None for a step without.
        made: whether the optimizer's step is behind it, applied or not.
        decision: number of the gate's decision on it, where there is a gate.
    """

    number: int
    values: dict[str, Value] = field(default_factory=dict)
    batches: BatchStatistics = field(default_factory=BatchStatistics)
    losses: dict[str, Value] = field(default_factory=dict)
    loss_count: int = 0
    gradients: Gradients | None = None
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
        if self.began is None:
            self.began = time.perf_counter()
        self.batches.add(batch, sample_ids)

    def add_losses(self, losses: dict[str, Value]) -> None:
        for name, loss in losses.items():
            known = self.losses.get(name)
            if isinstance(loss, Tensor):  # a copy, since `loss /= 4` may follow
                loss = loss.detach().clone() if known is None else loss.detach()
            self.losses[name] = loss if known is None else known + loss
        self.loss_count += 1
        if self.began is not None and self.seconds is None:
            self.seconds = time.perf_counter() - self.began

    def mean_losses(self) -> dict[str, Value]:
        if self.loss_count == 1:
            return self.losses
        return {name: loss / self.loss_count for name, loss in self.losses.items()}

    def end(self, previous: float | None) -> None:
        self.ended, self.time = time.perf_counter(), time.time()
        self.step_time = None if previous is None else self.ended - previous


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Value]]:
    """Of each group that has one: the host's numbers, or all as values to be copied if one is on a device."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
        values = {f"lr/{i}": r.clone() if isinstance(r, Tensor) else r for i, r in enumerate(rates)}
        return [], values
    return [float(rate) for rate in rates], {}


def memory_of(device: torch.device) -> dict[str, int]:
    """Bytes: resident of this process, where the system tells; allocated and reserved on a GPU."""
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
