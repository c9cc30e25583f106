# SPDX-License-Identifier: BSD-3-Clause
"""Jobs for the ranks of tests/helpers/ranks.py: trainings with incidents."""

from __future__ import annotations

import errno
import os
import warnings
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fastclip
from fastclip.monitor.incidents import files
from helpers import rank_jobs
from helpers.rank_jobs_monitor import copying_late, digest


class Centred(nn.Module):
    """Subtract a running mean, a buffer that each forward uses and changes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return centred


def make_model() -> nn.Sequential:
    """Return a model of whose weights the second of two ranks has fewer rows, and none of the last."""
    torch.manual_seed(3)
    return nn.Sequential(Centred(6), nn.Linear(6, 13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def build() -> tuple:
    """Return what a replay in one process needs."""
    model = make_model()
    return model, make_optimizer(model), loss_of


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(6, 6, generator=generator)
    return x, x[:, :1] - x[:, 1:2] / 2


def ids_of(step: int, rank: int) -> list[int]:
    return [100 * step + 10 * rank + i for i in range(6)]


def prepared(layout: str) -> nn.Module:
    model = make_model()
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = rank_jobs.mesh_of((dist.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(value: Any) -> Any:
    """Return a copy with whole DTensors, which every rank must call."""
    if isinstance(value, Tensor):
        return rank_jobs.whole(value.detach()).clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def state_before(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return whole(state | {"scheduler": scheduler.state_dict()}) | {"rng": torch.get_rng_state()}


class FullDisk:
    """A replacement of save_object whose disk is full on rank 1 in the first save."""

    def __init__(self) -> None:
        self._save, self._count = files.save_object, 0

    def __call__(self, path: Any, value: Any) -> dict[str, Any]:
        self._count += 1
        if self._count == 1 and dist.get_rank() == 1:
            path.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._save(path, value)


def train(
    directory: str,
    layout: str,
    factors: dict[int, float],
    steps: int = 14,
    late: bool = False,
    full_disk: bool = False,
    micros: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train on every rank; `factors` by step multiply target 2 of rank 1 in the last micro-batch.

    The state before the first of these steps is saved to `directory`/before-RANK.pt. Returns "digests" of the
    parameters before the steps around these, fastclip's warnings, and the skipped and applied steps.
    """
    rank = dist.get_rank()
    messages: list[str] = []
    digests = {}
    with ExitStack() as stack:
        stack.enter_context(copying_late(late))
        if full_disk:
            stack.enter_context(mock.patch.object(files, "save_object", FullDisk()))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        model = prepared(layout)
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        saving = fastclip.monitor.Incidents(f"{directory}/incidents", **options)
        monitor = fastclip.Monitor(model, optimizer, max_norm=1.0, scheduler=scheduler, incidents=saving)
        torch.manual_seed(100 + rank)
        for step in range(steps):
            if any(abs(step - bad) <= 3 for bad in factors):
                digests[step] = digest(model)
            if step == next(iter(factors), None):
                torch.save(state_before(model, optimizer, scheduler), f"{directory}/before-{rank}.pt")
            for micro in range(micros):
                x, y = batch_of(step + 1000 * micro, rank)
                if rank == 1 and micro == micros - 1:
                    y[2] *= factors.get(step, 1.0)
                monitor.batch(x, y, sample_ids=ids_of(step + 1000 * micro, rank))
                loss = loss_of(model, (x, y))
                monitor.loss(loss)
                (loss / micros).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        monitor.close()
        messages += [str(w.message) for w in caught if "fastclip" in str(w.message)]
    return {
        "digests": digests,
        "warnings": messages,
        "skipped": [r.step for r in monitor.records if r.held],
        "applied": sum(r.applied for r in monitor.records),
    }


class _Collectives(TorchDispatchMode):
    """Count the collectives called from Python, those of FSDP too."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.namespace in ("c10d", "_c10d_functional")
        return function(*arguments, **(options or {}))


def collectives(layout: str, steps: int, **options: Any) -> list[int]:
    """Return the number of collectives in each step."""
    model = prepared(layout)
    optimizer = make_optimizer(model)
    monitor = fastclip.Monitor(model, optimizer, max_norm=1.0, **options)
    seen = []
    with _Collectives() as mode:
        for step in range(steps):
            x, y = batch_of(step, dist.get_rank())
            monitor.batch(x, y)
            loss = loss_of(model, (x, y))
            monitor.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(mode.count - sum(seen))
    monitor.close()
    return seen


def call(name: str, arguments: tuple, options: dict[str, Any]) -> Any:
    return globals()[name](*arguments, **options)
