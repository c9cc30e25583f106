# SPDX-License-Identifier: BSD-3-Clause
"""One step with a policy: a pass that reads, the policy's limit, and a pass that writes where it clips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import reference
from ..dispatch import GradientList, run_scale, run_stats
from ..distributed import ShardedGradients
from .base import Policy

# What every clip of fastclip adds to the norm, as torch does.
_EPSILON = 1e-6


@dataclass(frozen=True)
class PolicyResult:
    """The statistics of one pass and the limit that a policy derived from them. Nothing has been written.

    Attributes:
        summary: [G, 3], see :func:`fastclip.backends.reference.clip_`; with one limit for each gradient, the
            smallest coefficient.
        stats: the statistics of the gradients, [N, 3].
        max_norm: [G] or [N], float64: the limit from which the coefficient is computed as from a number.
        skipped: [], bool: the policy skips the step, rather than NaN or Inf.
        clip_coef: the coefficients, [N], of a policy with one limit for each gradient; else None.
    """

    summary: Tensor
    stats: Tensor
    max_norm: Tensor
    skipped: Tensor
    clip_coef: Tensor | None = None


def require_policy(policy: Policy, groups: object, nonfinite: str, has_scaler: bool = False) -> Policy:
    """Return the policy if it goes together with the other arguments of a call.

    Args:
        policy: the policy.
        groups: the argument `groups` of the call.
        nonfinite: the argument `nonfinite` of the call.
        has_scaler: whether a loss scaler is at work in a call that clips but does not make the step.

    Raises:
        ValueError: groups with one limit for each gradient; a policy that skips steps, but not "skip", or a
            loss scaler whose step the call does not see.
    """
    kind = type(policy).__name__
    if policy.per_tensor and groups is not None:
        raise ValueError(f"expected groups=None together with {kind}, which clips each gradient by itself")
    if policy.skips and nonfinite != "skip":
        raise ValueError(
            f"expected nonfinite='skip' together with {kind}, which skips steps, but got {nonfinite!r}"
        )
    if policy.skips and has_scaler:
        raise ValueError(
            f"{kind} skips steps, which a GradScaler would count as overflows and answer with a lower scale; "
            "use fastclip.attach instead of scaler="
        )
    return policy


def max_norm_for(limit: Tensor, norm: Tensor) -> Tensor:
    """Return the max_norm for which max_norm / (norm + 1e-6) is min(1, limit / norm), elementwise.

    With the limit itself a norm of 1e-8 would be clipped to a hundredth of it at every step, and an average
    of clipped norms would go to 0. The result is Inf where nothing is clipped, since a coefficient of exactly
    1 touches no gradient. A limit of NaN stays NaN, and where the norm is NaN or Inf the limit is unchanged.
    """
    unclipped = torch.where(norm <= limit, math.inf, limit)
    return torch.where(norm > limit, limit + _EPSILON * (limit / norm), unclipped)


def measure_with_policy(
    grads: GradientList,
    policy: Policy,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> PolicyResult:
    """Read the gradients once and ask the policy for the limit.

    The other arguments are those of :func:`fastclip.dispatch.run_clip`.

    Raises:
        TypeError, ValueError: the policy's limit is not a tensor, or has the wrong shape.
    """
    measured, stats = run_stats(grads, norm_type, nonfinite == "zero", groups)
    totals = (stats, norm_type)
    if isinstance(grads, ShardedGradients) and grads.totals is not None:
        totals = grads.totals
    total_norm = reference.totals(*totals, groups)
    norms = reference.totals(stats, norm_type, range(len(stats))) if len(stats) else stats[:, 0]
    if inv_scale is not None:
        total_norm, norms = total_norm * inv_scale.to(total_norm), norms * inv_scale.to(norms)
    total_norm = total_norm.to(measured.dtype)
    own = norms if policy.per_tensor else total_norm
    limit = _require_limit(policy.limit(total_norm, norms), own, policy)
    max_norm = max_norm_for(limit, own.to(limit.dtype))
    of_all = math.inf if policy.per_tensor else max_norm
    summary = reference.summarize(*totals, of_all, groups, inv_scale, measured.dtype)
    overflow = (totals[0][:, 1:] > 0).any() | ~total_norm.isfinite().all()
    clip_coef = None
    if policy.per_tensor and len(norms):
        clip_coef = reference.clip_coefficient(norms, max_norm).to(measured.dtype)
        smallest = clip_coef.amin()
        found = torch.maximum(summary[0, 2], (~(smallest >= 0)).to(summary))
        summary = torch.stack([summary[0, 0], smallest, found]).unsqueeze(0)
    return PolicyResult(summary, stats, max_norm, ~overflow & ~(summary[:, 1] >= 0).all(), clip_coef)


def _require_limit(limit: Tensor, own: Tensor, policy: Policy) -> Tensor:
    """Return the policy's limit, one number for each norm of `own`."""
    kind = type(policy).__name__
    if not isinstance(limit, Tensor):
        raise TypeError(f"expected {kind}.limit() to return a Tensor, but got {type(limit).__name__}")
    if limit.numel() not in (1, len(own)):
        raise ValueError(
            f"expected {kind}.limit() to return one element or {len(own)}, one a "
            f"{'gradient' if policy.per_tensor else 'group'}, but got shape {list(limit.shape)}"
        )
    dtype = reference.accumulation_dtype(own.device)
    return limit.detach().to(own.device, dtype).reshape(-1).expand(len(own))


def scale_by_policy(
    grads: GradientList,
    result: PolicyResult,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> None:
    """Clip what :func:`measure_with_policy` has read, with the same arguments.

    A coefficient of 1 writes nothing.
    """
    if result.clip_coef is None:
        factors = reference.factors(result.summary, nonfinite, groups, inv_scale)
    else:
        factors = result.clip_coef
        if inv_scale is not None:
            factors = factors * inv_scale.to(factors)
        if nonfinite == "skip":
            factors = torch.where((result.summary[:, 2] > 0).any(), 1.0, factors)
    zero = nonfinite == "zero"
    if factors.device.type == "cpu" and not torch.compiler.is_compiling():
        # Looking costs no waiting here, and saves the pass over the gradients.
        zero = zero and bool((result.stats[:, 1:] > 0).any())
        if not zero and bool((factors == 1).all()):
            return
    run_scale(grads, factors, zero)
