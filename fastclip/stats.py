# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of gradients, tensor by tensor, from the pass that clips them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import loss_scale
from .backends import reference
from .collect import (
    NamedParameters,
    named_gradients,
    require_extremes,
    require_max_norm,
    require_nonfinite,
)
from .distributed import lists

Groups = str | Sequence[Hashable] | Callable[[str], Hashable] | None
MaxNorm = float | Tensor | Mapping[Hashable, float]


class PerTensor(NamedTuple):
    """Statistics of each gradient, in the order of the parameters. Tensors of shape [N]."""

    norm: Tensor
    nan_count: Tensor
    inf_count: Tensor


class TensorStats(NamedTuple):
    """One gradient, told in Python numbers."""

    name: str
    norm: float
    nan_count: int
    inf_count: int


class GradStats:
    """What one pass over the gradients found. All attributes that are Tensors stay on the device.

    Attributes:
        names: the name of each gradient's parameter; "parameters[3]" where none was given.
        norm_type: the order p of the norms.
        labels: the label of each group, in the order of the groups; empty without groups.
        total_norm: the norm before clipping, [] or, with groups, [G]; float32, or float64 if any gradient is.
        clip_coef: min(1, max_norm / (total_norm + 1e-6)), shaped like total_norm; 1 where nothing is clipped.
            Under "skip" and "error" it was not applied if found_inf is 1. None if only statistics were asked.
        found_inf: 1.0 if a NaN or Inf was found, or the norm or the coefficient is not a number >= 0; else
            0.0. [], float32.
        nan_count, inf_count: elements that are NaN or Inf, over all gradients. [], int64.
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
    ) -> None:
        self.names = list(names)
        self.norm_type = norm_type
        self.labels = list(labels)
        self._inv_scale = inv_scale
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

    def worst(self, k: int = 5) -> list[TensorStats]:
        """The k gradients with the most non-finite elements and, among equals, the largest norms.

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
    """The sentence that names the gradients with NaN or Inf, the worst first."""
    bad = [t for t in stats.worst(len(stats.names)) if t.nan_count + t.inf_count > 0]
    if not bad:
        return f"the total norm is {stats.total_norm.tolist()} though every element is finite"
    shown = ", ".join(f"{t.name} ({t.nan_count} NaN, {t.inf_count} Inf)" for t in bad[:10])
    more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
    return f"{len(bad)} of {len(stats.names)} gradients hold NaN or Inf: {shown}{more}"


def clip_and_check(
    grads: list[Tensor],
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    names: Sequence[str] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """lists.clip_ with the mode "error" too, which waits for the device.

    Raises:
        RuntimeError: "error" and a non-finite gradient. No gradient was changed.
    """
    mode = "skip" if nonfinite == "error" else nonfinite
    summary, stats = lists.clip_(grads, max_norm, norm_type, mode, groups, inv_scale)
    if nonfinite == "error" and bool((summary[:, 2] > 0).any()):
        names = names or [f"gradient {i}" for i in range(len(grads))]
        found = describe_nonfinite(GradStats(summary, stats, names, norm_type))
        raise RuntimeError(f"{found}. No gradient was changed (nonfinite='error').")
    return summary, stats


def number_groups(
    groups: Groups, names: list[str], indices: list[int], num_parameters: int
) -> tuple[list[int], list[Hashable]]:
    """The group number of each gradient, and the labels by number."""
    if groups is None:
        return [], []
    if isinstance(groups, str):
        if groups != "tensor":
            raise ValueError(
                "expected groups to be 'tensor', a label for each parameter or a function of the name, "
                f"but got {groups!r}"
            )
        each: list[Hashable] = list(names)
    elif callable(groups):
        each = [groups(name) for name in names]
    else:
        if len(groups) != num_parameters:
            raise ValueError(
                f"expected groups to label each of the {num_parameters} parameters, "
                f"but got {len(groups)} labels"
            )
        each = [groups[index] for index in indices]
    if groups == "tensor":
        return list(range(len(names))), each
    numbers = {label: number for number, label in enumerate(dict.fromkeys(each))}
    return [numbers[label] for label in each], list(numbers)


def max_norm_of_groups(max_norm: MaxNorm, labels: list[Hashable]) -> float | Tensor:
    if isinstance(max_norm, Mapping):
        if missing := [label for label in labels if label not in max_norm]:
            raise ValueError(f"expected max_norm to hold every group's limit, but got none for {missing}")
        limits = [require_max_norm(max_norm[label]) for label in labels]
        return torch.tensor(limits, dtype=torch.float64)
    return require_max_norm(max_norm, max(1, len(labels)))


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
) -> GradStats:
    """Clip as :func:`fastclip.clip_grad_norm_` does and return all that the pass found.

    Nothing waits for the device, unless `nonfinite` is "error".

    Args:
        parameters: Tensors, or (name, Tensor) pairs such as ``model.named_parameters()``. The names tell
            which parameter a number belongs to.
        max_norm: the limit, >= 0. With `groups` also a Tensor of shape [G], or a mapping from label to limit.
        norm_type: the order p of the norm; ``inf`` for the largest element.
        nonfinite: "propagate", "error", "zero" or "skip", as for :func:`fastclip.clip_grad_norm_`. "skip"
            leaves all groups as they are if one is bad.
        groups: one norm and one coefficient for each group, all in the same pass: a label for each parameter,
            a function from name to label, or "tensor" for a group of each gradient.
        scaler, optimizer: as for :func:`fastclip.clip_grad_norm_`. The statistics are of unscaled gradients.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fastclip.clip_grad_norm_`, before any gradient changes.
    """
    norm_type = float(norm_type)
    require_nonfinite(nonfinite)
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads, names, indices = named_gradients(items)
    numbers, labels = number_groups(groups, names, indices, len(items))
    max_norm = max_norm_of_groups(max_norm, labels)
    unscaling = loss_scale.begin(scaler, optimizer, grads)
    if not grads:
        return GradStats(torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(0, 3), [], norm_type)
    require_extremes(grads, norm_type)
    inv_scale = unscaling.inv_scale
    summary, stats = clip_and_check(grads, max_norm, norm_type, nonfinite, numbers, names, inv_scale)
    unscaling.finish(summary)
    return GradStats(summary, stats, names, norm_type, labels, inv_scale)


@torch.no_grad()
def grad_stats(
    parameters: NamedParameters,
    norm_type: float = 2.0,
    *,
    groups: Groups = None,
) -> GradStats:
    """Norms and NaN and Inf counts of all gradients in one pass that changes nothing.

    Args:
        parameters, norm_type, groups: as for :func:`clip_`.

    Returns:
        GradStats whose clip_coef is None.
    """
    norm_type = float(norm_type)
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads, names, indices = named_gradients(items)
    numbers, labels = number_groups(groups, names, indices, len(items))
    if not grads:
        return GradStats(torch.zeros(1, 1), torch.zeros(0, 3), [], norm_type)
    require_extremes(grads, norm_type)
    total_norm, stats = lists.grad_stats(grads, norm_type, groups=numbers)
    return GradStats(total_norm.unsqueeze(1), stats, names, norm_type, labels)
