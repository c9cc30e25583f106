# SPDX-License-Identifier: BSD-3-Clause
"""The replay of an incident: reproduction first, then the search for the cause."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..monitor.incidents.determinism import use_settings
from .bisect import SampleSearch
from .build import BuiltTraining, ReplayError, call_build
from .compare import compare_step
from .failure import Failure, failure_of
from .load import LoadedIncident, load_incident, versions_differ
from .nan_trace import nonfinite_names, trace_nonfinite
from .result import ReplayResult, explain
from .run_step import StepRunner
from .step_parts import Outcome
from .variants import (
    SavedSteps,
    earlier_batches,
    float32_variant,
    half_type,
    snapshot_variant,
    update_variant,
)

__all__ = ["ReplayError", "ReplayResult", "replay"]

# Relative. Gradients of several processes are summed in another order, and GPU kernels sum in any order.
_OTHER_ORDER, _ON_A_GPU, _HALF_ON_A_GPU = 1e-5, 1e-4, 2e-2


def replay(
    incident: str | os.PathLike[str],
    build: Callable[[], Any],
    *,
    rank: int | None = None,
    steps: int | str = 1,
    variants: bool = True,
    tolerance: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> ReplayResult:
    """Replay the step of an incident, compare it with the record, and look for the cause.

    ::

        def build():
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            return model, optimizer, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

        print(fastclip.replay("runs/1/incidents/00000040-nonfinite", build))

    Model, buffers, optimizer, scheduler, scaler, random number generators, autocast and torch's settings for
    determinism are restored; on a CPU the step then repeats to the last bit. Afterwards the caller's random
    number generators and settings are restored. No file of the incident is changed.

    Args:
        incident: the directory of the incident, or of one rank in it.
        build: returns (model, optimizer, loss_function), or an object with these attributes and optionally
            scheduler and scaler. The model must be on its device, and in eval mode where it was in training.
            ``loss_function(model, batch)`` gets what ``monitor.batch`` was given: one object as it is,
            several as a tuple, keyword arguments as a dict. It returns the loss that ``monitor.loss`` was
            given, or a tuple or dict with it. Losses of several micro-batches are divided by their number
            before backward, unless only undivided losses reproduce the recorded norm.
        rank: the rank whose batches are replayed. None: all saved ranks, one after the other, with the mean
            of their gradients, as DistributedDataParallel computes it.
        steps: 1 for the step of the incident, "all" for all steps from the snapshot on too.
        variants: whether to look for the cause: guilty samples, float32, a tenth of the learning rate.
        tolerance: relative difference to allow. None: 0 on a CPU, 1e-5 for several processes or another
            version of torch, 1e-4 on a GPU, 2e-2 with half precision there.
        progress: called before each run with a description of it.

    Raises:
        ReplayError: the incident cannot be read, its state does not match what build() returns, or the step
            cannot be run.
        ValueError: `steps` is neither 1 nor "all"; `tolerance` is negative.
    """
    if steps not in (1, "all"):
        raise ValueError(f"expected steps to be 1 or 'all', but got {steps!r}")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"expected tolerance to be >= 0, but got {tolerance}")
    loaded = load_incident(incident, rank)
    if steps == "all" and loaded.snapshot is None:
        raise ReplayError(f"{loaded.incident.path} has no snapshot, so only its own step can be replayed")
    with use_settings(loaded.setup.get("deterministic") or {}):
        built = call_build(build)
        return _Replay(loaded, built, tolerance, progress or _nothing).result(steps == "all", variants)


def _nothing(what: str) -> None:
    """Report no progress."""


class _Replay:
    def __init__(
        self,
        loaded: LoadedIncident,
        built: BuiltTraining,
        tolerance: float | None,
        progress: Callable[[str], None],
    ) -> None:
        self._loaded, self._progress = loaded, progress
        self._began = time.perf_counter()
        manifest = loaded.manifest
        self._record = loaded.records[loaded.step]
        self._runner = StepRunner(built, loaded.state, loaded.setup)
        self._failure: Failure | None = failure_of(self._record, manifest.get("event") or {})
        self._steps = SavedSteps(loaded.by_number, loaded.records, loaded.step, True, len(loaded.ranks))
        self._result = ReplayResult(
            str(loaded.incident.path),
            loaded.step,
            loaded.incident.kind,
            str(manifest.get("message", "")),
            loaded.ranks,
            loaded.incident.world_size,
            notes=list(loaded.notes),
            loss_scale=self._record.loss_scale,
        )
        self._result.tolerance = self._tolerance() if tolerance is None else tolerance

    def _tolerance(self) -> float:
        runner, notes = self._runner, self._result.notes
        found = 0.0
        if (versions := versions_differ(self._loaded.manifest)) is not None:
            notes.append(versions)
            found = _OTHER_ORDER
        if len(self._loaded.ranks) > 1:
            found = _OTHER_ORDER
        if any(device.type != "cpu" for device in runner.built.devices):
            half = half_type(runner, self._loaded.micros) is not None
            found = _HALF_ON_A_GPU if half else _ON_A_GPU
        return found

    def result(self, all_steps: bool, variants: bool) -> ReplayResult:
        result = self._result
        if self._record.error is not None:
            self._reproduce_error(self._record.error)
        else:
            outcome = self._reproduce()
            result.failure = None if self._failure is None else str(self._failure)
            result.fails = self._failure is not None and self._failure.holds(outcome)
            if not outcome.is_finite:
                self._look_into_modules()
            if variants:
                self._look_for_causes(outcome)
            if self._loaded.snapshot is not None and (all_steps or variants):
                self._run_from_snapshot(self._loaded.snapshot, all_steps)
            result.verdict = explain(result)
        result.notes += list(self._runner.problems)
        result.runs, result.seconds = self._runner.runs, time.perf_counter() - self._began
        return result

    def _run_the_step(self) -> Outcome:
        return self._runner.run(self._steps.parts(self._loaded.step), self._steps.mode_of(self._loaded.step))

    # Reproduction.

    def _reproduce(self) -> Outcome:
        """Run the step, with divided losses or else undivided ones, and compare it with the record."""
        loaded, result = self._loaded, self._result
        whole = not loaded.missing
        if not whole:
            result.notes.append(
                f"the gradients of rank {', '.join(map(str, loaded.missing))} are missing: only losses are "
                "compared, since recorded gradients are means over all ranks"
            )
        first: tuple[Outcome, list[Any]] | None = None
        several = len(loaded.micros) > len(loaded.ranks)
        for divides in (True, False) if several else (True,):
            self._steps = replace(self._steps, divides=divides)
            self._progress("the recorded step")
            outcome = self._run_the_step()
            candidates = [outcome] if outcome.in_place is None else [outcome, outcome.in_place]
            tried = [(candidate, self._compare(candidate, whole)) for candidate in candidates]
            first = first or tried[0]
            exact = [one for one in tried if all(number.same for number in one[1])]
            if exact:
                first = exact[0]
                break
        else:
            self._steps = replace(self._steps, divides=True)
        assert first is not None
        outcome, result.compared = first
        result.differences = [str(number) for number in result.compared if not number.same]
        result.reproduced = bool(result.compared) and not result.differences
        result.parameters = [
            {"name": t.name, "nan_count": t.nan_count, "inf_count": t.inf_count} for t in outcome.nonfinite
        ]
        return outcome

    def _compare(self, outcome: Outcome, whole: bool) -> list[Any]:
        found = []
        for rank in self._loaded.ranks:
            mine = [i for i, micro in enumerate(self._loaded.micros) if micro.rank == rank]
            found += compare_step(
                self._loaded.all_records[rank],
                [self._loaded.micros[i] for i in mine],
                outcome,
                [outcome.losses[i] for i in mine],
                self._result.tolerance,
                with_gradients=whole and rank == self._loaded.ranks[0],
                measures_all=self._loaded.setup.get("nonfinite") != "zero",
            )
        return found

    def _reproduce_error(self, recorded: str) -> None:
        """Run a step that ended in an exception, which the replay has to raise too."""
        result = self._result
        result.failure = "exception"
        try:
            self._run_the_step()
            replayed = "none"
        except ReplayError as error:
            cause = error.__cause__
            replayed = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        result.reproduced = replayed == recorded
        if result.reproduced:
            result.fails = True
            result.verdict = [f"the same exception: {recorded}"]
        else:
            result.differences = [f"exception: {recorded} recorded, {replayed} replayed"]
            result.verdict = [f"does not reproduce: {result.differences[0]}"]

    # Causes.

    def _attempt(self, what: str, variant: Callable[[], Any]) -> Any:
        """Return the result of a variant; None, with a note, if it cannot be run."""
        self._progress(what)
        try:
            return variant()
        except ReplayError as error:
            self._result.notes.append(f"skipped: {what}: {error}")
            return None

    def _look_into_modules(self) -> None:
        with trace_nonfinite(self._runner.built.model) as trace:
            self._attempt("the first module with NaN or Inf", self._run_the_step)
        self._result.forward, self._result.backward = trace.forward, trace.backward
        self._result.bad_state = nonfinite_names(self._loaded.state["model"])
        states = self._loaded.state["optimizer"].get("state", {})
        self._result.bad_state += [
            f"state {key} of parameter {index}"
            for index, its in states.items()
            for key in nonfinite_names(its)
        ]

    def _look_for_causes(self, outcome: Outcome) -> None:
        result, runner, steps = self._result, self._runner, self._steps
        failure = self._failure if result.fails else None
        search = SampleSearch(
            runner,
            self._loaded.micros,
            steps.mode_of(self._loaded.step),
            None if result.bad_state else failure,
            lambda: self._progress("samples"),
        )
        result.samples = self._attempt("samples", search.search)
        if failure is not None:
            result.float32 = self._attempt("in float32", lambda: float32_variant(runner, steps, failure))
            if result.float32 is not None and "problem" in result.float32:
                result.notes.append(result.float32["problem"])
        result.earlier = self._attempt("earlier batches", lambda: earlier_batches(runner, steps)) or []
        rates = self._record.lr
        if outcome.is_finite and rates:
            result.learning_rate = self._attempt(
                "the update of the step", lambda: update_variant(runner, steps, rates, outcome)
            )

    def _run_from_snapshot(self, snapshot: dict[str, Any], all_steps: bool) -> None:
        loaded, result = self._loaded, self._result
        absent = [s for s in range(int(snapshot["step"]), loaded.step) if s not in loaded.by_number]
        if absent:
            result.notes.append(f"not replayed from the snapshot: the batches of steps {absent} are missing")
            if all_steps:
                result.reproduced = False
                result.differences.append(result.notes[-1])
            return
        failure, what = self._failure if result.fails else None, "steps from the snapshot"
        arguments = self._runner, self._steps, snapshot, loaded.state["model"], failure
        result.history = self._attempt(
            what, lambda: snapshot_variant(*arguments, tick=lambda: self._progress(what))
        )
        if result.history is None:
            if all_steps:
                result.reproduced = False
                result.differences.append(result.notes[-1])
            return
        different = result.history["differing_tensors"]
        if different and result.tolerance == 0:
            text = f"replayed from step {snapshot['step']}: {different} tensors of the model differ"
            (result.differences if all_steps else result.notes).append(text)
            result.reproduced &= not all_steps
