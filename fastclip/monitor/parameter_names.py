# SPDX-License-Identifier: BSD-3-Clause
"""What parameters are called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..optim.step_inputs import names_in


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names by the model; of what the model does not have, the place in the optimizer."""
    return names_in(optimizer) | {p: name for name, p in model.named_parameters(remove_duplicate=False)}


class ParameterNames:
    """Names by parameter, also of those that are added later."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names: dict[Tensor, str] = {}

    def __call__(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            self._names = parameter_names(self._model, self._optimizer)
        return self._names.get(parameter, "a removed parameter")
