# SPDX-License-Identifier: BSD-3-Clause
"""The norm of the parameters, and how much a step changes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import run_stats
from ...distributed import ProcessGroups, shard_gradients
from ..async_copy import Value
from ..parameter_names import ParameterNames
from ..suppress_errors import suppress_errors
from .activations import local_tensor
from .sampling import is_due


class WeightStatistics:
    """Compares some of the parameters with a copy from before the step, others the next time.

    Only matrices are compared where there are some: a bias that starts at 0 changes by 100 %.

    Args:
        optimizer: the one whose parameters are measured; some may be added later.
        names: the names of the parameters.
        every: steps between two samples, see :func:`is_due`; 0 for none.
        max_bytes: what the copies may take; a parameter that is larger is never compared.
        process_group: as for :func:`fastclip.attach`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: ParameterNames,
        every: int,
        max_bytes: int,
        process_group: ProcessGroups = None,
    ) -> None:
        self._optimizer, self._names = optimizer, names
        self._every, self._max_bytes = every, max_bytes
        self._process_group = process_group
        # Counted here, as the norm is a collective: all processes make the same steps, while one that fails
        # on a process, before the optimizer, has a number there alone.
        self.steps = 0
        self.position = 0  # of the next parameter in turn
        self._copies: list[tuple[str, Tensor, Tensor]] = []

    @torch.no_grad()
    def before_step(self) -> dict[str, Value]:
        """Return the norm of all parameters and copy some of them, if the step is sampled."""
        self.steps += 1
        if not is_due(self.steps - 1, self._every):
            return {}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        with suppress_errors("copy parameters before the step"):
            self._copy(parameters)
        norm, _ = run_stats(shard_gradients(parameters, parameters, self._process_group) or parameters, 2.0)
        return {"param_norm": norm[0]}

    def _copy(self, parameters: list[Tensor]) -> None:
        chosen = self._next_subset([p for p in parameters if p.dim() > 1] or parameters)
        self._copies = [(self._names[p], p, local_tensor(p.detach()).clone()) for p in chosen]

    @torch.no_grad()
    def after_step(self) -> dict[str, Value]:
        """Return the update ratios of the parameters that were copied."""
        copies, self._copies = self._copies, []
        if not copies:
            return {}
        before = [copy for _, _, copy in copies]
        norms = torch._foreach_norm(before)
        changes = torch._foreach_norm(
            torch._foreach_sub([local_tensor(p.detach()) for _, p, _ in copies], before)
        )
        ratios = torch._foreach_div(changes, norms)
        return {f"update_ratio/{name}": ratio for (name, _, _), ratio in zip(copies, ratios, strict=True)}

    def _next_subset(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return as many as fit, from where the last subset ended; empty ones have no ratio."""
        subset: list[Tensor] = []
        left = self._max_bytes
        for _ in range(len(parameters)):
            parameter = parameters[self.position % len(parameters)]
            size = local_tensor(parameter.detach()).nbytes
            if left < size <= self._max_bytes:
                break
            self.position = (self.position + 1) % len(parameters)
            if 0 < size <= left:
                subset.append(parameter)
                left -= size
        return subset

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps, self.position = state["steps"], state["position"]
