# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of an optimizer's next step, with their names and groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collect import Groups, MaxNorm, max_norm_of_groups, number_groups
from ..dispatch import GradientList
from ..distributed import ProcessGroups, shard_gradients
from ..policies import Policy
from ..policies.apply import require_policy


@dataclass
class StepInputs:
    """The gradients of one step, and how to clip them.

    Attributes:
        parameters: the optimizer's parameters that have a gradient, on this or another process.
        grads: their gradients.
        groups, labels: the number of each gradient's group, and the label of each group; empty for one norm.
        grad_scale: the factor that is still on the gradients, one element; None if they are true.
        found_inf: not 0 if a loss scaler has found NaN or Inf in them; None if none has looked.
        names: returns the parameters' names; called only if they are needed.
        policy: gives the limit in place of `max_norm`, once the norms are known.
        observe_only: whether the gradients are only measured, and neither they nor the step changed.
    """

    optimizer: torch.optim.Optimizer
    parameters: list[Tensor]
    grads: GradientList
    max_norm: float | Tensor
    norm_type: float
    nonfinite: str
    groups: Sequence[int] = ()
    labels: Sequence[Hashable] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    names: Callable[[], list[str]] = list
    policy: Policy | None = None
    observe_only: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether a loss scaler makes the step. It skips overflows in every mode."""
        return self.grad_scale is not None or self.found_inf is not None

    @property
    def raises(self) -> bool:
        """Whether NaN or Inf is an error."""
        return self.nonfinite == "error" and not self.is_scaled

    @property
    def mode(self) -> str:
        """The `nonfinite` mode of the pass."""
        return "skip" if self.is_scaled or self.nonfinite == "error" else self.nonfinite


@dataclass(eq=False, repr=False)
class ClipOptions:
    """How to clip the gradients of an optimizer, as given to :func:`fastclip.attach`."""

    optimizer: torch.optim.Optimizer
    max_norm: MaxNorm | None
    norm_type: float
    nonfinite: str
    groups: Groups
    process_group: ProcessGroups
    names: dict[Tensor, str]

    def step_inputs(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> StepInputs:
        """Collect the gradients of the next step, with their names and groups.

        Args:
            grad_scale, found_inf: see :class:`StepInputs`.

        Raises:
            ValueError: the groups or limits do not fit the parameters.
        """
        policy: Policy | None = None
        if isinstance(self.max_norm, Policy):
            policy = require_policy(self.max_norm, self.groups, self.nonfinite)
        every = [(g, p) for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]]
        each = [p.grad for _, p in every]
        sharded = shard_gradients([p for _, p in every], each, self.process_group)
        grads: GradientList = [g for g in each if g is not None] if sharded is None else sharded
        if sharded is None:
            indices = [index for index, grad in enumerate(each) if grad is not None]
        else:
            indices = sharded.indices
        parameters = [every[index][1] for index in indices]

        def names() -> list[str]:
            return self._names_of(parameters)

        numbers, labels, max_norm = self._groups_of(every, indices)
        return StepInputs(
            self.optimizer,
            parameters,
            grads,
            max_norm,
            self.norm_type,
            self.nonfinite,
            numbers,
            labels,
            grad_scale,
            found_inf,
            names,
            policy,
            observe_only=self.max_norm is None,
        )

    def _groups_of(
        self, every: list[tuple[int, Tensor]], indices: list[int]
    ) -> tuple[list[int], list[Hashable], float | Tensor]:
        """Return group numbers, labels and limits of the groups that have a gradient."""
        groups: Groups = [g for g, _ in every] if self.groups == "param_group" else self.groups
        by_name = groups is not None and (isinstance(groups, str) or callable(groups))
        names = self._names_of([p for _, p in every]) if by_name else [""] * len(every)
        numbers, labels = number_groups(groups, names, list(range(len(every))), len(every))
        limit = self.max_norm
        known = math.inf if limit is None or isinstance(limit, Policy) else limit
        max_norm = max_norm_of_groups(known, labels, groups)
        if not labels:
            return [], [], max_norm
        used = sorted({numbers[index] for index in indices})
        renumbered = {number: position for position, number in enumerate(used)}
        if isinstance(max_norm, Tensor) and max_norm.numel() == len(labels) > len(used):
            max_norm = max_norm.reshape(-1)[used]
        return [renumbered[numbers[i]] for i in indices], [labels[number] for number in used], max_norm

    def _names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        known = names_in(self.optimizer) | self.names
        return [known.get(p, "a removed parameter") for p in parameters]


def names_in(optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the names that the optimizer was given with its parameters, else their positions."""
    return {
        p: group["param_names"][i] if "param_names" in group else f"param_groups[{g}].params[{i}]"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
