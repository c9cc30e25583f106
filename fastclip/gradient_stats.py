# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of gradients, tensor by tensor, from the pass that clips them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import scaler_state
from .backends import reference
from .collect import (
    Groups,
    MaxNorm,
    NamedParameters,
    collect_named_gradients,
    max_norm_of_groups,
    number_groups,
    require_groups_or_process_group,
    require_nonfinite,
    require_norm,
)
from .dispatch import GradientList, run_clip, run_stats
from .distributed import ProcessGroups, ShardedGradients
from .policies import Policy
from .policies.apply import measure_with_policy, require_policy, scale_by_policy


class PerTensor(NamedTuple):
    """Statistics of each gradient, in the order of the parameters; tensors of shape [N]."""

    norm: Tensor
    nan_count: Tensor
    inf_count: Tensor


class TensorStats(NamedTuple):
    """Statistics of one gradient, as Python numbers."""

    name: str
    norm: float
    nan_count: int
    inf_count: int


class GradStats:
    """The statistics that one pass over the gradients found. Attributes that are Tensors stay on the device.

    Attributes:
        names: the name of each gradient's parameter; "parameters[3]" where none was given.
        norm_type: the order p of the norms.
        labels: the label of each group, in the order of the groups; empty without groups.
        total_norm: the norm before clipping, [] or, with groups, [G]; float32, or float64 if any gradient is.
        clip_coef: min(1, max_norm / (total_norm + 1e-6)), shaped like total_norm; 1 where nothing is clipped.
            Under "skip" and "error" it was not applied if found_inf is 1. None where only statistics were
            requested. A policy with one limit for each gradient gives [N]; one that skips the step gives NaN.
        found_inf: 1.0 if a NaN or Inf was found, or the norm or clip coefficient is not a finite number >= 0,
            as where a policy skips the step; else 0.0. [], float32.
        nan_count, inf_count: the number of elements that are NaN or Inf, over all gradients; [], int64.
        per_tensor: :class:`PerTensor`, the same for each gradient.
    """

    def __init__(
        self,
        summary: Tensor,
        stats: Tensor,
        names: Sequence[str],
        norm_type: float,
        labels: Sequence[Hashable] = (),
        inv_scale: Tensor | None = None,
        nonfinite_per_rank: Tensor | None = None,
        clip_coef: Tensor | None = None,
    ) -> None:
        self.names = list(names)
        self.norm_type = norm_type
        self.labels = list(labels)
        self._inv_scale = inv_scale
        self._nonfinite_per_rank = nonfinite_per_rank
        self._clip_coef = clip_coef
        self._summary = summary
        self._stats = stats

    def _column(self, index: int) -> Tensor:
        column = self._summary[:, index]
        return column if self.labels else column[0]

    @property
    def total_norm(self) -> Tensor:
        return self._column(0)

    @property
    def clip_coef(self) -> Tensor | None:
        if self._clip_coef is not None:
            return self._clip_coef
        return self._column(1) if self._summary.shape[1] == 3 else None

    @property
    def found_inf(self) -> Tensor:
        if self._summary.shape[1] == 3:
            found = (self._summary[:, 2] > 0).any()
        else:
            found = (self._stats[:, 1:] > 0).any() | ~self._summary[:, 0].isfinite().all()
        return found.to(torch.float32)

    @property
    def nan_count(self) -> Tensor:
        return self._stats[:, 1].sum().to(torch.int64)

    @property
    def inf_count(self) -> Tensor:
        return self._stats[:, 2].sum().to(torch.int64)

    @property
    def per_tensor(self) -> PerTensor:
        every = range(len(self.names))
        norm = reference.totals(self._stats, self.norm_type, every) if self.names else self._stats[:, 0]
        if self._inv_scale is not None:
            norm = norm * self._inv_scale.to(norm)
        counts = self._stats[:, 1:].to(torch.int64)
        return PerTensor(norm, counts[:, 0], counts[:, 1])

    @property
    def nonfinite_ranks(self) -> list[int]:
        """The ranks that saw NaN or Inf in their part of the gradients. Waits for the device.

        Empty where no gradients are sharded and no process group was given: then a process knows only about
        itself.
        """
        if self._nonfinite_per_rank is None:
            return []
        return [rank for rank, count in enumerate(self._nonfinite_per_rank.tolist()) if count > 0]

    def worst(self, k: int = 5) -> list[TensorStats]:
        """Return the k gradients with the most non-finite elements and, among equals, the largest norms.

        Waits for the device.
        """
        rows = [
            TensorStats(name, norm, nan_count, inf_count)
            for name, norm, nan_count, inf_count in zip(
                self.names, *(column.tolist() for column in self.per_tensor), strict=True
            )
        ]
        # A NaN norm has no order of its own; its gradient leads by its count.
        rows.sort(
            key=lambda r: (r.nan_count + r.inf_count, r.norm if r.norm == r.norm else 0.0),
            reverse=True,
        )
        return rows[:k]

    def __repr__(self) -> str:
        count = len(self.names)
        return f"GradStats({count} gradients, total_norm={self.total_norm}, clip_coef={self.clip_coef})"


def describe_nonfinite(stats: GradStats) -> str:
    """Return the sentence that names the gradients with NaN or Inf, the worst first."""
    bad = [t for t in stats.worst(len(stats.names)) if t.nan_count + t.inf_count > 0]
    if not bad and stats.nonfinite_ranks:
        return f"gradients on rank {', '.join(map(str, stats.nonfinite_ranks))} hold NaN or Inf"
    if not bad:
        return f"the total norm is {stats.total_norm.tolist()} though every element is finite"
    shown = ", ".join(f"{t.name} ({t.nan_count} NaN, {t.inf_count} Inf)" for t in bad[:10])
    more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
    ranks = f", seen by rank {', '.join(map(str, seen))}" if (seen := stats.nonfinite_ranks) else ""
    return f"{len(bad)} of {len(stats.names)} gradients hold NaN or Inf: {shown}{more}{ranks}"


def clip_gradients(
    grads: GradientList,
    max_norm: float | Tensor | Policy,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    names: Sequence[str] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Clip as :func:`fastclip.dispatch.run_clip`, also with a policy and in the mode "error".

    The mode "error" waits for the device.

    Returns:
        The summary, the statistics and, from a policy with one limit for each gradient, the coefficients,
        [N].

    Raises:
        RuntimeError: "error" and a non-finite gradient. No gradient was changed.
    """
    mode = "skip" if nonfinite == "error" else nonfinite
    clip_coef = None
    if isinstance(max_norm, Policy):
        result = measure_with_policy(grads, max_norm, norm_type, mode, groups, inv_scale)
        scale_by_policy(grads, result, mode, groups, inv_scale)
        summary, stats, clip_coef = result.summary, result.stats, result.clip_coef
    else:
        summary, stats = run_clip(grads, max_norm, norm_type, mode, groups, inv_scale)
    if nonfinite == "error" and bool((summary[:, 2] > 0).any()):
        names = names or [f"gradient {i}" for i in range(len(stats))]
        per_rank = nonfinite_per_rank_of(grads)
        found = GradStats(summary, stats, names, norm_type, nonfinite_per_rank=per_rank)
        raise RuntimeError(f"{describe_nonfinite(found)}. No gradient was changed (nonfinite='error').")
    return summary, stats, clip_coef


def nonfinite_per_rank_of(grads: GradientList) -> Tensor | None:
    """Return the non-finite counts of each process in the last pass, [world size]; None without shards."""
    return grads.nonfinite_per_rank if isinstance(grads, ShardedGradients) else None


@torch.no_grad()
def clip_(
    parameters: NamedParameters,
    max_norm: MaxNorm,
    norm_type: float = 2.0,
    *,
    nonfinite: str = "propagate",
    groups: Groups = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: ProcessGroups = None,
) -> GradStats:
    """Clip as :func:`fastclip.clip_grad_norm_` does and return all statistics of the pass.

    Nothing waits for the device, unless `nonfinite` is "error".

    Args:
        parameters: Tensors, or (name, Tensor) pairs such as ``model.named_parameters()``. The names identify
            the parameters in the statistics and in errors.
        max_norm: the limit, >= 0. With `groups` also a Tensor of shape [G], or a mapping from label to limit.
            Or one of fastclip.policies, which gives each group, or each gradient, its own.
        norm_type: the order p of the norm; ``inf`` for the largest element.
        nonfinite: "propagate", "error", "zero" or "skip", as for :func:`fastclip.clip_grad_norm_`. "skip"
            leaves all groups unchanged if one of them is not finite.
        groups: one norm and one coefficient for each group, all in the same pass: a label for each parameter,
            a function from name to label, or "tensor" for a group of each gradient.
        scaler, optimizer: as for :func:`fastclip.clip_grad_norm_`. The statistics are of unscaled gradients.
        process_group: as for :func:`fastclip.clip_grad_norm_`; not together with `groups`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fastclip.clip_grad_norm_`, before any gradient changes.
    """
    norm_type = float(norm_type)
    require_nonfinite(nonfinite)
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    require_groups_or_process_group(groups, process_group)
    grads, names, indices = collect_named_gradients(items, process_group)
    numbers, labels = number_groups(groups, names, indices, len(items))
    unscaling = scaler_state.begin(scaler, optimizer, grads)
    if isinstance(max_norm, Policy):
        require_policy(max_norm, groups, nonfinite, scaler_state.is_scaling(scaler))
    else:
        max_norm = max_norm_of_groups(max_norm, labels, groups)
    if not grads:
        return GradStats(torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(0, 3), [], norm_type)
    require_norm(grads, norm_type)
    inv_scale = unscaling.inv_scale
    summary, stats, clip_coef = clip_gradients(
        grads, max_norm, norm_type, nonfinite, numbers, names, inv_scale
    )
    unscaling.finish(summary)
    return GradStats(
        summary, stats, names, norm_type, labels, inv_scale, nonfinite_per_rank_of(grads), clip_coef
    )


@torch.no_grad()
def grad_stats(
    parameters: NamedParameters,
    norm_type: float = 2.0,
    *,
    groups: Groups = None,
    process_group: ProcessGroups = None,
) -> GradStats:
    """Return norms and NaN and Inf counts of all gradients, from one pass that changes nothing.

    Args:
        parameters, norm_type, groups, process_group: as for :func:`clip_`.

    Returns:
        GradStats whose clip_coef is None.
    """
    norm_type = float(norm_type)
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    require_groups_or_process_group(groups, process_group)
    grads, names, indices = collect_named_gradients(items, process_group)
    numbers, labels = number_groups(groups, names, indices, len(items))
    if not grads:
        return GradStats(torch.zeros(1, 1), torch.zeros(0, 3), [], norm_type)
    require_norm(grads, norm_type)
    total_norm, stats = run_stats(grads, norm_type, groups=numbers)
    return GradStats(
        total_norm.unsqueeze(1),
        stats,
        names,
        norm_type,
        labels,
        nonfinite_per_rank=nonfinite_per_rank_of(grads),
    )
