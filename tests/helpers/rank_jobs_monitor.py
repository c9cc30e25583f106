# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of tests/helpers/ranks.py execute for the monitor."""

from __future__ import annotations

import functools
import hashlib
import math
import random
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastclip
from fastclip.monitor import Event, Record, TrainingUnstable, async_copy, rank_sync, skip_latch
from fastclip.monitor.detectors import Detector, default_detectors
from fastclip.monitor.spike_rule import SpikeRule
from helpers import rank_jobs

NAN = math.nan
STEPS = 12
SCALERS = {"torch": torch.amp.GradScaler, "fastclip": fastclip.GradScaler}


class OnRankOne(Detector):
    """An event that nobody but rank 1 has."""

    kind = "alone"

    def check(self, record: Record) -> Event | None:
        if record.rank == 1 and record.step == 5:
            return self.event(record, "warning", "rank 1 alone")
        return None


class _PendingCopy:
    """A copy that is complete at random times, as a GPU's is: at other times on each rank."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._values = {key: tensor.detach().clone().tolist() for key, tensor in tensors.items()}
        self.event = self

    def query(self) -> bool:
        return random.random() < (0.9, 0.5)[dist.get_rank() % 2]

    def synchronize(self) -> None:
        pass

    def values(self) -> dict[str, Any]:
        return self._values


@contextmanager
def copying_late(is_late: bool):
    """Let all numbers reach the host late, as from a GPU."""
    random.seed(dist.get_rank())
    patch = mock.patch.multiple(async_copy, _PendingCopy=_PendingCopy, _is_on_gpu=lambda tensor: True)
    with patch if is_late else nullcontext():
        yield


def prepared(layout: str) -> nn.Module:
    model = rank_jobs.make_model()
    if layout != "fsdp2":
        return DistributedDataParallel(model) if layout == "ddp" else model
    mesh = rank_jobs.mesh_of((dist.get_world_size(),))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def digest(model: nn.Module) -> str:
    """Return a hash of the bits of all parameters, wherever they are."""
    found = hashlib.sha256()
    for weight in rank_jobs.weights_of(model).values():
        found.update(weight.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class Run:
    """A training on every rank.

    Args:
        hurt: {step: factor} by which rank 1 multiplies `what`, a number of the "targets" or the "loss".
        tell: what the monitor is given: "all"; "loss": no batches; "rank 0": losses there alone; "rank 1":
            batches there alone; "late": losses after optimizer.step().
    """

    def __init__(
        self, layout="ddp", kind="sgd", tell="all", hurt=None, what="targets", scaler=None, **options
    ):
        self.tell, self.hurt, self.what = tell, hurt or {}, what
        self.model = prepared(layout)
        self.optimizer = rank_jobs.make_optimizer(kind, self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.scaler = SCALERS[scaler]("cpu", init_scale=8.0) if scaler else None
        if layout == "stages":  # each rank has a model of its own, and the norm is that of all
            fastclip.attach(self.optimizer, 1.0, process_group=dist.group.WORLD)
        options.setdefault("max_norm", None if layout == "stages" else 1.0)
        options |= {"scheduler": self.scheduler, "scaler": self.scaler}
        self.monitor = fastclip.Monitor(self.model, self.optimizer, **options)
        self.rank = dist.get_rank()
        self.lrs, self.stops, self.scales, self.digests = [], [], [], [digest(self.model)]

    def steps(self, number: int, first: int = 0, look: bool = False) -> Run:
        for step in range(first, first + number):
            self.step(step)
            self.lrs.append(self.optimizer.param_groups[0]["lr"])
            self.digests.append(digest(self.model))
            self.stops.append(self.monitor.should_stop)
            self.scales.append(self.scaler.get_scale() if self.scaler else 8.0)
            if look and self.rank == 0:
                self.monitor.summary()  # waits for the device, on one rank only
        return self

    def step(self, step: int) -> None:
        x, y = rank_jobs.part_of_batch(step, dist.get_world_size(), self.rank)
        factor = self.hurt.get(step, 1.0) if self.rank == 1 else 1.0
        if self.what == "targets":
            y[0, 0] *= factor
        if self.tell in ("all", "late") or self.tell == f"rank {self.rank}" == "rank 1":
            self.monitor.batch(x, y, sample_ids=[100 * step + 10 * self.rank + i for i in range(len(x))])
        loss = rank_jobs.loss_of(self.model, x, y)
        given = loss.detach() * (factor if self.what == "loss" else 1.0)
        if self.tell in ("all", "loss") or self.tell == f"rank {self.rank}" == "rank 0":
            self.monitor.loss(given)
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.tell == "late":
            self.monitor.loss(given)
        self.scheduler.step()

    def result(self) -> dict[str, Any]:
        self.monitor.close()
        return {name: getattr(self, name) for name in ("lrs", "digests", "stops", "scales")} | {
            "records": [record.to_dict() for record in self.monitor.records],
            "events": [(e.kind, e.severity, e.step, e.rank) for e in self.monitor.events],
            "finding": (self.monitor.diagnose().findings or [None])[0],
        }


def call(name: str, arguments: tuple, options: dict[str, Any]) -> Any:
    return globals()[name](*arguments, **options)


def plain(**options: Any) -> dict[str, Any]:
    return Run(**options).steps(STEPS).result()


def acting(action: str, tell: str, late_too: bool, look: bool, actions=None, hurt=None) -> dict[str, Any]:
    """Take an action for an event of rank 1 alone; "raised" is the step, rank and kind of the exception."""
    with copying_late(late_too):
        given = {"alone": action, **(actions or {})}
        run = Run(tell=tell, detectors=[*default_detectors(), OnRankOne()], actions=given, hurt=hurt)
        raised = None
        try:
            run.steps(30, look=look)
        except TrainingUnstable as error:
            raised = (len(run.lrs), error.event.rank, error.event.kind)
        return run.result() | {"raised": raised}


def skipping(late_too=False, look=False, what="loss", **options: Any) -> dict[str, Any]:
    """Skip steps by rules that need fewer steps than the default ones."""
    kinds = ("nonfinite", "loss_spike") if what == "loss" else ("norm_spike",)
    rule = functools.partial(SpikeRule, size=20, minimum=5)
    with copying_late(late_too), mock.patch.object(skip_latch, "SpikeRule", rule):
        run = Run(actions=dict.fromkeys(kinds, "skip"), what=what, **options)
        return run.steps(STEPS, look=look).result()


def alone(hurt: dict[int, float]) -> list[dict[str, Any]]:
    """Return the records of one process with the whole model and batch."""
    model = rank_jobs.make_model()
    optimizer = rank_jobs.make_optimizer("sgd", model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    monitor = fastclip.Monitor(model, optimizer, max_norm=1.0, compare_ranks=False)
    for step in range(STEPS):
        x, y = rank_jobs.batch_of(step)
        y[len(y) // dist.get_world_size(), 0] *= hurt.get(step, 1.0)
        loss = rank_jobs.loss_of(model, x, y)
        monitor.loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    monitor.close()
    return [record.to_dict() for record in monitor.records]


def ratio_of_shards() -> tuple[dict[str, float], dict[str, float]]:
    """Return the update ratios of a step of FSDP2, and what they have to be."""
    run = Run("fsdp2")
    before = {n: p.to_local().detach().clone() for n, p in run.model.named_parameters()}
    run.steps(1)
    after = {n: p.to_local().detach() for n, p in run.model.named_parameters() if p.dim() > 1}
    expected = {n: ((p - before[n]).norm() / before[n].norm()).item() for n, p in after.items()}
    return run.result()["records"][0]["update_ratio"], expected


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "reduce_scatter")


def counted(layout: str, steps: int, **options: Any) -> list[int]:
    """Count the collectives of each step, and of close(), without those of torch itself."""
    run = Run(layout, **options)
    seen = []
    with ExitStack() as stack:
        patches = [mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in COLLECTIVES]
        mocks = [stack.enter_context(patch) for patch in patches]
        for step in range(steps):
            run.step(step)
            seen.append(sum(m.call_count for m in mocks) - sum(seen))
        run.monitor.close()
        seen.append(sum(m.call_count for m in mocks) - sum(seen))
    return seen


def without_a_monitor_on_the_other() -> tuple[str, list[int], list[int]]:
    """Return the error of a rank alone, and the collectives without and with comparing ranks."""
    message = ""
    for rank in (0, 1, 0):  # each comes when the one before has given up
        with mock.patch.object(rank_sync, "TIMEOUT", 0.3):
            if dist.get_rank() == rank:
                message = refused({}, RuntimeError)
        dist.barrier()
    return message, counted("ddp", 3, compare_ranks=False), counted("ddp", 3)


def refused(options: dict[str, Any], kind: type[Exception] = ValueError) -> str:
    model = nn.Linear(2, 2)
    try:
        fastclip.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0, **options)
    except kind as error:
        return str(error)
    return "nothing was raised"


def different_skips() -> str:
    return refused({"actions": dict.fromkeys(("nonfinite", "norm_spike")[: 1 + dist.get_rank()], "skip")})


def uneven() -> str:
    """Let rank 1 make one step more; torch fails, in the backward pass."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = DistributedDataParallel(rank_jobs.make_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastclip.Monitor(model, optimizer, max_norm=1.0)
    for step in range(3 + dist.get_rank()):
        x, y = rank_jobs.batch_of(step)
        monitor.batch(x, y)
        loss = rank_jobs.loss_of(model, x, y)
        monitor.loss(loss)
        try:
            loss.backward()
        except RuntimeError:
            monitor.close()
            return f"the backward pass of step {step}"
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return "nowhere"


def failing_batch() -> list[str]:
    """Let rank 1 fail to read one batch and take the next: its steps have other numbers from then on."""
    run = Run(weights_every=4)
    for step in range(STEPS):
        if step == 2 and dist.get_rank() == 1:
            with suppress(OSError), run.monitor.batch(torch.zeros(2)):
                raise OSError("unreadable")
        run.step(step)
    return [r.get("param_norm") for r in run.result()["records"] if r.get("error") is None]


def resumable(saved: str, path: str, first: int, steps: int) -> tuple:
    """Resume from `saved`; save in `path`, and then end the process group before the monitor."""
    run = Run(hurt={10: NAN}, detectors=[*default_detectors(), OnRankOne()], actions={"alone": "lower_lr"})
    parts = {name: getattr(run, name) for name in ("model", "optimizer", "scheduler", "monitor")}
    if saved:
        state = torch.load(f"{saved}/{dist.get_rank()}.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    run.steps(steps, first)
    if path:
        torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}/{dist.get_rank()}.pt")
        dist.destroy_process_group()
    run.monitor.close()
    return [(e.kind, e.step, e.rank) for e in run.monitor.events], run.lrs[-1], run.digests[-1]
