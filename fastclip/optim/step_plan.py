# SPDX-License-Identifier: BSD-3-Clause
"""One pass over the gradients of an optimizer, and what it means for the step that follows.

Two ways lead to the same update. Torch's fused optimizers take two device scalars: `grad_scale`, by which
their kernel divides each gradient, and `found_inf`, on which it does nothing. There the gradients are only
read here. For every other optimizer they are clipped in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW

from .. import scaler_state
from ..backends import reference
from ..collect import require_norm
from ..dispatch import run_clip, run_stats, tensors_of
from ..distributed import ShardedGradients
from ..gradient_stats import GradStats, describe_nonfinite, nonfinite_per_rank_of
from ..policies import Policy
from ..policies.apply import PolicyResult, measure_with_policy, scale_by_policy
from .step_inputs import StepInputs
from .wrapping import attributes, without_gradients


@dataclass
class StepPlan:
    """How a step is to be made.

    Attributes:
        stats, summary: what the pass found, see :func:`fastclip.backends.reference.clip_`. The summary is
            made when it is asked for, where the step can do without.
        known_numbers: the three numbers of the summary, [] each, where they are all that it holds.
        inv_scale: what makes the gradients' true values of those the pass read; None where they were true.
        fused: whether the optimizer's kernel takes `grad_scale` and `found_inf`.
        found_inf: whether the step is to be left out: a bool where the host knows, else [], float32.
        grad_scale: for the kernel; None where it need not change the gradients.
        in_place: whether the gradients have been unscaled and clipped.
        limited: what a policy made of it, where there is one.
    """

    inputs: StepInputs
    stats: Tensor
    inv_scale: Tensor | None
    fused: bool
    known_summary: Tensor | None = None
    found_inf: bool | Tensor = False
    grad_scale: Tensor | None = None
    in_place: bool = False
    limited: PolicyResult | None = None
    known_numbers: tuple[Tensor, Tensor, Tensor] | None = None
    kept_totals: tuple[Tensor, float] | None = None
    kept_alarms: Tensor | None = None

    @property
    def overflow(self) -> bool | Tensor:
        """`found_inf` as a loss scaler is to know it: what a policy leaves out says nothing of the scale."""
        if self.limited is None or self.found_inf is False:
            return self.found_inf
        return (~self.limited.skipped).to(torch.float32) * self.found_inf

    @property
    def summary(self) -> Tensor:
        if self.known_summary is None and self.known_numbers is not None:
            self.known_summary = torch.stack([n.to(torch.float32) for n in self.known_numbers]).reshape(1, 3)
        if self.known_summary is None:
            r = self.inputs
            totals = self.stats, r.norm_type
            if (own_totals := self.totals) is not None:
                totals = own_totals
            self.known_summary = reference.summarize(
                *totals, r.max_norm, r.groups, self.inv_scale, torch.float32
            )
        return self.known_summary

    @property
    def totals(self) -> tuple[Tensor, float] | None:
        """What the norm is made of where `stats` is not all, as with process groups."""
        grads = self.inputs.grads
        return grads.totals if isinstance(grads, ShardedGradients) else self.kept_totals

    @property
    def nonfinite_per_rank(self) -> Tensor | None:
        """[world size]: NaN and Inf that each process saw; None where all gradients are here."""
        grads = self.inputs.grads
        return nonfinite_per_rank_of(grads) if isinstance(grads, ShardedGradients) else self.kept_alarms

    def let_go(self) -> None:
        """Keep the statistics and not the gradients, so that zero_grad() frees them."""
        self.kept_totals, self.kept_alarms = self.totals, self.nonfinite_per_rank
        self.inputs.grads = []

    def grad_stats(self) -> GradStats:
        """The statistics, with names."""
        r, nonfinite_per_rank = self.inputs, self.nonfinite_per_rank
        clip_coef = None if self.limited is None else self.limited.clip_coef
        return GradStats(
            *(
                self.summary,
                self.stats,
                r.names(),
                r.norm_type,
                r.labels,
                self.inv_scale,
                nonfinite_per_rank,
                clip_coef,
            )
        )

    def raise_if_error(self) -> None:
        """Raise RuntimeError if `nonfinite` is "error" and NaN or Inf was found. Nothing has been changed."""
        if self.inputs.raises and bool(self.found_inf):
            raise RuntimeError(
                f"{describe_nonfinite(self.grad_stats())}. No gradient and no parameter was changed "
                "(nonfinite='error')."
            )

    def hold(self, flag: Tensor) -> None:
        """Leave the step out too if the flag, [], is not 0."""
        if isinstance(self.found_inf, Tensor):
            self.found_inf = torch.maximum(self.found_inf, flag.to(self.found_inf))
        elif not self.found_inf:
            self.found_inf = _left_out(self, flag)

    def apply(self, stack: ExitStack) -> None:
        """Bring the optimizer into the state for its step, until `stack` is closed."""
        if self.inputs.observes:
            return
        optimizer = self.inputs.optimizer
        flag: Tensor | None = None
        if isinstance(self.found_inf, Tensor):
            flag = self.found_inf
            new = _parameters_without_momentum(optimizer, self.inputs.parameters)
            stack.callback(_zero_new_momentum, optimizer, new, flag)
        elif self.found_inf:
            stack.enter_context(without_gradients(optimizer, self.inputs.parameters))
        if flag is not None or self.grad_scale is not None or self.inputs.is_scaled:
            stack.enter_context(attributes(optimizer, grad_scale=self.grad_scale, found_inf=flag))


def make(inputs: StepInputs) -> StepPlan:
    """Read the gradients once and, where the optimizer's kernel cannot clip them, clip them in place.

    Raises:
        ValueError: float16 gradients that would have to be unscaled in place.
    """
    require_norm(inputs.grads, inputs.norm_type)
    inv_scale = None if inputs.grad_scale is None else scaler_state.inverse(inputs.grad_scale)
    fused = _is_fused(inputs.optimizer)
    if inputs.observes:
        return _observe(inputs, inv_scale, fused)
    if inputs.policy is not None:
        return _by_policy(inputs, inputs.policy, inv_scale, fused)
    if fused and not inputs.groups and inputs.mode != "zero":
        total_norm, stats = run_stats(inputs.grads, inputs.norm_type)
        # The kernels take a float32 scalar, which would round the coefficient of float64 gradients.
        if total_norm.dtype is not torch.float64:
            return _plan_hand_over(inputs, total_norm[0], stats, inv_scale)
    return _clip_in_place(inputs, inv_scale, fused)


def _observe(inputs: StepInputs, inv_scale: Tensor | None, fused: bool) -> StepPlan:
    norm, stats = run_stats(inputs.grads, inputs.norm_type, groups=inputs.groups)
    if inv_scale is not None:
        norm = (norm.double() * inv_scale.to(norm.device)).to(norm.dtype)
    found = inputs.found_inf  # what the scaler has told the optimizer's kernel
    plan = StepPlan(inputs, stats, inv_scale, fused, norm.unsqueeze(1))
    plan.found_inf = False if found is None else (found != 0).any().to(torch.float32)
    return plan


def _by_policy(inputs: StepInputs, policy: Policy, inv_scale: Tensor | None, fused: bool) -> StepPlan:
    """As :func:`make`; the policy is asked once, between the pass that reads and the clip."""
    r = inputs
    limited = measure_with_policy(r.grads, policy, r.norm_type, r.mode, r.groups, inv_scale)
    inputs = replace(inputs, max_norm=limited.max_norm, policy=None)
    summary, stats = limited.summary, limited.stats
    wide = summary.dtype is torch.float64
    if fused and not (r.groups or policy.per_tensor or r.mode == "zero" or wide):
        return _plan_hand_over(inputs, summary[0, 0], stats, inv_scale, limited)
    if inv_scale is not None:
        scaler_state.require_unscalable(tensors_of(r.grads))
    scale_by_policy(r.grads, limited, r.mode, r.groups, inv_scale)
    plan = StepPlan(inputs, stats, inv_scale, fused, summary, in_place=True, limited=limited)
    plan.found_inf = _found_inf(plan, (summary[:, 2] > 0).any())
    return plan


def _plan_hand_over(
    inputs: StepInputs,
    norm: Tensor,
    stats: Tensor,
    inv_scale: Tensor | None,
    limited: PolicyResult | None = None,
) -> StepPlan:
    plan = StepPlan(inputs, stats, inv_scale, fused=True, grad_scale=inputs.grad_scale, limited=limited)
    if limited is not None:
        plan.known_summary = limited.summary
    if limited is None and _host_knows(norm) and inputs.norm_type > 0 and bool(norm.isfinite()):
        # Then every element is finite too, and the few numbers left are told faster than a summary is made.
        if inv_scale is not None:
            norm = (norm.double() * inv_scale).float().reshape(())
        clip_coef = reference.clip_coefficient(norm, inputs.max_norm)
        found = ~norm.isfinite() | ~(clip_coef >= 0)
        if inv_scale is None:
            plan.known_numbers = norm, clip_coef, found
    else:
        clip_coef, found = plan.summary[0, 1], plan.summary[0, 2] > 0
    # On the CPU the coefficient is known, and a kernel without grad_scale writes no gradients.
    if not _host_knows(clip_coef) or clip_coef != 1:
        plan.grad_scale = clip_coef.reciprocal()
        if inputs.grad_scale is not None:
            plan.grad_scale = plan.grad_scale * inputs.grad_scale.to(plan.grad_scale).reshape(())
        too_large = plan.grad_scale.isinf() & (clip_coef > 0)  # it would make every gradient 0
        if _host_knows(too_large) and bool(too_large):
            return _clip_in_place(inputs, inv_scale, fused=True)
        found = found | too_large
    plan.found_inf = _found_inf(plan, found)
    return plan


def _clip_in_place(inputs: StepInputs, inv_scale: Tensor | None, fused: bool) -> StepPlan:
    if inv_scale is not None:
        scaler_state.require_unscalable(tensors_of(inputs.grads))
    r = inputs
    summary, stats = run_clip(r.grads, r.max_norm, r.norm_type, r.mode, r.groups, inv_scale)
    plan = StepPlan(inputs, stats, inv_scale, fused, summary, in_place=True)
    plan.found_inf = _found_inf(plan, (summary[:, 2] > 0).any())
    return plan


def _found_inf(plan: StepPlan, found: Tensor) -> bool | Tensor:
    """Whether the step is to be left out. The host waits for the answer only where it has to know."""
    inputs = plan.inputs
    if inputs.mode != "skip":
        return False
    if inputs.found_inf is not None:
        found = found | (inputs.found_inf.to(found.device) != 0).any()
    return _left_out(plan, found)


def _left_out(plan: StepPlan, flag: Tensor) -> bool | Tensor:
    """The flag for the optimizer's kernel, or for the host where it makes the step."""
    if plan.fused and not plan.inputs.raises and not _host_knows(flag) and not _needs_truth(plan.inputs):
        return flag.to(torch.float32)
    _require_readable(flag)
    return bool(flag)


def _host_knows(number: Tensor) -> bool:
    """Whether reading the number costs no waiting."""
    return number.device.type == "cpu"


def _require_readable(flag: Tensor) -> None:
    if flag.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "expected a fused optimizer or nonfinite='propagate' while a CUDA graph is captured, but "
            "otherwise the host has to read, in each step, whether NaN or Inf was found"
        )


def _has_fused_step(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the class steps by torch's own code, which hands both attributes to a kernel."""
    # Unwrapped, since torch wraps the step of a class anew when it first makes an instance of it.
    own = inspect.unwrap(kind.step)
    return any(own is inspect.unwrap(known.step) for known in (Adam, AdamW, SGD, Adagrad))


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of the optimizer's groups with gradients are updated by a kernel that can clip.

    The groups decide: `fused` can be given to each and overrules what the optimizer was made with.
    """
    if not _has_fused_step(type(optimizer)):
        return False
    groups = [g for g in optimizer.param_groups if any(p.grad is not None for p in g["params"])]
    return all(group.get("fused") for group in groups)


def _parameters_without_momentum(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Those for which SGD is about to make a momentum buffer."""
    if not isinstance(optimizer, SGD) or not any(group["momentum"] for group in optimizer.param_groups):
        return []
    return [p for p in parameters if optimizer.state.get(p, {}).get("momentum_buffer") is None]


def _zero_new_momentum(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], found_inf: Tensor
) -> None:
    """torch's fused SGD leaves the buffers of a skipped first step uninitialised, whatever memory holds."""
    for parameter in parameters:
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            buffer.masked_fill_(found_inf.to(buffer.device) != 0, 0)


def _needs_truth(inputs: StepInputs) -> bool:
    """Whether the update differs for the first step that is applied: SGD does not dampen its momentum then.

    Zeros in the buffers cannot tell the kernel that, so the host leaves the step out by itself.
    """
    new = _parameters_without_momentum(inputs.optimizer, inputs.parameters)
    return bool(new) and any(group["dampening"] for group in inputs.optimizer.param_groups)
