# SPDX-License-Identifier: BSD-3-Clause
"""What all processes decide together in a step: whether it is skipped, and which actions they take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..optim.step_plan import StepPlan
from .actions import ActionRunner
from .async_copy import AsyncCopy, Value
from .rank_sync import RankSync, loss_and_norm
from .skip_latch import SkipLatch
from .step_in_progress import StepInProgress, scalar
from .step_pipeline import StepPipeline


class StepDecision:
    """Compares the processes, decides whether the step is skipped, and lets all of them act together.

    It does so inside ``optimizer.step()``, where all processes are at the same place, and not when the step
    is complete: each may be given batches and losses at other times.

    Args:
        latch: None if no step is to be skipped.
        rank_sync: None if the processes do not compare.
        actions: what events do.
        pipeline: where records come from.
        device: that of the parameters.
    """

    def __init__(
        self,
        latch: SkipLatch | None,
        rank_sync: RankSync | None,
        actions: ActionRunner,
        pipeline: StepPipeline,
        device: torch.device,
    ) -> None:
        self._latch, self._rank_sync, self._actions = latch, rank_sync, actions
        self._pipeline, self._device = pipeline, device
        # What all processes act on together, on a GPU in the step after.
        self._agreed = AsyncCopy(on_demand=True) if rank_sync is not None and rank_sync.acts else None

    def decide(self, step: StepInProgress, plan: StepPlan | None, scale: Tensor | None) -> Tensor | None:
        """Return whether the step is skipped, [], bool, without waiting for it; None if nothing decides.

        Args:
            step: gets the numbers of the decision.
            plan: None for a step without gradients.
            scale: the factor of the loss, []; None without a scaler.

        Raises:
            TrainingUnstable: a process has asked for the action "raise" in the step before.
        """
        self._act_together(wait=True)
        everyone = None if self._rank_sync is None else self._gather(self._rank_sync, step, plan)
        skipped = None
        observes = plan is not None and plan.inputs.observe_only
        if self._latch is not None and not observes and (plan is not None or everyone is not None):
            skipped, reason = self._ask_latch(self._latch, step, plan, everyone, scale)
            step.values |= {"skipped_by_latch": skipped, "latch_reason": reason}
            step.decision = self._latch.decisions
        if everyone is not None:
            step.values["ranks"] = everyone
            if self._agreed is not None:
                numbers: dict[str, Value] = {"requests": everyone[:, -2], "request_steps": everyone[:, -1]}
                if skipped is not None:
                    numbers["skipped_by_latch"] = skipped
                self._agreed.start((step.number, step.decision), numbers)
                self._act_together()
        return skipped

    def _gather(self, rank_sync: RankSync, step: StepInProgress, plan: StepPlan | None) -> Tensor:
        loss = step.mean_losses().get("loss")
        nonfinite = [v for k, v in step.batches.values.items() if k.endswith(("/nan", "/inf"))]
        requests, request_step = self._actions.take_requests()
        total_norm: Value | None = None
        if self._latch is not None:  # without a gradient here the norm of the others counts
            total_norm = -math.inf if plan is None else plan.summary[:, 0].amax()
        numbers = {
            "loss": None if loss is None else scalar(loss),
            "losses_given": float(loss is not None),
            "batch_nonfinite": sum(nonfinite) if nonfinite else None,
            "seconds": step.seconds,
            "total_norm": total_norm,
            "requests": float(requests),
            "request_step": float(request_step),
        }
        return rank_sync.gather(numbers, self._device)

    def _ask_latch(
        self,
        latch: SkipLatch,
        step: StepInProgress,
        plan: StepPlan | None,
        everyone: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if everyone is not None:
            mean, loss_is_given, largest_norm = loss_and_norm(everyone)
            return latch.decide(mean, largest_norm, loss_is_given, scale)
        assert plan is not None
        loss = step.mean_losses().get("loss")
        if loss is not None and not isinstance(loss, Tensor):
            loss = torch.full((), loss, dtype=torch.float64, device=self._device)
        return latch.decide(loss, plan.summary[:, 0].amax(), None, scale)

    def _act_together(self, wait: bool = False) -> None:
        """Do what the processes have agreed on, as far as it is known, or all with `wait`."""
        if self._agreed is None:
            return
        for (number, decision), values in self._agreed.finished(wait):
            if values.get("skipped_by_latch") and self._latch is not None:
                self._pipeline.advance(wait=True)  # the record comes first
                self._latch.release(decision)
            self._actions.run_agreed(number, values["requests"], values["request_steps"])
