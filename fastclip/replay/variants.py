# SPDX-License-Identifier: BSD-3-Clause
"""Variants of the step of an incident: in float32, at a tenth of the learning rate, from the snapshot on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..monitor.measure.batches import tensors_in
from ..monitor.record import Record
from .build import HALVES, renamed
from .failure import Failure
from .run_step import StepRunner
from .step_parts import BatchPart, MicroBatch, Outcome, RunMode

TENTH = 0.1


@dataclass(frozen=True)
class SavedSteps:
    """The micro-batches and records of all saved steps.

    Attributes:
        by_number: the micro-batches by step.
        incident: the step of the incident.
        divides: whether losses are divided by the number of micro-batches.
        ranks: the number of processes that the micro-batches come from.
    """

    by_number: Mapping[int, list[MicroBatch]]
    records: Mapping[int, Record]
    incident: int
    divides: bool
    ranks: int

    def parts(self, step: int) -> list[BatchPart]:
        """Return the whole micro-batches of a step."""
        return [BatchPart(micro) for micro in self.by_number[step]]

    def mode_of(self, step: int) -> RunMode:
        """Return the mode of a step as recorded.

        Losses are divided by the number of processes, since gradients are averaged, and by the number of
        micro-batches of each process if the training does so.
        """
        each = len(self.by_number[step]) / self.ranks
        return RunMode(divisor=self.ranks * (each if self.divides else 1))

    def max_norm(self, step: int, given: float | None) -> float | None:
        """Return the given limit, or else the recorded one."""
        known = self.records.get(step)
        return given if given is not None or known is None else known.max_norm


def _numbers(outcome: Outcome) -> dict[str, Any]:
    return {
        "loss": outcome.loss,
        "total_norm": outcome.total_norm,
        "nan_count": outcome.nan_count,
        "inf_count": outcome.inf_count,
    }


# Precision.


def half_type(runner: StepRunner, micros: Sequence[MicroBatch]) -> str | None:
    """Return the half precision dtype of autocast, the parameters or the batch, or None."""
    kinds = {device.type for device in runner.built.devices}
    for micro in micros:
        for device, its in micro.autocast.items():
            if device in kinds and its["enabled"]:
                return str(its["dtype"]).removeprefix("torch.")
    tensors: list[Tensor] = list(runner.built.model.parameters())
    tensors += [tensor for micro in micros for _, tensor in tensors_in(micro.batch)]
    return next((str(t.dtype).removeprefix("torch.") for t in tensors if t.dtype in HALVES), None)


def float32_variant(runner: StepRunner, steps: SavedSteps, failure: Failure) -> dict[str, Any] | None:
    """Run the step in float32; None if it has no half precision."""
    half = half_type(runner, steps.by_number[steps.incident])
    if half is None:
        return None
    outcome = runner.run(steps.parts(steps.incident), replace(steps.mode_of(steps.incident), float32=True))
    found = {"dtype": half, **_numbers(outcome), "vanishes": not failure.holds(outcome)}
    if runner.autocast_in_loss_function:
        found["problem"] = "loss_function enables autocast itself, so not everything ran in float32"
    return found


# Learning rate.


def update_variant(
    runner: StepRunner, steps: SavedSteps, rates: Sequence[float], before: Outcome
) -> dict[str, Any]:
    """Compute the loss of the batch before and after its update, at the recorded rate and a tenth."""
    step = steps.incident
    parts, mode = steps.parts(step), steps.mode_of(step)
    found: dict[str, Any] = {"rates": list(rates), "before": before.loss}
    for name, factor in (("after", 1.0), ("after_a_tenth", TENTH)):
        runner.reset()
        runner.forward_backward(parts, mode)
        runner.update(steps.max_norm(step, runner.setup.get("max_norm")), rates, factor)
        found[name] = runner.forward_backward(parts, replace(mode, backward=False)).loss
    return found


def earlier_batches(runner: StepRunner, steps: SavedSteps) -> list[dict[str, Any]]:
    """Compute the losses of earlier batches with the parameters before the incident's step."""
    found = []
    for step in sorted(s for s in steps.by_number if s < steps.incident):
        recorded = [micro.loss for micro in steps.by_number[step] if micro.loss is not None]
        mode = replace(steps.mode_of(step), backward=False)
        if recorded:
            now = runner.run(steps.parts(step), mode).loss
            found.append({"step": step, "recorded": math.fsum(recorded) / len(recorded), "now": now})
    return found


@dataclass
class SnapshotRun:
    """The outcome of running the steps from a snapshot to the incident.

    Attributes:
        losses: the loss of each step.
        outcome: the outcome of the incident's step.
        differing: how many tensors of the model differ from the incident's before its step.
    """

    losses: dict[int, float]
    outcome: Outcome
    differing: int


def run_from_snapshot(
    runner: StepRunner,
    steps: SavedSteps,
    snapshot: Mapping[str, Any],
    model_state: Mapping[str, Any],
    factor: Callable[[int], float],
    tick: Callable[[], None],
) -> SnapshotRun:
    """Run all steps from the snapshot to the incident.

    Args:
        model_state: the state of the model before the incident's step.
        factor: returns the factor for the learning rate of a step.
        tick: called before each step.
    """
    runner.reset(snapshot)
    losses = {}
    for step in range(int(snapshot["step"]), steps.incident):
        tick()
        known = steps.records.get(step)
        losses[step] = runner.forward_backward(steps.parts(step), steps.mode_of(step)).loss
        if known is not None and known.held:
            runner.drop_gradients()  # skipped by the monitor
        else:
            rates = known.lr if known is not None and known.lr else None
            runner.update(steps.max_norm(step, runner.setup.get("max_norm")), rates, factor(step))
        _step_scheduler(runner)
    own = runner.built.model.state_dict()
    # Compared before the incident's forward, which changes buffers.
    differing = sum(
        not torch.equal(own[name].cpu().nan_to_num(), value.cpu().nan_to_num())
        for name, value in renamed(model_state, own).items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor)
    )
    tick()
    mode = steps.mode_of(steps.incident)
    outcome = runner.measured(steps.parts(steps.incident), mode)
    losses[steps.incident] = outcome.loss
    return SnapshotRun(losses, outcome, differing)


@dataclass(frozen=True)
class _Tenth:
    """The learning rate factor: a tenth from the first to the last step, else 1."""

    first: int
    last: int

    def __call__(self, step: int) -> float:
        return TENTH if self.first <= step <= self.last else 1.0


def _step_scheduler(runner: StepRunner) -> None:
    """Step the scheduler, which may change the momentum too; learning rates come from the records."""
    scheduler = runner.built.scheduler
    if scheduler is not None and not hasattr(scheduler, "threshold_mode"):  # ReduceLROnPlateau needs a metric
        scheduler.step()


def snapshot_variant(
    runner: StepRunner,
    steps: SavedSteps,
    snapshot: Mapping[str, Any],
    model_state: Mapping[str, Any],
    failure: Failure | None,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Run from the snapshot on at the recorded learning rates, then at a tenth of them.

    The tenth is tried in the last step before the incident, and if the failure stays, in all steps.
    """
    first, last = int(snapshot["step"]), steps.incident - 1
    recorded = run_from_snapshot(runner, steps, snapshot, model_state, lambda step: 1.0, tick)
    found: dict[str, Any] = {
        "from_step": first,
        "losses": recorded.losses,
        "reaches_the_incident": recorded.differing == 0,
        "differing_tensors": recorded.differing,
    }
    if failure is None or first > last:
        return found
    found["fails"] = failure.holds(recorded.outcome)
    known = steps.records.get(last)
    found["rates_of_the_step_before"] = known.lr if known is not None else []
    trials = {"a_tenth_in_the_step_before": (last, last), "a_tenth_in_all_steps": (first, last)}
    for name, (low, high) in trials.items():
        if not found["fails"] or (low == last and name == "a_tenth_in_all_steps"):
            break
        rates = _Tenth(low, high)
        tried = run_from_snapshot(runner, steps, snapshot, model_state, rates, tick)
        found[name] = {**_numbers(tried.outcome), "vanishes": not failure.holds(tried.outcome)}
        if found[name]["vanishes"]:
            break
    return found
