# SPDX-License-Identifier: BSD-3-Clause
"""The pass over an optimizer's gradients that decides how its step is made.

Two ways lead to the same update. Torch's fused optimizers take two device scalars: `grad_scale`, by which
their kernel divides each gradient, and `found_inf`, which makes it skip the update. For them the gradients
are only read here. For every other optimizer they are clipped in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import scaler_state
from ..backends import reference
from ..collect import require_norm
from ..dispatch import run_clip, run_stats, tensors_of
from ..policies import Policy
from ..policies.apply import PolicyResult, measure_with_policy, scale_by_policy
from . import step_plan
from .fused import is_fused
from .step_inputs import StepInputs
from .step_plan import StepPlan


def plan_step(inputs: StepInputs) -> StepPlan:
    """Read the gradients once and, where the optimizer's kernel cannot clip them, clip them in place.

    Raises:
        ValueError: float16 gradients would have to be unscaled in place.
    """
    require_norm(inputs.grads, inputs.norm_type)
    inv_scale = None if inputs.grad_scale is None else scaler_state.inverse(inputs.grad_scale)
    fused = is_fused(inputs.optimizer)
    if inputs.observe_only:
        return _observe(inputs, inv_scale, fused)
    if inputs.policy is not None:
        return _clip_by_policy(inputs, inputs.policy, inv_scale, fused)
    if fused and not inputs.groups and inputs.mode != "zero":
        total_norm, stats = run_stats(inputs.grads, inputs.norm_type)
        # The kernels take a float32 scalar, which would round the coefficient of float64 gradients.
        if total_norm.dtype is not torch.float64:
            return _clip_in_kernel(inputs, total_norm[0], stats, inv_scale)
    return _clip_in_place(inputs, inv_scale, fused)


def plan_skipped_step(inputs: StepInputs) -> StepPlan:
    """Measure the gradients of a step that a loss scaler skipped without calling it."""
    total_norm, stats = run_stats(inputs.grads, inputs.norm_type, groups=inputs.groups)
    summary = total_norm.unsqueeze(1)
    return StepPlan(inputs, stats, None, fused=False, cached_summary=summary, found_inf=True)


def _observe(inputs: StepInputs, inv_scale: Tensor | None, fused: bool) -> StepPlan:
    norm, stats = run_stats(inputs.grads, inputs.norm_type, groups=inputs.groups)
    if inv_scale is not None:
        norm = (norm.double() * inv_scale.to(norm.device)).to(norm.dtype)
    found = inputs.found_inf  # what the scaler has set for the optimizer's kernel
    plan = StepPlan(inputs, stats, inv_scale, fused, norm.unsqueeze(1))
    plan.found_inf = False if found is None else (found != 0).any().to(torch.float32)
    return plan


def _clip_by_policy(inputs: StepInputs, policy: Policy, inv_scale: Tensor | None, fused: bool) -> StepPlan:
    """Ask the policy for the limit once, between the pass that reads the gradients and the clip."""
    r = inputs
    result = measure_with_policy(r.grads, policy, r.norm_type, r.mode, r.groups, inv_scale)
    inputs = replace(inputs, max_norm=result.max_norm, policy=None)
    summary, stats = result.summary, result.stats
    wide = summary.dtype is torch.float64
    if fused and not (r.groups or policy.per_tensor or r.mode == "zero" or wide):
        return _clip_in_kernel(inputs, summary[0, 0], stats, inv_scale, result)
    if inv_scale is not None:
        scaler_state.require_unscalable(tensors_of(r.grads))
    scale_by_policy(r.grads, result, r.mode, r.groups, inv_scale)
    plan = StepPlan(inputs, stats, inv_scale, fused, summary, in_place=True, policy_result=result)
    plan.found_inf = _found_inf(plan, (summary[:, 2] > 0).any())
    return plan


def _clip_in_kernel(
    inputs: StepInputs,
    norm: Tensor,
    stats: Tensor,
    inv_scale: Tensor | None,
    policy_result: PolicyResult | None = None,
) -> StepPlan:
    plan = StepPlan(inputs, stats, inv_scale, fused=True, grad_scale=inputs.grad_scale)
    if policy_result is not None:
        plan.policy_result, plan.cached_summary = policy_result, policy_result.summary
        clip_coef, found = plan.summary[0, 1], plan.summary[0, 2] > 0
    else:
        clip_coef, found = _coefficient_and_flag(plan, norm)
    # On the CPU the coefficient is known, and a kernel without grad_scale writes no gradients.
    if not step_plan.is_on_host(clip_coef) or clip_coef != 1:
        plan.grad_scale = clip_coef.reciprocal()
        if inputs.grad_scale is not None:
            plan.grad_scale = plan.grad_scale * inputs.grad_scale.to(plan.grad_scale).reshape(())
        too_large = plan.grad_scale.isinf() & (clip_coef > 0)  # it would make every gradient 0
        if step_plan.is_on_host(too_large) and bool(too_large):
            return _clip_in_place(inputs, inv_scale, fused=True)
        found = found | too_large
    plan.found_inf = _found_inf(plan, found)
    return plan


def _coefficient_and_flag(plan: StepPlan, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clip coefficient and whether the step is not finite, [] each."""
    inputs, inv_scale = plan.inputs, plan.inv_scale
    if not (step_plan.is_on_host(norm) and inputs.norm_type > 0 and bool(norm.isfinite())):
        return plan.summary[0, 1], plan.summary[0, 2] > 0
    # Every element is finite too: three scalars are computed faster than a summary.
    if inv_scale is not None:
        norm = (norm.double() * inv_scale).float().reshape(())
    clip_coef = reference.clip_coefficient(norm, inputs.max_norm)
    found = ~norm.isfinite() | ~(clip_coef >= 0)
    if inv_scale is None:
        plan.summary_scalars = norm, clip_coef, found
    return clip_coef, found


def _clip_in_place(inputs: StepInputs, inv_scale: Tensor | None, fused: bool) -> StepPlan:
    if inv_scale is not None:
        scaler_state.require_unscalable(tensors_of(inputs.grads))
    r = inputs
    summary, stats = run_clip(r.grads, r.max_norm, r.norm_type, r.mode, r.groups, inv_scale)
    plan = StepPlan(inputs, stats, inv_scale, fused, summary, in_place=True)
    plan.found_inf = _found_inf(plan, (summary[:, 2] > 0).any())
    return plan


def _found_inf(plan: StepPlan, found: Tensor) -> bool | Tensor:
    """Return whether to skip the step. The host waits for the answer only where it has to know it."""
    inputs = plan.inputs
    if inputs.mode != "skip":
        return False
    if inputs.found_inf is not None:
        found = found | (inputs.found_inf.to(found.device) != 0).any()
    return plan.skip_flag(found)
