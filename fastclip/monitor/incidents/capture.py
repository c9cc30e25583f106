# SPDX-License-Identifier: BSD-3-Clause
"""Capture of what a step depends on, saved before any update if the step goes wrong."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...optim import Handle
from ..measure.batches import plain_ids, tensors_in
from ..record import Event, Record
from ..skip_latch import REASONS
from ..state import MonitorState
from .captured_step import CapturedBatch, CapturedStep
from .determinism import deterministic_settings
from .encode import encode
from .files import StoreError
from .forwards import ForwardStart, ForwardWatcher
from .options import Incidents
from .rng import rng_state
from .shards import local_state
from .store import IncidentStore

_COOLDOWN = 100  # steps between two incidents of one kind: after the first NaN every step has one
_RECORDS = 200  # saved with an incident


class IncidentSaved(UserWarning):
    """The warning that says where an incident was saved."""


@dataclass
class CapturedTraining:
    """The objects whose state an incident holds.

    Attributes:
        monitor_state: the state of the monitor, which does not wait for pending steps.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    handle: Handle
    monitor_state: MonitorState


class Capture:
    """The steps of one training, of which those that go wrong are saved.

    Args:
        options: see :class:`Incidents`.
        rank, world: of this process in the default process group.
    """

    def __init__(
        self, options: Incidents, store: IncidentStore, training: CapturedTraining, rank: int, world: int
    ) -> None:
        self._options, self._store, self._training = options, store, training
        self._rank, self._world = rank, world
        self._forwards = ForwardWatcher(training.model, self._add_forward)
        self._step = CapturedStep(0)
        self._steps: deque[CapturedStep] = deque()
        self._snapshots: deque[dict[str, Any]] = deque(maxlen=2)
        self._saved: dict[str, int] = {}

    # During a step.

    def restart(self, number: int) -> None:
        """Drop all captured steps and count from `number` on."""
        self._step, self._steps = CapturedStep(number), deque()
        self._snapshots.clear()

    def add_batch(self, batch: Any, sample_ids: Any) -> None:
        """Capture a micro-batch by reference, with the random generators as they are now."""
        versions = [(name, t, t._version) for name, t in tensors_in(batch) if not t.is_inference()]
        numbers = self._step.number, len(self._step.micros)
        micro = CapturedBatch(*numbers, batch, plain_ids(sample_ids), versions, rng_state())
        self._step.micros.append(micro)

    def add_loss(self, loss: Any) -> None:
        """Capture the loss of the last micro-batch."""
        if self._step.micros:
            self._step.micros[-1].loss = loss.detach().clone() if isinstance(loss, Tensor) else loss

    def _add_forward(self, start: ForwardStart) -> None:
        micros, every = self._step.micros, self._options.snapshot_every
        if micros and micros[-1].start is None:
            micros[-1].start = start
            if every and len(micros) == 1 and self._step.number % every == 0:
                state, _ = local_state(self._state(start.buffers))
                self._snapshots.append(_on_host(state) | {"step": self._step.number})

    def before_update(self) -> None:
        """Capture the scheduler's state, which the training changes after the update."""
        if self._training.scheduler is not None:
            self._step.scheduler = dict(self._training.scheduler.state_dict())

    def end_step(self) -> None:
        """Finish the step, start the next one, and drop steps that are too old."""
        self._step.unseen_buffers = self._forwards.end_step()
        self._steps.append(self._step)
        self._step = CapturedStep(self._step.number + 1)
        oldest = self._step.number - self._options.batches
        if self._snapshots:
            oldest = min(oldest, self._snapshots[0]["step"])
        while self._steps and self._steps[0].number < oldest:
            self._steps.popleft()

    def close(self) -> None:
        """Remove the hook from the model."""
        self._forwards.remove()

    # After a step that went wrong.

    def save(self, reason: int, record: Record, records: Sequence[Record]) -> None:
        """Save the incident, unless one of its kind occurred in the last 100 steps.

        If the loss or a gradient was not finite, buffers that the forward changed are restored.

        Args:
            reason: the position in REASONS, from 1.
            record: the record of the step, whose update was skipped.
            records: the records up to and including it.
        """
        kind = REASONS[reason - 1]
        last = self._saved.get(kind)
        self._saved[kind] = record.step
        step = next((s for s in self._steps if s.number == record.step), self._step)
        if last is None or record.step >= last + _COOLDOWN:
            self._save_or_warn(kind, step, record, records)
        first = step.first_start()
        if kind == "nonfinite" and first is not None:
            self._forwards.restore_buffers(first)

    def _save_or_warn(self, kind: str, step: CapturedStep, record: Record, records: Sequence[Record]) -> None:
        try:
            self._save(kind, step, self._event(kind, record, records), record, records)
        except StoreError as error:
            warnings.warn(f"fastclip.Monitor: {error}. Training continues", stacklevel=2)

    def _event(self, kind: str, record: Record, records: Sequence[Record]) -> Event:
        """Return the record's event of this kind, or a new one on a rank that has none.

        The loss that skips a step is the mean over all ranks, so the values of a loss spike are means too: a
        replay of all ranks reproduces these.
        """
        event = next((e for e in record.events if e.kind == kind), None)
        if event is None:
            message = f"the step was skipped: {kind}"
            event = Event(kind, record.step, "error", message, {}, self._rank)
        loss = _mean_loss(record)
        if kind != "loss_spike" or loss is None:
            return event
        before = [_mean_loss(r) for r in list(records)[-_RECORDS:] if r.step < record.step]
        known = [number for number in before if number is not None and math.isfinite(number)]
        values = {"loss": loss, "median": statistics.median(known)} if known else {}
        return replace(event, values=event.values | values)

    def _save(
        self, kind: str, step: CapturedStep, event: Event, record: Record, records: Sequence[Record]
    ) -> None:
        problems = [
            f"buffer {name} changed for the first time, and its value before was not copied"
            for name in step.unseen_buffers
        ]
        first = step.first_start()
        state = self._state({} if first is None else first.buffers)
        self._undo_later_changes(state, step, record)
        plain, shards = local_state(state)
        problems += _encode_custom_state(plain)
        entries = [self._entry(m, problems) for s in (*self._steps, self._step) for m in s.micros]
        entries = [entry for entry in entries if entry["step"] <= record.step]
        files = {"state.pt": plain, "batches.pt": {"batches": entries}}
        older = [s for s in self._snapshots if s["step"] < record.step]
        if older:
            files["snapshot.pt"] = dict(older[0])
            _encode_custom_state(files["snapshot.pt"])
        if not step.micros:
            problems.append("no batch was given to the monitor")
        manifest = {
            "severity": event.severity,
            "message": event.message,
            "event": event.to_dict(),
            "record": record.to_dict(),
            "records": [r.to_dict() for r in list(records)[-_RECORDS:]],
            "parameters": [t for t in record.worst if t["nan_count"] + t["inf_count"]],
            "shards": shards,
            "incomplete": problems,
            "complete": not problems,
            "setup": self._setup(record),
        }
        path = self._store.save(record.step, kind, self._rank, self._world, manifest, files)
        warnings.warn(f"fastclip.Monitor saved step {record.step} to {path}", IncidentSaved, stacklevel=2)

    def _state(self, buffers: dict[str, Tensor]) -> dict[str, Any]:
        training = self._training
        parts = {"optimizer": training.optimizer, "scheduler": training.scheduler, "scaler": training.scaler}
        state = {name: None if part is None else part.state_dict() for name, part in parts.items()}
        model = dict(training.model.state_dict())
        model |= {name: buffer for name, buffer in buffers.items() if name in model}
        return {"model": model, **state, "monitor": training.monitor_state.state_dict(self._step.number)}

    @staticmethod
    def _undo_later_changes(state: dict[str, Any], step: CapturedStep, record: Record) -> None:
        """Reset what the training changed after the step: on a GPU the record arrives some steps later."""
        if step.scheduler is not None:
            state["scheduler"] = step.scheduler
        if state["scaler"] and record.loss_scale is not None:
            state["scaler"]["scale"] = record.loss_scale
        groups = state["optimizer"]["param_groups"]
        if len(record.lr) == len(groups):
            state["optimizer"]["param_groups"] = [
                {**group, "lr": rate} if not isinstance(group["lr"], Tensor) else group
                for group, rate in zip(groups, record.lr, strict=True)
            ]

    def _entry(self, micro: CapturedBatch, problems: list[str]) -> dict[str, Any]:
        tree, found = encode(micro.batch)
        place = f"step {micro.step}, batch {micro.micro}"
        problems += [f"{place}: {problem}" for problem in found]
        changed = [name for name, tensor, version in micro.versions if tensor._version != version]
        problems += [f"{place}: {name} was changed in place after monitor.batch()" for name in changed]
        if micro.start is None:
            problems.append(f"{place}: the model ran no forward on it")
        start, ids = micro.start, micro.sample_ids
        return {
            "step": micro.step,
            "micro": micro.micro,
            "batch": tree,
            "sample_ids": ids.tolist() if isinstance(ids, Tensor) else ids,
            "rng_at_batch": encode(micro.rng)[0],
            "rng": encode(micro.rng if start is None else start.rng)[0],
            "autocast": {} if start is None else start.autocast,
            "buffers": {} if start is None else start.buffers,
            "training": True if start is None else start.training,
            "loss": None if micro.loss is None else float(micro.loss),
        }

    def _setup(self, record: Record) -> dict[str, Any]:
        return {
            "max_norm": record.max_norm,
            "norm_type": self._training.handle.norm_type,
            "nonfinite": self._training.handle.nonfinite,
            "micro_batches": record.micro_batches,
            "scaled": record.loss_scale is not None,
            "deterministic": deterministic_settings(),
        }


def _mean_loss(record: Record) -> float | None:
    """Return the mean loss over several processes; None with one process, or if one of them has no loss."""
    losses = record.ranks.get("loss")
    return sum(losses) / len(losses) if losses else None


def _encode_custom_state(state: dict[str, Any]) -> list[str]:
    """Encode the parts that may hold what torch.load refuses, and return what could not be stored of them."""
    problems = []
    for name in ("scheduler", "monitor"):
        if state[name] is not None:
            state[name], found = encode(state[name])
            problems += [f"{name}: {problem}" for problem in found]
    return problems


def _on_host(value: Any) -> Any:
    """Return a deep copy in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return copy.copy(value)
