# SPDX-License-Identifier: BSD-3-Clause
"""Collects the numbers of each step: from the batches, the losses, and the optimizer's step itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..optim import Handle
from ..optim.step_plan import StepPlan
from .actions import Dispatcher
from .async_copy import LateValues, Value
from .incidents.capture import Capture
from .measure.activations import ActivationStatistics, TokenIds
from .measure.gradients import HISTOGRAM_EVERY, Gradients, limit_of, numbers_of
from .measure.weights import WeightStatistics, is_due
from .open_step import OpenStep, learning_rates, memory_of
from .rank_sync import Ranks, loss_and_norm
from .skip_latch import SkipLatch
from .suppress import guarded

MEMORY_EVERY = 10  # steps


@dataclass
class Parts:
    """What a watcher looks at, each None where that was not asked for."""

    activations: ActivationStatistics | None
    activations_every: int
    weights: WeightStatistics | None
    weights_every: int
    token_ids: TokenIds
    latch: SkipLatch | None
    ranks: Ranks | None
    dispatcher: Dispatcher
    together: LateValues | None  # what the processes do together
    capture: Capture | None = None


class Watcher:
    """The observer of an attached optimizer. Hands each step, when it is complete, to `finish`.

    A step is complete when the optimizer has made it and a loss was given. Losses that are given after the
    step count as that step's; without any the step is complete when the next one begins.
    """

    def __init__(
        self,
        handle: Handle,
        scaler: torch.amp.GradScaler | None,
        parts: Parts,
        finish: Callable[[OpenStep, dict[str, Value]], None],
    ) -> None:
        self._handle, self._scaler, self._parts, self._finish = handle, scaler, parts, finish
        self._last_end: float | None = None
        self._device = next(p.device for g in handle.optimizer.param_groups for p in g["params"])
        self._is_closed = False
        self._begin(0)

    @property
    def number(self) -> int:
        """Of the step that is being made."""
        return self._step.number

    def _begin(self, number: int) -> None:
        self._step = OpenStep(number)
        activations = self._parts.activations
        if activations is not None and is_due(number, self._parts.activations_every):
            activations.begin()

    def restart(self, number: int) -> None:
        """Forget the step that has begun and count from `number` on."""
        if self._parts.activations is not None:
            self._parts.activations.end()
        self._parts.token_ids.take()
        if self._parts.capture is not None:
            self._parts.capture.restart(number)
        self._begin(number)

    def close(self) -> None:
        """Remove all hooks; what is told from now on is passed over."""
        self._is_closed = True
        if self._parts.activations is not None:
            self._parts.activations.end()
        self._parts.token_ids.remove()
        if self._parts.capture is not None:
            self._parts.capture.close()

    # What the training loop tells.

    def add_batch(self, batch: Any, sample_ids: Any) -> None:
        if self._is_closed:
            return
        self.complete_if_made()
        guarded(self._step.add_batch, batch, sample_ids)
        if self._parts.capture is not None:
            guarded(self._parts.capture.add_batch, batch, sample_ids)

    def add_losses(self, losses: dict[str, Value]) -> None:
        if self._is_closed:
            return
        if self._step.made and self._step.loss_count:
            self.complete()
        self._step.add_losses(losses)
        if self._parts.capture is not None:
            guarded(self._parts.capture.add_loss, losses["loss"])
        if self._step.made:
            self.complete()

    def complete_if_made(self) -> None:
        if self._step.made:
            self.complete()

    def drop(self) -> None:
        """Forget the step that has begun: it was interrupted."""
        self.restart(self._step.number)

    def fail(self, error: BaseException) -> None:
        """The step will not be made, or has been and something failed after it."""
        self._step.error = f"{type(error).__name__}: {error}"
        self.complete()

    # What the optimizer's step tells.

    @torch.no_grad()
    def before_update(self, plan: StepPlan | None) -> Tensor | None:
        """Called when the gradients have been measured; returns a flag that leaves the step out, or None."""
        if self._is_captured():
            return None
        self.complete_if_made()
        held = self._decide(plan)
        if self._parts.weights is not None:
            self._step.values |= self._parts.weights.before_step(self._parts.weights_every)
        guarded(self._measure, plan)
        return held

    def _is_captured(self) -> bool:
        """Whether the step is made to be replayed later, where nobody is called."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _scale(self) -> Tensor | None:
        scaler = self._scaler
        return scaler._scale if scaler is not None and scaler.is_enabled() else None

    def _measure(self, plan: StepPlan | None) -> None:
        step = self._step
        step.lr, values = learning_rates(self._handle.optimizer)
        step.values |= values
        if (scale := self._scale()) is not None:
            step.values["loss_scale"] = scale.clone()  # update() changes it in place
        if self._parts.capture is not None:
            self._parts.capture.before_update()
        if plan is not None:
            with_norms = step.number % HISTOGRAM_EVERY == 0
            step.gradients = Gradients.of(plan, with_norms)
            step.values |= numbers_of(plan, with_norms) | limit_of(self._handle)

    def _decide(self, plan: StepPlan | None) -> Tensor | None:
        """Compare with the other processes, and decide whether the step is left out.

        Here and not when the step is complete: in the optimizer's step all of them are at the same place.
        Whatever they do together they do here too, wherever and whenever each is told a batch or a loss.
        """
        step, parts = self._step, self._parts
        if parts.together is not None:
            parts.together.poll(wait=True)  # of a GPU: what was agreed in the step before
        everyone = None if parts.ranks is None else self._gather(parts.ranks, plan)
        held = None
        observes = plan is not None and plan.inputs.observes
        if parts.latch is not None and not observes and (plan is not None or everyone is not None):
            held, step.values["closed_for"] = self._hold(parts.latch, plan, everyone)
            step.values["held"] = held
            step.decision = parts.latch.decisions
        if everyone is not None:
            step.values["ranks"] = everyone
            if parts.together is not None:
                told = {"requests": everyone[:, -2], "request_steps": everyone[:, -1]}
                label = (step.number, step.decision)
                parts.together.send(label, told if held is None else told | {"held": held})
        return held

    def _hold(
        self, latch: SkipLatch, plan: StepPlan | None, everyone: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scale = self._scale()
        if everyone is not None:
            loss, told, total_norm = loss_and_norm(everyone)
            return latch.decide(loss, total_norm, told, scale)
        assert plan is not None
        known = self._step.mean_losses().get("loss")
        if known is not None and not isinstance(known, Tensor):
            known = torch.full((), known, dtype=torch.float64, device=self._device)
        return latch.decide(known, plan.summary[:, 0].amax(), None, scale)

    @torch.no_grad()
    def after_step(self) -> None:
        """Called when the optimizer, or a scaler in its place, is done with the step."""
        if self._is_captured():
            return
        step = self._step
        guarded(self._look_back)
        step.made = True
        if step.loss_count:
            self.complete()

    def _look_back(self) -> None:
        step = self._step
        if self._parts.weights is not None:
            step.values |= self._parts.weights.after_step()
        left_out = self._handle.left_out()
        if left_out is not None:
            step.values["left_out"] = left_out
        elif self._scaler is None:
            warnings.warn(
                "a GradScaler calls the optimizer's step and may leave it out unseen: pass it to "
                "fastclip.Monitor or fastclip.attach as scaler=, else such steps are missing in the records",
                stacklevel=2,
            )

    def complete(self) -> None:
        """Send the step on its way, and begin the next."""
        step = self._step
        guarded(self._close)
        if self._parts.capture is not None:
            guarded(self._parts.capture.end_step)
        self._begin(step.number + 1)
        self._finish(step, step.values)

    def _close(self) -> None:
        step, parts = self._step, self._parts
        if parts.activations is not None:
            step.values |= parts.activations.end()
        step.values |= parts.token_ids.take() | step.batches.values
        for name, loss in step.mean_losses().items():
            step.values["loss" if name == "loss" else f"losses/{name}"] = _scalar(loss)
        if step.number % MEMORY_EVERY == 0:
            step.memory = memory_of(self._device)
        step.end(self._last_end)
        self._last_end = step.ended

    def _gather(self, ranks: Ranks, plan: StepPlan | None) -> Tensor:
        loss = self._step.mean_losses().get("loss")
        counts = [v for k, v in self._step.batches.values.items() if k.endswith(("/nan", "/inf"))]
        requests, request_step = self._parts.dispatcher.ask()
        total_norm: Value | None = None
        if self._parts.latch is not None:  # without a gradient here that of the others counts
            total_norm = -math.inf if plan is None else plan.summary[:, 0].amax()
        numbers = {
            "loss": None if loss is None else _scalar(loss),
            "losses_given": float(loss is not None),
            "batch_nonfinite": sum(counts) if counts else None,
            "seconds": self._step.seconds,
            "total_norm": total_norm,
            "requests": float(requests),
            "request_step": float(request_step),
        }
        return ranks.gather(numbers, self._device)


def _scalar(loss: Value) -> Value:
    return loss.reshape(()) if isinstance(loss, Tensor) else float(loss)
