# SPDX-License-Identifier: BSD-3-Clause
"""The plan of one step: what the pass over the gradients found, and what the optimizer is given."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import reference
from ..distributed import ShardedGradients
from ..gradient_stats import GradStats, describe_nonfinite, nonfinite_per_rank_of
from ..policies.apply import PolicyResult
from .fused import needs_host_decision, parameters_without_momentum, zero_new_momentum
from .step_inputs import StepInputs
from .wrapping import temporary_attributes, without_gradients


@dataclass
class StepPlan:
    """What one pass over the gradients found, and how the step that follows is made.

    Attributes:
        inputs: what the pass was asked for.
        stats, summary: what the pass found, see :func:`fastclip.backends.reference.clip_`. The summary is
            computed on first use, since many steps do without.
        inv_scale: the factor that makes the gradients true that the pass read; None where they were.
        fused: whether the optimizer's kernel takes `grad_scale` and `found_inf`.
        found_inf: whether to skip the step: a bool where the host knows, else [], float32.
        grad_scale: what the kernel divides gradients by; None where it need not change them.
        in_place: whether the gradients have been unscaled and clipped.
        policy_result: the limit and coefficients of a policy; None without one.
        cached_summary: the summary, once it is known.
        summary_scalars: total norm, clip coefficient and non-finite flag, [] each, where the summary holds
            nothing else.
        saved_totals, saved_nonfinite_per_rank: kept by :meth:`release_gradients`.
    """

    inputs: StepInputs
    stats: Tensor
    inv_scale: Tensor | None
    fused: bool
    cached_summary: Tensor | None = None
    found_inf: bool | Tensor = False
    grad_scale: Tensor | None = None
    in_place: bool = False
    policy_result: PolicyResult | None = None
    summary_scalars: tuple[Tensor, Tensor, Tensor] | None = None
    saved_totals: tuple[Tensor, float] | None = None
    saved_nonfinite_per_rank: Tensor | None = None

    @property
    def overflow(self) -> bool | Tensor:
        """`found_inf` for a loss scaler: a step that a policy skips says nothing about the scale."""
        if self.policy_result is None or self.found_inf is False:
            return self.found_inf
        return (~self.policy_result.skipped).to(torch.float32) * self.found_inf

    @property
    def summary(self) -> Tensor:
        """Total norm, clip coefficient, and 1 where the step must not be applied, for each group, [G, 3]."""
        if self.cached_summary is None and self.summary_scalars is not None:
            scalars = [number.to(torch.float32) for number in self.summary_scalars]
            self.cached_summary = torch.stack(scalars).reshape(1, 3)
        if self.cached_summary is None:
            r = self.inputs
            totals = self.totals or (self.stats, r.norm_type)
            self.cached_summary = reference.summarize(
                *totals, r.max_norm, r.groups, self.inv_scale, torch.float32
            )
        return self.cached_summary

    @property
    def totals(self) -> tuple[Tensor, float] | None:
        """The statistics of the norm and its order where `stats` lacks other ranks' shards, else None."""
        grads = self.inputs.grads
        return grads.totals if isinstance(grads, ShardedGradients) else self.saved_totals

    @property
    def nonfinite_per_rank(self) -> Tensor | None:
        """The NaN and Inf that each process saw, [world size]; None where all gradients are local."""
        grads = self.inputs.grads
        if isinstance(grads, ShardedGradients):
            return nonfinite_per_rank_of(grads)
        return self.saved_nonfinite_per_rank

    def release_gradients(self) -> None:
        """Keep the statistics but not the gradients, so that zero_grad() frees them."""
        self.saved_totals, self.saved_nonfinite_per_rank = self.totals, self.nonfinite_per_rank
        self.inputs.grads = []

    def grad_stats(self) -> GradStats:
        """Return the statistics, with names."""
        r = self.inputs
        return GradStats(
            self.summary,
            self.stats,
            r.names(),
            r.norm_type,
            r.labels,
            self.inv_scale,
            self.nonfinite_per_rank,
            None if self.policy_result is None else self.policy_result.clip_coef,
        )

    def raise_if_error(self) -> None:
        """Raise RuntimeError if `nonfinite` is "error" and NaN or Inf was found. Nothing has been changed."""
        if self.inputs.raises and bool(self.found_inf):
            raise RuntimeError(
                f"{describe_nonfinite(self.grad_stats())}. No gradient and no parameter was changed "
                "(nonfinite='error')."
            )

    def skip_if(self, flag: Tensor) -> None:
        """Skip the step also if the flag, [], is not 0."""
        if isinstance(self.found_inf, Tensor):
            self.found_inf = torch.maximum(self.found_inf, flag.to(self.found_inf))
        elif not self.found_inf:
            self.found_inf = self.skip_flag(flag)

    def skip_flag(self, flag: Tensor) -> bool | Tensor:
        """Return the flag as the kernel takes it, [], float32, or a bool where the host has to decide."""
        inputs = self.inputs
        if (
            self.fused
            and not inputs.raises
            and not is_on_host(flag)
            and not needs_host_decision(inputs.optimizer, inputs.parameters)
        ):
            return flag.to(torch.float32)
        require_readable(flag)
        return bool(flag)

    def apply(self, stack: ExitStack) -> None:
        """Bring the optimizer into the state for its step, until `stack` is closed."""
        if self.inputs.observe_only:
            return
        optimizer = self.inputs.optimizer
        flag: Tensor | None = None
        if isinstance(self.found_inf, Tensor):
            flag = self.found_inf
            new = parameters_without_momentum(optimizer, self.inputs.parameters)
            stack.callback(zero_new_momentum, optimizer, new, flag)
        elif self.found_inf:
            stack.enter_context(without_gradients(optimizer, self.inputs.parameters))
        if flag is not None or self.grad_scale is not None or self.inputs.is_scaled:
            stack.enter_context(temporary_attributes(optimizer, grad_scale=self.grad_scale, found_inf=flag))


def is_on_host(number: Tensor) -> bool:
    """Return whether the host can read the number without waiting for a device."""
    return number.device.type == "cpu"


def require_readable(flag: Tensor) -> None:
    """Raise RuntimeError where the host would have to read the flag while a CUDA graph is captured."""
    if flag.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this step cannot be captured in a CUDA graph, because the host has to read whether to skip it: "
            "expected a fused optimizer or nonfinite='propagate'"
        )
