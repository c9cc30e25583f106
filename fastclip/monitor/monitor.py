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
from ..policies import Policy
from . import arguments
from .actions import Actions, Dispatcher, require_actions
from .async_copy import LateValues, Value
from .detectors import Detector, default_detectors
from .diagnosis.diagnose import Diagnosis, diagnose
from .diagnosis.overview import run_overview
from .diagnosis.recommend import Recommendation, recommend
from .history import History
from .incidents.capture import Capture, CapturedTraining
from .incidents.options import Incidents
from .measure.activations import ActivationStatistics, TokenIds, chosen_modules
from .measure.weights import WeightStatistics
from .open_step import OpenStep
from .parameter_names import ParameterNames
from .rank_sync import Ranks
from .record import Event
from .record_builder import RecordMaker
from .sinks import SinkGroup
from .skip_latch import SkipLatch
from .step_recorder import Parts, Watcher
from .suppress import guarded


class Monitor:
    """Watches a training loop: records every step, warns before it fails, tells where to look.

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
    with ``optimizer.step()``, or with what a scaler does in its place. The monitor waits for no device:
    numbers of a GPU arrive about one step late, those of a CPU at once; :data:`fastclip.monitor.MEANINGS`
    tells what they are. A defect of its own is a warning. Steps captured in a CUDA graph are not seen.

    Args:
        model: gives names, embeddings and modules.
        optimizer: any that :func:`fastclip.attach` takes.
        max_norm: attach the optimizer with this limit. None with an optimizer that is attached: its handle is
            read. None with another: observe only; gradients and steps stay as they are.
        scheduler: the learning rate scheduler, for the action "lower_lr".
        scaler: the loss scaler, torch's or fastclip's.
        log_dir: directory of the log, a file a rank; None for none.
        sinks: further ones, see :func:`fastclip.monitor.sinks.as_sink`.
        activations: names of modules whose outputs are measured, or "leaf" for all without children.
        activations_every, weights_every: how many steps apart activations, and parameter norm and update
            ratios, are measured; always in steps 0, 1, 2, 4, 8, 16 and 32; 0 for never.
        max_copy_bytes: what copies of parameters may take while a step is measured.
        detectors: in place of :func:`fastclip.monitor.default_detectors`.
        num_classes: labels from here on are out of range.
        actions: what events do, by kind or severity: "log", "skip" (leave the step out; for "nonfinite",
            "norm_spike" and "loss_spike", decided on the device, for the last two by the rule of
            :class:`fastclip.policies.SpikeSkip`), "lower_lr" (halve it), "stop" (``should_stop`` becomes
            True), "raise" (TrainingUnstable, from the next call of the monitor; with several processes from
            their next optimizer.step()), any callable, or a list. Several processes take all but callables
            together, also where one alone has the event, and need the same actions on each.
            Warnings and errors are always logged.
        compare_ranks: whether processes tell each other a few numbers a step, in one collective. None: if
            torch.distributed is in use. Then every rank has to make a monitor.

        incidents: a directory, or :class:`fastclip.monitor.Incidents`: where steps that go wrong are saved,
            with the batch and the whole state from before the update, for ``fastclip replay``.

    Attributes:
        handle: the :class:`fastclip.Handle` of the optimizer.
        records, events: the last 5,000 Records and Events.
        should_stop: whether an event asked to stop.

    Raises:
        TypeError, ValueError: a mistaken argument; what :func:`fastclip.attach` raises.
        RuntimeError: max_norm for an optimizer that is attached; a process without a monitor.
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
        held = arguments.held_kinds(checked, saving, optimizer, max_norm)
        compared = arguments.compares(compare_ranks, world, held)
        self._dispatcher = Dispatcher(checked, optimizer, scheduler, world, compared)
        self._sinks = SinkGroup(arguments.all_sinks(log_dir, sinks, rank, world))
        store = saving.store() if saving is not None else None
        # After what may fail here alone: the other processes would wait for this one.
        ranks = Ranks(self._dispatcher.acts or bool(held), held) if compared else None
        self._owns_handle, self.handle = arguments.handle_for(model, optimizer, max_norm, scaler)
        names = ParameterNames(model, optimizer)
        weights = WeightStatistics(optimizer, names, max_copy_bytes, self.handle.process_group)
        self._parts = Parts(
            ActivationStatistics(modules) if modules else None,
            activations_every,
            weights,
            weights_every,
            TokenIds(model),
            SkipLatch(held, saving.overflows if saving else 1) if held else None,
            ranks,
            self._dispatcher,
            LateValues(self._agreed, on_demand=True) if ranks is not None and ranks.acts else None,
        )
        if saving is not None and store is not None:
            training = CapturedTraining(model, optimizer, scheduler, scaler, self.handle, self._state)
            self._parts.capture = Capture(saving, store, training, rank, world)
        self._maker = RecordMaker(rank, self._parts.token_ids.sizes, names)
        self._history = History(self._maker, self.detectors, self._sinks)
        self.records, self.events = self._history.records, self._history.events
        self._late = LateValues(self._arrived)
        self._watcher = Watcher(self.handle, scaler, self._parts, self._finish)
        self.handle.observers.append(self._watcher)

    # What a training loop calls.

    def batch(self, /, *batch: Any, sample_ids: Any = None, **named: Any) -> Monitor:
        """Tell the batch before the forward pass.

        Args:
            batch, named: tensors, or trees of them: mappings, lists, tuples, dataclasses. Given by keyword
                they have that name in records and events, else that of their place.
            sample_ids: a list or a tensor of what names each sample, to find it again.

        Returns:
            The monitor, as a context: ``with monitor.batch(inputs, targets):`` round a step also records the
            exception that ends it.

        Raises:
            TrainingUnstable: an event with the action "raise" has come.
        """
        self._dispatcher.raise_if_asked()
        given = dict(enumerate(batch)) | named if named else batch[0] if len(batch) == 1 else batch
        self._watcher.add_batch(given, sample_ids)
        return self

    def loss(self, loss: Tensor | float, **further: Tensor | float) -> None:
        """Tell the loss of the batch, not scaled by a scaler: before ``optimizer.step()``, or once after it.

        Args:
            loss: of one element. The mean over accumulated batches is recorded.
            further: other losses by name, each of one element.

        Raises:
            TypeError, ValueError: no number; several elements.
            TrainingUnstable: an event with the action "raise" has come.
        """
        self._dispatcher.raise_if_asked()
        self._watcher.add_losses(arguments.require_losses({"loss": loss, **further}))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self._watcher.drop()
        elif error is not None:
            self._watcher.fail(error)
            self._late.salvage()
            self._sinks.flush()
        else:
            self._dispatcher.raise_if_asked()

    def close(self) -> None:
        """Record what is on its way, close the sinks and let go of the model; an optimizer that the monitor
        has attached is detached. A second call does nothing."""
        if self._watcher in self.handle.observers:
            self._watcher.complete_if_made()
            self._poll()
            self.handle.observers.remove(self._watcher)
        self._watcher.close()
        self._sinks.close()
        if self._owns_handle:
            self.handle.detach()

    # What it knows.

    @property
    def should_stop(self) -> bool:
        return self._dispatcher.should_stop

    def diagnose(self, event: Event | None = None) -> Diagnosis:
        """What an event, by default the first of the worst ones, comes from: see :func:`diagnose`."""
        self._poll()
        return diagnose({self._maker.rank: list(self.records)}, event)

    def recommend(self) -> Recommendation:
        """A max_norm for this run, from the norms of the records."""
        self._poll()
        return recommend(list(self.records))

    def summary(self) -> str:
        """One screen: where the run stands, what was clipped and left out, the events."""
        self._poll()
        return run_overview(list(self.records), self.events)

    def _finish(self, step: OpenStep, values: dict[str, Value]) -> None:
        guarded(self._late.send, step, values)
        self._act()

    def _poll(self) -> None:
        guarded(self._late.poll, True)
        self._act()

    def _act(self) -> None:
        """On the records that have arrived. Not guarded: a person's own functions are called."""
        while self._history.new:
            self._dispatcher.take(self._history.new.popleft())

    def _arrived(self, step: OpenStep, values: dict[str, Any]) -> None:
        guarded(self._history.add, step, values)
        if (reason := int(values.get("closed_for", 0))) and self._parts.capture is not None:
            guarded(self._parts.capture.save, reason, self.records[-1], self.records)
        if values.get("held") and self._parts.latch is not None and self._parts.ranks is None:
            self._parts.latch.release(step.decision)

    def _agreed(self, label: tuple[int, int], values: dict[str, Any]) -> None:
        """What all processes do together, at the same place of the same step."""
        number, decision = label
        if values.get("held") and self._parts.latch is not None:
            self._poll()  # the record comes first
            self._parts.latch.release(decision)
        self._dispatcher.act(number, values["requests"], values["request_steps"])

    def _stateful(self) -> dict[str, Any]:
        """What remembers something from step to step, each with a state_dict of its own."""
        policy = self.handle.max_norm
        found = {
            "records": self._maker,
            "requests": self._dispatcher,
            "weights": self._parts.weights,
            "gate": self._parts.latch,
            "policy": policy if isinstance(policy, Policy) else None,
        }
        found |= {f"detector {detector.kind}": detector for detector in self.detectors}
        return {name: part for name, part in found.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to give the same events; loads with ``weights_only=True``."""
        self._watcher.complete_if_made()
        self._poll()
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {"step": self._watcher.number, "parts": arguments.states_of(self._stateful())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another monitor was.

        Raises:
            ValueError: it had other detectors, another policy or other actions "skip".
        """
        arguments.load_states(self._stateful(), state)
        self._watcher.restart(state["step"])
