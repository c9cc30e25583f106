# SPDX-License-Identifier: BSD-3-Clause
"""Keeps what a step depended on, and saves it when the step goes wrong, before anything has been updated."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..measure.batches import plain_ids, tensors_in
from ..record import Event, Record
from ..skip_latch import REASONS
from .determinism import deterministic_settings
from .encode import encode
from .forwards import Forwards, Start
from .options import Incidents, KeptBatch, KeptStep, Subject
from .rng import rng_state
from .shards import local_state
from .store import IncidentStore, StoreError

_COOLDOWN = 100  # steps between two incidents of one kind: a run that has died has one NaN after the other
_RECORDS = 200


class Capture:
    """Watches one training, see :class:`Incidents`."""

    def __init__(
        self, options: Incidents, store: IncidentStore, subject: Subject, rank: int, world: int
    ) -> None:
        self._options, self._store, self._subject = options, store, subject
        self._rank, self._world = rank, world
        self._forwards = Forwards(subject.model, self._began)
        self._step = KeptStep(0)
        self._steps: deque[KeptStep] = deque()
        self._snapshots: deque[dict[str, Any]] = deque(maxlen=2)
        self._saved: dict[str, int] = {}

    # While a step is made.

    def restart(self, number: int) -> None:
        """Forget what was kept, and count from `number` on."""
        self._step, self._steps = KeptStep(number), deque()
        self._snapshots.clear()

    def add_batch(self, batch: Any, sample_ids: Any) -> None:
        versions = [(name, t, t._version) for name, t in tensors_in(batch) if not t.is_inference()]
        numbers = self._step.number, len(self._step.micros)
        micro = KeptBatch(*numbers, batch, plain_ids(sample_ids), versions, rng_state())
        self._step.micros.append(micro)

    def add_loss(self, loss: Any) -> None:
        if self._step.micros:
            self._step.micros[-1].loss = loss.detach().clone() if isinstance(loss, Tensor) else loss

    def _began(self, start: Start) -> None:
        micros, every = self._step.micros, self._options.snapshot_every
        if micros and micros[-1].start is None:
            micros[-1].start = start
            if every and len(micros) == 1 and self._step.number % every == 0:
                state, _ = local_state(self._state(start.buffers))
                self._snapshots.append(_on_host(state) | {"step": self._step.number})

    def before_update(self) -> None:
        """The gradients are there. Keeps what the training itself changes after the step."""
        if self._subject.scheduler is not None:
            self._step.scheduler = dict(self._subject.scheduler.state_dict())

    def end_step(self) -> None:
        """The step is over; the next one begins."""
        self._step.unseen_buffers = self._forwards.end_step()
        self._steps.append(self._step)
        self._step = KeptStep(self._step.number + 1)
        oldest = self._step.number - self._options.batches
        if self._snapshots:
            oldest = min(oldest, self._snapshots[0]["step"])
        while self._steps and self._steps[0].number < oldest:
            self._steps.popleft()

    def close(self) -> None:
        self._forwards.remove()

    # When one went wrong.

    def save(self, reason: int, record: Record, records: Sequence[Record]) -> None:
        """Save the incident, unless one of its kind was saved shortly before.

        Args:
            reason: the number in REASONS, from 1.
            record: of the step, which has not been applied.
            records: those before it, and itself.
        """
        kind = REASONS[reason - 1]
        last = self._saved.get(kind)
        self._saved[kind] = record.step
        step = next((s for s in self._steps if s.number == record.step), self._step)
        if last is None or record.step >= last + _COOLDOWN:
            self._save_or_warn(kind, step, record, records)
        first = step.first_start()
        if kind == "nonfinite" and first is not None:
            self._forwards.put_back(first)

    def _save_or_warn(self, kind: str, step: KeptStep, record: Record, records: Sequence[Record]) -> None:
        try:
            self._save(kind, step, self._event(kind, record, records), record, records)
        except StoreError as error:
            warnings.warn(f"fastclip.Monitor: {error}. The training goes on", stacklevel=2)

    def _event(self, kind: str, record: Record, records: Sequence[Record]) -> Event:
        """That of the record. Not every rank has one: the loss that closes the gate is the mean of all, which
        is the one that a replay of all has to find again."""
        event = next((e for e in record.events if e.kind == kind), None)
        if event is None:
            message = f"the step was held back: {kind}"
            event = Event(kind, record.step, "error", message, {}, self._rank)
        loss = _loss_of_all(record)
        if kind != "loss_spike" or loss is None:
            return event
        before = [_loss_of_all(r) for r in list(records)[-_RECORDS:] if r.step < record.step]
        known = [number for number in before if number is not None and math.isfinite(number)]
        values = {"loss": loss, "median": statistics.median(known)} if known else {}
        return replace(event, values=event.values | values)

    def _save(
        self, kind: str, step: KeptStep, event: Event, record: Record, records: Sequence[Record]
    ) -> None:
        problems = [f"buffer {name} was changed for the first time" for name in step.unseen_buffers]
        first = step.first_start()
        state = self._state({} if first is None else first.buffers)
        self._as_before_the_step(state, step, record)
        plain, shards = local_state(state)
        problems += _encode_strange_parts(plain)
        entries = [self._entry(m, problems) for s in (*self._steps, self._step) for m in s.micros]
        entries = [entry for entry in entries if entry["step"] <= record.step]
        files = {"state.pt": plain, "batches.pt": {"batches": entries}}
        older = [s for s in self._snapshots if s["step"] < record.step]
        if older:
            files["snapshot.pt"] = dict(older[0])
            _encode_strange_parts(files["snapshot.pt"])
        if not step.micros:
            problems.append("no batch was told to the monitor")
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
        subject = self._subject
        parts = {"optimizer": subject.optimizer, "scheduler": subject.scheduler, "scaler": subject.scaler}
        state = {name: None if part is None else part.state_dict() for name, part in parts.items()}
        model = dict(subject.model.state_dict())
        model |= {name: buffer for name, buffer in buffers.items() if name in model}
        return {"model": model, **state, "monitor": subject.state_of_monitor()}

    @staticmethod
    def _as_before_the_step(state: dict[str, Any], step: KeptStep, record: Record) -> None:
        """Take back what the training changed between the step and now: of a GPU the record comes late."""
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

    def _entry(self, micro: KeptBatch, problems: list[str]) -> dict[str, Any]:
        tree, found = encode(micro.batch)
        place = f"step {micro.step}, batch {micro.micro}"
        problems += [f"{place}: {problem}" for problem in found]
        changed = [name for name, tensor, version in micro.versions if tensor._version != version]
        problems += [f"{place}: {name} was changed in place after the batch was told" for name in changed]
        if micro.start is None:
            problems.append(f"{place}: no forward of the model was seen")
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
            "norm_type": self._subject.handle.norm_type,
            "nonfinite": self._subject.handle.nonfinite,
            "micro_batches": record.micro_batches,
            "scaled": record.loss_scale is not None,
            "deterministic": deterministic_settings(),
        }


def _loss_of_all(record: Record) -> float | None:
    """The mean over several processes that have all told one."""
    losses = record.ranks.get("loss")
    return sum(losses) / len(losses) if losses else None


def _encode_strange_parts(state: dict[str, Any]) -> list[str]:
    """Those which may hold what torch.load refuses; returns what could not be kept of them."""
    problems = []
    for name in ("scheduler", "monitor"):
        if state[name] is not None:
            state[name], found = encode(state[name])
            problems += [f"{name}: {problem}" for problem in found]
    return problems


class IncidentSaved(UserWarning):
    """Tells where an incident was saved."""


def _on_host(value: Any) -> Any:
    """A copy that nothing changes any more, in the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return copy.copy(value)
