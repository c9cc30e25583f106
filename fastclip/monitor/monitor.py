# SPDX-License-Identifier: BSD-3-Clause
"""The monitor of a training loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collect import MaxNorm
from . import arguments
from .actions import ActionRunner, Actions, require_actions
from .detectors import Detector, default_detectors
from .diagnosis.diagnose import Diagnosis, diagnose
from .diagnosis.overview import run_overview
from .diagnosis.recommend import Recommendation, recommend
from .incidents.capture import Capture, CapturedTraining
from .incidents.options import Incidents
from .measure.activations import ActivationStatistics, TokenIds, chosen_modules
from .measure.weights import WeightStatistics
from .parameter_names import ParameterNames
from .rank_sync import RankSync
from .record import Event
from .record_builder import RecordBuilder
from .sinks import SinkGroup
from .skip_latch import SkipLatch
from .state import MonitorState
from .step_decision import StepDecision
from .step_pipeline import StepPipeline
from .step_recorder import StepRecorder


class Monitor:
    """Watches a training loop: records every step, warns before it fails, says where to look.

    ::

        monitor = fastclip.Monitor(model, optimizer, max_norm=1.0, log_dir="runs/1")
        for inputs, targets in loader:
            monitor.batch(inputs, targets)
            loss = loss_function(model(inputs), targets)
            monitor.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Gradients accumulated over several batches, each with its ``batch`` and ``loss``, are one step; it ends
    with ``optimizer.step()``, or with what a scaler does in its place. The monitor does not wait for a
    device: a record is complete at once on a CPU, about one step late on a GPU. Its fields are explained in
    :data:`fastclip.monitor.MEANINGS`. A defect of the monitor is a warning. Steps captured in a CUDA graph
    are not seen.

    Args:
        model: gives names, embeddings and modules.
        optimizer: any that :func:`fastclip.attach` takes.
        max_norm: attach the optimizer with this limit. None: use the handle of an attached optimizer; with
            another optimizer observe only, so that gradients and steps stay as they are.
        scheduler: the learning rate scheduler, for the action "lower_lr".
        scaler: the loss scaler, torch's or fastclip's.
        log_dir: directory of the log, one file per rank; None for none.
        sinks: further sinks, see :func:`fastclip.monitor.sinks.as_sink`.
        activations: names of modules whose outputs are measured, or "leaf" for all without children.
        activations_every, weights_every: steps between two measurements of activations, and of parameter norm
            and update ratios; steps 0, 1, 2, 4, 8, 16 and 32 are always measured; 0 for never.
        max_copy_bytes: memory for copies of parameters while a step is measured.
        detectors: replaces :func:`fastclip.monitor.default_detectors`.
        num_classes: labels >= num_classes are out of range.
        actions: what events do, by kind or severity: "log", "skip" (skip the step; for "nonfinite",
            "norm_spike" and "loss_spike", decided on the device, for the last two by the rule of
            :class:`fastclip.policies.SpikeSkip`), "lower_lr" (halve it), "stop" (``should_stop`` becomes
            True), "raise" (TrainingUnstable, from the next call of the monitor; with several processes from
            their next optimizer.step()), any callable, or a list. Several processes take all but callables
            together, even if only one has the event, and each needs the same actions.
            Warnings and errors are always logged.
        compare_ranks: whether processes exchange a few numbers per step, in one collective. None: if
            torch.distributed is in use. Then every rank has to make a monitor.

        incidents: a directory, or :class:`fastclip.monitor.Incidents`: where steps that go wrong are saved,
            with the batch and the whole state from before the update, for ``fastclip replay``.

    Attributes:
        handle: the :class:`fastclip.Handle` of the optimizer.
        records, events: the last 5,000 Records and Events.
        should_stop: whether an event requested to stop.

    Raises:
        TypeError, ValueError: an invalid argument; what :func:`fastclip.attach` raises.
        RuntimeError: max_norm for an optimizer that is already attached; a process without a monitor.
        OSError: log_dir cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_norm: MaxNorm | None = None,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        log_dir: str | None = None,
        sinks: Iterable[object] = (),
        activations: str | Sequence[str] | None = None,
        activations_every: int = 10,
        weights_every: int = 50,
        max_copy_bytes: int = 32 * 2**20,
        detectors: Sequence[Detector] | None = None,
        num_classes: int | None = None,
        actions: Actions | None = None,
        compare_ranks: bool | None = None,
        incidents: str | Incidents | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected model to be a torch.nn.Module, but got {type(model).__name__}")
        arguments.require_counts(
            activations_every=activations_every, weights_every=weights_every, max_copy_bytes=max_copy_bytes
        )
        modules = chosen_modules(model, activations)
        self.detectors = list(default_detectors(num_classes) if detectors is None else detectors)
        arguments.require_distinct(self.detectors)
        checked = require_actions(actions, [detector.kind for detector in self.detectors])
        rank, world = arguments.rank_and_world()
        saving = Incidents(incidents) if isinstance(incidents, str) else incidents
        skipped_kinds = arguments.skipped_kinds(checked, saving, optimizer, max_norm)
        compared = arguments.compares(compare_ranks, world, skipped_kinds)
        self._actions = ActionRunner(checked, optimizer, scheduler, world, compared)
        self._sinks = SinkGroup(arguments.all_sinks(log_dir, sinks, rank, world))
        store = saving.store() if saving is not None else None
        # After what may fail on this process alone: the others would wait for it.
        acts = self._actions.acts or bool(skipped_kinds)
        rank_sync = RankSync(acts, skipped_kinds) if compared else None
        self._owns_handle, self.handle = arguments.handle_for(model, optimizer, max_norm, scaler)
        names, token_ids = ParameterNames(model, optimizer), TokenIds(model)
        weights = WeightStatistics(optimizer, names, weights_every, max_copy_bytes, self.handle.process_group)
        latch = SkipLatch(skipped_kinds, saving.overflows if saving else 1) if skipped_kinds else None
        self._builder = RecordBuilder(rank, token_ids.sizes, names)
        self._state = MonitorState(self.handle, self._builder, self._actions, weights, latch, self.detectors)
        capture = None
        if saving is not None and store is not None:
            training = CapturedTraining(model, optimizer, scheduler, scaler, self.handle, self._state)
            capture = Capture(saving, store, training, rank, world)
        own_latch = latch if rank_sync is None else None
        self.pipeline = StepPipeline(
            self._builder, self.detectors, self._sinks, capture, own_latch, self._actions
        )
        self.records, self.events = self.pipeline.records, self.pipeline.events
        device = next(p.device for g in optimizer.param_groups for p in g["params"])
        self.recorder = StepRecorder(
            self.handle,
            scaler,
            device,
            activations=ActivationStatistics(modules, activations_every),
            token_ids=token_ids,
            weights=weights,
            decision=StepDecision(latch, rank_sync, self._actions, self.pipeline, device),
            capture=capture,
            pipeline=self.pipeline,
        )
        self.handle.observers.append(self.recorder)

    # What a training loop calls.

    def batch(self, /, *batch: Any, sample_ids: Any = None, **named: Any) -> Monitor:
        """Record the batch, before the forward pass.

        Args:
            batch, named: tensors, or trees of them: mappings, lists, tuples, dataclasses. In records and
                events they are named by their keyword, else by their position.
            sample_ids: a list or a tensor of what identifies each sample, to find it again.

        Returns:
            The monitor, as a context: ``with monitor.batch(inputs, targets):`` around a step also records the
            exception that ends it.

        Raises:
            TrainingUnstable: an event had the action "raise".
        """
        self._actions.raise_if_requested()
        given = dict(enumerate(batch)) | named if named else batch[0] if len(batch) == 1 else batch
        self.recorder.add_batch(given, sample_ids)
        return self

    def loss(self, loss: Tensor | float, **further: Tensor | float) -> None:
        """Record the loss of the batch, before ``optimizer.step()``, or once after it.

        Args:
            loss: one number, not scaled by a scaler. The mean over accumulated batches is recorded.
            further: other losses by name, each one number.

        Raises:
            TypeError, ValueError: it is not a number, or has several elements.
            TrainingUnstable: an event had the action "raise".
        """
        self._actions.raise_if_requested()
        self.recorder.add_losses(arguments.require_losses({"loss": loss, **further}))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self.recorder.discard()
        elif error is not None:
            self.recorder.fail(error)
            self.pipeline.salvage()
        else:
            self._actions.raise_if_requested()

    def close(self) -> None:
        """Record the steps in progress, close the sinks and release the model.

        An optimizer that the monitor has attached is detached. A second call does nothing.
        """
        if self.recorder in self.handle.observers:
            self.recorder.complete_if_made()
            self.pipeline.advance(wait=True)
            self.handle.observers.remove(self.recorder)
        self.recorder.close()
        self._sinks.close()
        if self._owns_handle:
            self.handle.detach()

    # What it knows.

    @property
    def should_stop(self) -> bool:
        return self._actions.should_stop

    def diagnose(self, event: Event | None = None) -> Diagnosis:
        """Return the likely cause of an event, by default of the first of the worst, see :func:`diagnose`."""
        self.pipeline.advance(wait=True)
        return diagnose({self._builder.rank: list(self.records)}, event)

    def recommend(self) -> Recommendation:
        """Return a max_norm for this run, from the norms of the records."""
        self.pipeline.advance(wait=True)
        return recommend(list(self.records))

    def summary(self) -> str:
        """Return an overview of one screen: progress, clipped and skipped steps, events."""
        self.pipeline.advance(wait=True)
        return run_overview(list(self.records), self.events)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs to give the same events; loads with ``weights_only=True``."""
        self.recorder.complete_if_made()
        self.pipeline.advance(wait=True)
        return self._state.state_dict(self.recorder.step.number)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another monitor was.

        Raises:
            ValueError: it had other detectors, another policy or other actions "skip".
        """
        self.recorder.restart(self._state.load_state_dict(state))
