# SPDX-License-Identifier: BSD-3-Clause
"""Collects the numbers of each step: from the batches, the losses, and the optimizer's step itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..optim import Handle
from ..optim.step_plan import StepPlan
from .async_copy import Value
from .incidents.capture import Capture
from .measure.activations import ActivationStatistics, TokenIds
from .measure.gradients import HISTOGRAM_EVERY, GradientRecord, limit_of, numbers_of
from .measure.weights import WeightStatistics
from .step_decision import StepDecision
from .step_in_progress import StepInProgress, learning_rates, memory_of, scalar
from .step_pipeline import StepPipeline
from .suppress_errors import suppress_errors

MEMORY_EVERY = 10  # steps


class StepRecorder:
    """The observer of an attached optimizer, which gives each step, when it is complete, to the pipeline.

    A step is complete when the optimizer has made it and a loss was given. Losses that are given after the
    step count as that step's; without any the step is complete when the next one begins.

    Attributes:
        step: the step in progress.
    """

    def __init__(
        self,
        handle: Handle,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        *,
        activations: ActivationStatistics,
        token_ids: TokenIds,
        weights: WeightStatistics,
        decision: StepDecision,
        capture: Capture | None,
        pipeline: StepPipeline,
    ) -> None:
        self._handle, self._scaler, self._device = handle, scaler, device
        self._activations, self._token_ids, self._weights = activations, token_ids, weights
        self._decision, self._capture, self._pipeline = decision, capture, pipeline
        self._last_end: float | None = None
        self._is_closed = False
        self._begin(0)

    def _begin(self, number: int) -> None:
        self.step = StepInProgress(number)
        self._activations.begin(number)

    def restart(self, number: int) -> None:
        """Discard the step in progress and count from `number` on."""
        self._activations.end()
        self._token_ids.take()
        if self._capture is not None:
            self._capture.restart(number)
        self._begin(number)

    def discard(self) -> None:
        """Discard what was given for the step in progress, which was interrupted."""
        self.restart(self.step.number)

    def close(self) -> None:
        """Remove all hooks, and ignore what is given from now on."""
        self._is_closed = True
        self._activations.end()
        self._token_ids.remove()
        if self._capture is not None:
            self._capture.close()

    # What the training loop gives.

    def add_batch(self, batch: Any, sample_ids: Any) -> None:
        """Add a micro-batch to the step in progress."""
        if self._is_closed:
            return
        self.complete_if_made()
        with suppress_errors("measure a batch"):
            self.step.add_batch(batch, sample_ids)
        if self._capture is not None:
            with suppress_errors("keep a batch"):
                self._capture.add_batch(batch, sample_ids)

    def add_losses(self, losses: dict[str, Value]) -> None:
        """Add the losses of a micro-batch to the step in progress, or to the one just made."""
        if self._is_closed:
            return
        if self.step.made and self.step.loss_count:
            self._complete()
        self.step.add_losses(losses)
        if self._capture is not None:
            with suppress_errors("keep a loss"):
                self._capture.add_loss(losses["loss"])
        self.complete_if_made()

    def fail(self, error: BaseException) -> None:
        """Complete a step that will not be made, or after which something failed."""
        self.step.error = f"{type(error).__name__}: {error}"
        self._complete()

    # What the optimizer's step gives.

    @torch.no_grad()
    def before_update(self, plan: StepPlan | None) -> Tensor | None:
        """Measure the step before its update; return a flag that skips it, [], or None."""
        if self._is_captured():
            return None
        self.complete_if_made()
        step = self.step
        scale = self._scaler._scale if self._scaler is not None and self._scaler.is_enabled() else None
        skipped = self._decision.decide(step, plan, scale)
        step.values |= self._weights.before_step()
        with suppress_errors("measure the gradients"):
            step.lr, rates = learning_rates(self._handle.optimizer)
            step.values |= rates
            if scale is not None:
                step.values["loss_scale"] = scale.clone()  # update() changes it in place
            if self._capture is not None:
                self._capture.before_update()
            if plan is not None:
                with_norms = step.number % HISTOGRAM_EVERY == 0
                step.gradients = GradientRecord.of(plan, with_norms)
                step.values |= numbers_of(plan, with_norms) | limit_of(self._handle)
        return skipped

    @torch.no_grad()
    def after_step(self) -> None:
        """Measure the step after its update, or after a scaler has skipped it."""
        if self._is_captured():
            return
        step = self.step
        with suppress_errors("measure the update"):
            step.values |= self._weights.after_step()
            skipped = self._handle.step_skipped()
            if skipped is not None:
                step.values["skipped"] = skipped
            elif self._scaler is None:
                warnings.warn(
                    "a GradScaler calls the optimizer's step and may skip it unseen: pass it to "
                    "fastclip.Monitor or fastclip.attach as scaler=, or skipped steps are missing in the "
                    "records",
                    stacklevel=2,
                )
        step.made = True
        if step.loss_count:
            self._complete()

    def _is_captured(self) -> bool:
        """Whether the step is captured in a CUDA graph, which is replayed without calling anyone."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # When it is complete.

    def complete_if_made(self) -> None:
        """Complete the step if the optimizer has made it."""
        if self.step.made:
            self._complete()

    def _complete(self) -> None:
        step = self.step
        with suppress_errors("complete a step"):
            step.values |= self._activations.end()
            step.values |= self._token_ids.take() | step.batches.values
            for name, loss in step.mean_losses().items():
                step.values["loss" if name == "loss" else f"losses/{name}"] = scalar(loss)
            if step.number % MEMORY_EVERY == 0:
                step.memory = memory_of(self._device)
            step.end(self._last_end)
            self._last_end = step.ended
        if self._capture is not None:
            with suppress_errors("keep a step"):
                self._capture.end_step()
        self._begin(step.number + 1)
        self._pipeline.run(step)
