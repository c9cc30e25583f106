# SPDX-License-Identifier: BSD-3-Clause
"""One norm for each of several groups of gradients: what a caller may pass for groups and their limits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from .collect import require_max_norm
from .distributed import ProcessGroups
from .policies import Policy

Groups = str | Sequence[Hashable] | Callable[[str], Hashable] | None
MaxNorm = float | Tensor | Mapping[Hashable, float] | Policy


def require_groups_or_process_group(groups: Groups, process_group: ProcessGroups) -> None:
    """Raise ValueError for both: the processes of such a group have other parameters, so other groups."""
    if groups is not None and process_group is not None:
        raise ValueError("expected groups or process_group, but got both")


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


def max_norm_of_groups(
    max_norm: float | Tensor | Mapping[Hashable, float], labels: list[Hashable], groups: Groups
) -> float | Tensor:
    """The limit as a number or a tensor of one for each group."""
    if isinstance(max_norm, Mapping):
        if groups is None:
            raise ValueError("expected groups together with a mapping as max_norm, but got none")
        if missing := [label for label in labels if label not in max_norm]:
            raise ValueError(f"expected max_norm to hold every group's limit, but got none for {missing}")
        limits = [require_max_norm(max_norm[label]) for label in labels]
        return torch.tensor(limits, dtype=torch.float64)
    return require_max_norm(max_norm, max(1, len(labels)))
