# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer step run again: forward and backward of its micro-batches, and the norm of its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..gradient_stats import grad_stats
from ..monitor.incidents.rng import set_rng_state
from ..monitor.parameter_names import parameter_names
from ..optim import attach, handle_of
from ..scaler_state import inverse
from . import samples
from .build import (
    HALVES,
    BuiltTraining,
    ReplayError,
    all_parameters,
    error_line,
    float32_parameters,
    restore,
    restore_buffers,
    restore_model,
)
from .step_parts import BatchPart, MicroBatch, Outcome, RunMode, eval_mode


class StepRunner:
    """Runs steps of an incident on the objects of build(), each from the same state.

    Attributes:
        runs: the number of runs so far.
        problems: sentences on what could not be restored, as the keys of a dict.
    """

    def __init__(self, built: BuiltTraining, state: Mapping[str, Any], setup: Mapping[str, Any]) -> None:
        self.built, self._state, self.setup = built, state, setup
        self.names = parameter_names(built.model, built.optimizer)
        self.runs = 0
        self._updated = True
        self.autocast_in_loss_function = False
        self.problems: dict[str, None] = {}

    def reset(self, state: Mapping[str, Any] | None = None) -> None:
        """Restore the state before the step, or another; without an update since, only the model."""
        if state is not None or self._updated:
            restore(self.built, self._state if state is None else state)
            self._updated = state is not None
            return
        restore_model(self.built.model, self._state["model"])
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter in all_parameters(self.built):
            parameter.grad = None

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled, as in the training."""
        scaler = self.built.scaler
        return bool(self.setup.get("scaled")) and scaler is not None and scaler.is_enabled()

    def run(self, parts: Iterable[BatchPart], mode: RunMode) -> Outcome:
        """Run the step from the state before it; only gradients and buffers change.

        Raises:
            ReplayError: the loss function raises, or does not return a loss; the backward pass raises.
        """
        self.reset()
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.built.model, mode.eval_kinds))
            if mode.float32:
                stack.enter_context(float32_parameters(self.built.model))
            return self.measured(parts, mode)

    def measured(self, parts: Iterable[BatchPart], mode: RunMode) -> Outcome:
        """Run the step from the current state."""
        outcome = self.forward_backward(parts, mode)
        if mode.backward:
            self._measure(outcome, scaled=self.is_scaled and not mode.float32)
        self.drop_gradients()
        return outcome

    def forward_backward(self, parts: Iterable[BatchPart], mode: RunMode) -> Outcome:
        """Return the losses and keep the gradients, scaled as in the training."""
        self.runs += 1
        losses: list[Tensor] = []
        for part in parts:
            loss = self._forward(part, mode)
            losses.append(loss.detach())
            if mode.backward:
                self._backward(loss, part.weight / mode.divisor, scaled=self.is_scaled and not mode.float32)
        return _outcome(losses)

    def _forward(self, part: BatchPart, mode: RunMode) -> Tensor:
        micro, built = part.micro, self.built
        batch = micro.batch
        if part.indices is not None:
            batch = samples.chosen(batch, micro.size, part.indices)
        batch = samples.copied(batch, built.device)
        if mode.float32:
            batch = samples.as_float32(batch, HALVES)
        restore_buffers(built.model, micro.buffers)
        # Not if it is in this mode already: build() may have set parts of it to the other.
        if not mode.eval_kinds and built.model.training != micro.training:
            built.model.train(micro.training)
        with ExitStack() as stack:
            self._set_generators(micro, stack)
            stack.enter_context(torch.set_grad_enabled(mode.backward))
            for device, known in micro.autocast.items():
                enabled = bool(known["enabled"]) and not mode.float32
                dtype = getattr(torch, str(known["dtype"]).removeprefix("torch."))
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if mode.float32:
                stack.callback(built.model.register_forward_pre_hook(self._notice_autocast).remove)
            return self._loss(batch, mode.backward)

    def _set_generators(self, micro: MicroBatch, stack: ExitStack) -> None:
        """Set the generators as at monitor.batch(), and again as at the start of the forward.

        Random numbers may be drawn in between.
        """
        at_batch = micro.rng if micro.rng_at_batch is None else micro.rng_at_batch
        self.problems |= dict.fromkeys(set_rng_state(at_batch))
        if micro.rng_at_batch is None:
            return

        hooks: list[RemovableHandle] = []

        def at_first_forward(module: nn.Module, inputs: Any) -> None:
            hooks[0].remove()
            set_rng_state(micro.rng)

        hooks.append(self.built.model.register_forward_pre_hook(at_first_forward))
        stack.callback(hooks[0].remove)

    def _notice_autocast(self, module: nn.Module, inputs: Any) -> None:
        self.autocast_in_loss_function |= torch.is_autocast_enabled(self.built.device.type)

    def _loss(self, batch: Any, with_gradient: bool) -> Tensor:
        try:
            result = self.built.loss_function(self.built.model, batch)
        except Exception as error:
            raise ReplayError(f"loss_function(model, batch) raised {error_line(error)}") from error
        loss = result
        if isinstance(result, Mapping):
            loss = result["loss"] if "loss" in result else next(iter(result.values()), None)
        elif isinstance(result, (tuple, list)):
            loss = result[0] if result else None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ReplayError(
                f"expected loss_function(model, batch) to return a loss of one element, but got {got}"
            )
        if with_gradient and not loss.requires_grad:
            raise ReplayError("the loss of loss_function(model, batch) does not depend on the parameters")
        return loss.reshape(())

    def _backward(self, loss: Tensor, weight: float, scaled: bool) -> None:
        if weight != 1:
            # Divided as in a training loop: multiplying by the reciprocal would round differently.
            inverse_weight = 1 / weight
            loss = loss / inverse_weight if inverse_weight == int(inverse_weight) else loss * weight
        if scaled:
            assert self.built.scaler is not None
            loss = self.built.scaler.scale(loss)
        try:
            loss.backward()
        except Exception as error:
            raise ReplayError(f"the backward pass raised {error_line(error)}") from error

    # Gradients.

    @torch.no_grad()
    def _measure(self, outcome: Outcome, scaled: bool) -> None:
        """Measure norm and counts of the unscaled gradients before clipping, as in the training."""
        named = [
            (self.names.get(p, "a parameter"), p)
            for group in self.built.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not named:
            return
        scale = None
        if scaled:
            scaler = self.built.scaler
            assert scaler is not None
            scale = scaler._scale
        self._count(outcome, named, None if scale is None else inverse(scale))
        if scale is not None:
            # Some scalers unscale the gradients before they are measured, others unscale the norm.
            outcome.in_place = replace(outcome)
            for _, p in named:
                assert p.grad is not None
                p.grad.mul_(inverse(scale).to(p.grad.device))
            self._count(outcome.in_place, named, None)

    def _count(self, outcome: Outcome, named: list[tuple[str, Tensor]], inv_scale: Tensor | None) -> None:
        norm_type = float(self.setup.get("norm_type", 2.0))
        stats = grad_stats(named, norm_type)
        outcome.nan_count, outcome.inf_count = int(stats.nan_count), int(stats.inf_count)
        outcome.gradients = stats.worst(len(stats.names))
        norm = stats.total_norm
        if self.setup.get("nonfinite") == "zero":  # then the norm is over the finite elements
            grads = [(p, p.grad) for _, p in named if p.grad is not None]
            for p, grad in grads:
                p.grad = grad.nan_to_num(0.0, 0.0, 0.0)
            norm = grad_stats(named, norm_type).total_norm
            for p, grad in grads:
                p.grad = grad
        if inv_scale is not None:
            norm = (norm.double() * inv_scale.to(norm.device)).to(norm.dtype)
            outcome.gradients = [t._replace(norm=t.norm * float(inv_scale)) for t in outcome.gradients]
        outcome.total_norm = float(norm)

    # Update.

    def update(self, max_norm: float | None, rates: Sequence[float] | None, factor: float = 1.0) -> None:
        """Step the optimizer with the current gradients, clipped as in the training.

        Args:
            rates: the learning rates of the parameter groups; None for those of the optimizer.
            factor: multiplies the learning rates.
        """
        built = self.built
        self._updated = True
        groups = built.optimizer.param_groups
        before = [group["lr"] for group in groups]
        known = rates if rates and len(rates) == len(groups) else before
        for group, rate in zip(groups, known, strict=True):
            _set_rate(group, float(rate) * factor)
        scaler = built.scaler if self.is_scaled else None
        handle = None
        if handle_of(built.optimizer) is None and max_norm is not None:
            handle = attach(
                built.optimizer,
                max_norm,
                norm_type=float(self.setup.get("norm_type", 2.0)),
                nonfinite=self.setup.get("nonfinite") or "skip",
                scaler=scaler,
            )
        try:
            if scaler is None:
                built.optimizer.step()
            else:
                scaler.step(built.optimizer)
                scaler.update()
        except Exception as error:
            raise ReplayError(f"optimizer.step() raised {error_line(error)}") from error
        finally:
            if handle is not None:
                handle.detach()
            for group, rate in zip(groups, before, strict=True):
                _set_rate(group, rate)
        self.drop_gradients()


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"] = torch.as_tensor(rate, dtype=group["lr"].dtype, device=group["lr"].device).clone()
    else:
        group["lr"] = rate


def _outcome(losses: list[Tensor]) -> Outcome:
    """Return the losses and their mean, summed in the order of a monitor."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return Outcome([float(loss) for loss in losses], float(total / len(losses) if losses[1:] else total))
